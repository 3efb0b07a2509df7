"""Attention of equal sequences: nothing of the size of all pairs of tokens, and the same result block by block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import CausalVariant
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_mux.gpus import Gpu
from megatron_mux.kernels.attention import dense as dense_attention
from megatron_mux.kernels.attention import segments as attention
from megatron_mux.kernels.attention.segments import Segment, segment_attention
from megatron_mux.memory.fake_gpu.device import DEVICE, fake_gpu
from tests.unit.memory.traced import on_a_fake_gpu

AMPERE, TURING = Gpu((8, 0), False), Gpu((7, 5), False)
LENGTH, HEADS, GROUPS = 2048, 4, 2


def inputs(length: int, seen: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = [(2, 6, length, 4), (2, 2, seen, 4), (2, 2, seen, 4)]
    return [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("largest", [1, 50, 300])
@pytest.mark.parametrize("window", [None, 1, 5, 17])
@pytest.mark.parametrize(("length", "seen"), [(19, 19), (19, 40), (1, 30)])
def test_blocks_give_what_one_mask_gives(
    length: int, seen: int, window: int | None, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for limit in (1 << 22, largest):
        monkeypatch.setattr(dense_attention, "_LARGEST_MASK", limit)
        leaves = inputs(length, seen)
        query, key, value = leaves
        out = dense_attention.dense_attention(query, key, value, 0.7, window)
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for whole, blocks in zip(*found, strict=True):
        assert torch.allclose(whole, blocks, atol=1e-12)


def test_masks_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    for length, seen, window in ((32768, 65536, None), (32768, 32768, 4096), (1, 1 << 20, 1 << 19)):
        block = dense_attention._block(length, seen, window)
        assert 1 <= block <= length
        keys = seen if window is None else block + window - 1
        assert block == 1 or block * keys <= dense_attention._LARGEST_MASK
    assert dense_attention._block(32768, 32768, 512) >= 512, (
        "blocks as long as the window, not token by token"
    )


class Largest(TorchDispatchMode):
    """The most elements of a tensor, and operators by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements, self.names = 0, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.names.add(func._schema.name)
        for tensor in made if isinstance(made, (list, tuple)) else [made]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return made


@on_a_fake_gpu
@pytest.mark.parametrize(
    ("gpu", "dtype"), [(AMPERE, torch.float32), (TURING, torch.float32), (TURING, torch.float16)]
)
@pytest.mark.parametrize("past", [0, LENGTH])
@pytest.mark.parametrize(("window", "prefixed"), [(None, False), (512, False), (None, True)])
@pytest.mark.parametrize("widths", [(20, 20), (192, 128)])
def test_on_a_gpu_nothing_is_as_large_as_all_pairs_of_tokens(
    gpu: Gpu,
    dtype: torch.dtype,
    past: int,
    window: int | None,
    prefixed: bool,
    widths: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dense_attention, "_LARGEST_MASK", 1 << 18)
    dense_attention._mask.cache_clear()  # a fake tensor belongs to its mode
    with fake_gpu(gpu), Largest() as seen:
        shapes = [(LENGTH, HEADS, widths[0]), *((LENGTH + past, GROUPS, width) for width in widths)]
        query, key, value = (torch.empty(s, dtype=dtype, device=DEVICE, requires_grad=True) for s in shapes)
        prefix = {"a": (key[:16], value[:16])} if prefixed else None
        one = [Segment("a", 0, LENGTH, 0, past)]
        out = segment_attention(query, key, value, one, scale=0.1, window=window, prefix=prefix)
        out.backward(torch.empty_like(out))
    assert "aten::_scaled_dot_product_efficient_attention_backward" in seen.names
    assert not any("math" in name or "softmax" in name for name in seen.names)
    assert seen.elements <= (LENGTH + past + 16) * HEADS * 192 < LENGTH * LENGTH
    dense_attention._mask.cache_clear()


@on_a_fake_gpu
def test_old_gpus_have_no_kernel_for_all_segments() -> None:
    for gpu, found in ((AMPERE, True), (TURING, False)):
        with fake_gpu(gpu):
            assert attention.has_one_call(DEVICE, torch.float16) is found
            assert not attention.has_one_call(DEVICE, torch.float32)


def test_the_mask_of_the_kernel_is_torchs() -> None:
    assert int(CausalVariant.LOWER_RIGHT) == dense_attention._FROM_LOWER_RIGHT
