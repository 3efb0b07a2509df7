from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mux.memory.sizes import MOST, parse_size, show_size


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("16384 MiB", 16 << 30),
        ("16,384 MB", 16 << 30),
        ("16384MB", 16 << 30),
        ("16GB", 16 << 30),
        ("16G", 16 << 30),
        ("80gib", 80 << 30),
        ("0.5g", 1 << 29),
        ("1 TiB", 1 << 40),
        ("4096", 4096),
        (" 12 KB ", 12 << 10),
    ],
)
def test_what_is_a_size(text: str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize(
    "text",
    ["", "GB", "16 gigs", "16GBs", "1,6GB", "16,38 MB", "-1GB", "1e9", "0x10", "nan", "16  GB", "9" * 400],
)
def test_what_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="must be a size such as"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [("0", "more than nothing"), ("0.0GB", "more than nothing"), ("2000TB", "at most 1048576.0 GiB")],
)
def test_what_no_machine_has(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_size(text)


@given(st.integers(1, MOST))
def test_what_is_shown_is_read(count: int) -> None:
    shown = show_size(count)
    if "bytes" not in shown:
        assert abs(parse_size(shown) / count - 1) < 0.5
