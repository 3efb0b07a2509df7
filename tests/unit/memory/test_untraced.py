"""What dispatch does not see: sizes by hand."""

from __future__ import annotations

import pytest

from megatron_mux.memory import untraced
from megatron_mux.memory.sizes import MIB


@pytest.mark.parametrize(
    ("capability", "config", "size"),
    [
        ((8, 0), None, 8_519_680),
        ((7, 5), None, 8_519_680),
        ((9, 0), None, 32 * MIB),
        ((12, 0), None, 32 * MIB),
        ((9, 0), ":4096:2:16:8", 8_519_680),
        ((9, 0), ":0:0", 0),
        ((8, 0), "nonsense", 8_519_680),
    ],
)
def test_workspaces_of_cublas(capability: tuple[int, int], config: str | None, size: int) -> None:
    assert untraced.cublas(capability, config) == size


def test_flash_attention_pads_tokens_and_heads() -> None:
    alike = untraced.flash(batch=1, heads=2, groups=2, queries=100, keys=100, head=40, itemsize=2)
    assert [size for _, size in alike] == [1 * 2 * 128 * 4, 1 * 2 * 128 * 64 * 4]
    grouped = untraced.flash(batch=1, heads=2, groups=1, queries=100, keys=100, head=40, itemsize=2)
    assert [size for _, size in grouped[2:]] == [1 * 100 * 2 * 40 * 2] * 2
    wide = untraced.flash(batch=1, heads=1, groups=1, queries=128, keys=128, head=160, itemsize=2)
    assert wide[1].size == 128 * 192 * 4


def test_other_attention() -> None:
    assert [size for _, size in untraced.cudnn(2, 4, 128, 64)] == [2 * 4 * 128 * 65 * 4]
    assert [size for _, size in untraced.efficient(2, 4, 128, 64, 2)] == [2 * 4 * 128 * 65 * 4]
    assert [size for _, size in untraced.efficient(2, 4, 128, 64, 4)] == [2 * 4 * 128 * 4]


def test_gradients_of_embeddings_and_norms() -> None:
    assert untraced.embedding(3072, 64) == []
    # Of 4,096 tokens: keys and places, five columns of runs, 4,096 rows and a tenth more.
    sizes = [size for _, size in untraced.embedding(4096, 60)]
    assert sizes == [65_536, 163_840, (4096 + 416) * 64 * 4]
    assert sizes[2] == pytest.approx((4096 + 4096 / 10) * 64 * 4, rel=0.002)
    assert untraced.norm(65_536, 1024, 2) == [] == untraced.norm(65_537, 4096, 2)
    assert [size for _, size in untraced.norm(65_537, 1024, 2)] == [2 * MIB]


def test_norms_of_many_tensors() -> None:
    assert untraced.foreach_norm([]) == []
    assert [size for _, size in untraced.foreach_norm([1, 65_536])] == [2 * 1 * 4]
    assert [size for _, size in untraced.foreach_norm([1, 65_537, 5])] == [3 * 2 * 4]


def test_a_communicator_has_three_buffers_in_each_channel() -> None:
    assert untraced.communicator(channels=1) == 4_194_304 + 524_288 + 4_915_200
    assert untraced.communicator() == 24 * 9_633_792


def test_every_entry_has_a_source_and_a_range() -> None:
    for name, entry in untraced.TABLE.items():
        assert entry.source, name
        assert 0 <= entry.least <= 1 <= entry.most, name
        assert entry.pooled == (entry.taken in ("in an operator", "by each thread")), name
