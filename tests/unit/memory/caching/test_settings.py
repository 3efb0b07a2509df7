"""The allocator's options: rounding by hand, and what PYTORCH_ALLOC_CONF may say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mux.errors import UserError
from megatron_mux.gpus import ALLOCATOR_VARIABLES
from megatron_mux.memory.caching.settings import Settings
from megatron_mux.memory.sizes import MIB


@pytest.mark.parametrize(
    ("divisions", "size", "rounded"),
    [
        (1, 1, 512),
        (1, 513, 1024),
        (4, 1200, 1536),  # not more than 4 x 512: as without
        (4, 2048, 2048),
        (4, 2049, 2560),  # steps of 512 between 2048 and 4096
        (4, 5 * MIB, 5 * MIB),  # 4, 5, 6, 7 MiB
        (4, 5 * MIB + 1, 6 * MIB),
        (4, 7 * MIB + 1, 8 * MIB),
        (2, 5 * MIB, 6 * MIB),
        (8, 8 * MIB, 8 * MIB),
    ],
)
def test_rounding(divisions: int, size: int, rounded: int) -> None:
    assert Settings(roundup_power2_divisions=divisions).rounded(size) == rounded


@given(st.integers(1, 1 << 40), st.sampled_from([1, 2, 4, 8, 16]))
def test_what_is_rounded_stays(size: int, divisions: int) -> None:
    chosen = Settings(roundup_power2_divisions=divisions)
    rounded = chosen.rounded(size)
    assert rounded >= size
    assert rounded % 512 == 0
    assert chosen.rounded(rounded) == rounded
    assert chosen.segment(rounded) >= rounded


def test_parse() -> None:
    text = "expandable_segments:True, max_split_size_mb:128,garbage_collection_threshold:0.8,pinned_free_catch_all:True"
    assert Settings.parse(text) == Settings(expandable_segments=True, max_split_size=128 * MIB)
    assert Settings.parse("") == Settings()
    assert Settings.parse(
        "large_segment_size_mb:40,max_non_split_rounding_mb:30,roundup_power2_divisions:8"
    ) == Settings(large_segment=40 * MIB, max_non_split_rounding=30 * MIB, roundup_power2_divisions=8)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("backend:cudaMallocAsync", "no option 'backend'"),
        ("expandable_segments:true", "True or False, not 'true'"),
        ("roundup_power2_divisions:[256:1,>:4]", "list"),
        ("roundup_power2_divisions:3", "power of two, not 3"),
        ("max_split_size_mb:20", "more than 20, not 20"),
        ("garbage_collection_threshold:1.5", "below 1, not 1.5"),
        ("large_segment_size_mb:4", "at least 10, not 4"),
        ("max_split_size_mb:many", "many"),
    ],
)
def test_what_cannot_be_set(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Settings.parse(text)


def test_the_environment_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert Settings.of_environment() == Settings()
    assert Settings.of_run() == Settings(expandable_segments=True)
    assert "the default of a run" in Settings.of_run().describe()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert Settings.of_environment() == Settings(expandable_segments=True)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    with pytest.raises(UserError, match="say different things"):
        Settings.of_environment()
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    assert Settings.of_environment() == Settings.of_run() == Settings(max_split_size=64 * MIB)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:many")
    with pytest.raises(UserError, match=r"PYTORCH_ALLOC_CONF=.*: max_split_size_mb is a number, not 'many'"):
        Settings.of_environment()
