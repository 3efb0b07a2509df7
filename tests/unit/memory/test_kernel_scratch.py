"""Scratch that kernels allocate for themselves: sizes by hand."""

from __future__ import annotations

import pytest
import torch

from megatron_mux.memory.kernel_scratch import scratch_of
from megatron_mux.memory.sizes import MIB


def _sizes(operator: str, *args: object) -> list[int]:
    return [size for _, size in scratch_of(operator, args)]


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_flash_attention_pads_tokens_and_heads() -> None:
    name = "_scaled_dot_product_flash_attention_backward"
    query, key = _empty(1, 2, 100, 40), _empty(1, 1, 100, 40)
    padded = [1 * 2 * 128 * 4, 1 * 2 * 128 * 64 * 4]
    assert _sizes(name, query, query, query) == padded
    assert _sizes(name, query, query, key) == [*padded, *[1 * 100 * 2 * 40 * 2] * 2], "grouped heads"
    wide = _empty(1, 1, 128, 160)
    assert _sizes(name, wide, wide, wide)[1] == 128 * 192 * 4


def test_packed_segments_are_128_rows_apart() -> None:
    query, bounds = _empty(100, 2, 40), torch.zeros(4)
    sizes = _sizes("torch_attn::_varlen_attn_backward", query, query, query, query, query, None, bounds)
    assert sizes == [(100 + 3 * 128) * 2 * 4, (100 + 3 * 128) * 2 * 64 * 4]


def test_other_attention() -> None:
    query, single = _empty(2, 4, 128, 64), _empty(2, 4, 128, 64, dtype=torch.float32)
    assert _sizes("_scaled_dot_product_cudnn_attention_backward", query, query) == [2 * 4 * 128 * 65 * 4]
    name = "_scaled_dot_product_efficient_attention_backward"
    assert _sizes(name, query, query) == [2 * 4 * 128 * 65 * 4]
    assert _sizes(name, single, single) == [2 * 4 * 128 * 4]


def test_gradients_of_embeddings() -> None:
    def sizes(tokens: int, hidden: int) -> list[int]:
        return _sizes("embedding_dense_backward", _empty(tokens, hidden), _empty(tokens))

    assert sizes(3072, 64) == []
    # Of 4,096 tokens: keys and places, five columns of runs, 4,096 rows and a tenth more.
    assert sizes(4096, 60) == [65_536, 163_840, (4096 + 416) * 64 * 4]
    assert sizes(4096, 60)[2] == pytest.approx((4096 + 4096 / 10) * 64 * 4, rel=0.002)


@pytest.mark.parametrize("operator", ["native_layer_norm_backward", "_fused_rms_norm_backward"])
def test_gradients_of_norms(operator: str) -> None:
    def sizes(tokens: int, hidden: int, *wanted: bool) -> list[int]:
        rows = _empty(tokens, hidden)
        return _sizes(operator, rows, rows, [True, *wanted])

    assert sizes(65_536, 1024, True) == [] == sizes(65_537, 4096, True)
    assert sizes(65_537, 1024, True) == [2 * MIB] and sizes(65_537, 1024, True, True) == [2 * MIB] * 2
    assert sizes(65_537, 1024, False) == []


def test_norms_of_many_tensors() -> None:
    assert _sizes("_foreach_norm", []) == []
    assert _sizes("_foreach_norm", [_empty(1), _empty(65_536)]) == [2 * 1 * 4]
    assert _sizes("_foreach_norm", [_empty(1), _empty(65_537), _empty(5)]) == [3 * 2 * 4]


def test_sorts_of_one_row_and_other_operators() -> None:
    assert _sizes("sort", _empty(10)) == [10 * 18]
    assert _sizes("sort", _empty(10, 10)) == [] == _sizes("sort", torch.empty(10)) == _sizes("mm")
