"""Every kind of file gives the rows that were written, in order, in bounded memory."""

from __future__ import annotations

import csv
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_mux.data.sources import columnar, json_array
from megatron_mux.data.sources.locate import open_file
from megatron_mux.errors import UserError

Rows = list[dict[str, str]]


def lines(path: Path, rows: Rows) -> None:
    path.write_text("\ufeff" + "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows))


def array(path: Path, rows: Rows) -> None:
    path.write_text("\ufeff" + json.dumps(rows, indent=1, ensure_ascii=False))


def table(path: Path, rows: Rows) -> None:
    with open(path, "w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, rows[0].keys(), delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(rows)


def in_parquet(path: Path, rows: Rows) -> None:
    parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)


def in_feather(path: Path, rows: Rows) -> None:
    feather.write_feather(pa.Table.from_pylist(rows), str(path), chunksize=3)  # compressed


def in_stream(path: Path, rows: Rows) -> None:
    data = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(str(path), data.schema) as writer:
        writer.write_table(data, max_chunksize=3)


KINDS: dict[str, Callable[[Path, Rows], None]] = {
    "a.jsonl": lines,
    "a.json": array,
    "a.csv": table,
    "a.tsv": table,
    "a.parquet": in_parquet,
    "a.feather": in_feather,
    "a.arrow": in_stream,
}
_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
_ROWS = st.lists(st.fixed_dictionaries({"prompt": _TEXT, "completion": _TEXT}), min_size=1, max_size=9)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(rows=_ROWS, name=st.sampled_from(sorted(KINDS)), piece=st.integers(1, 40))
def test_rows_come_as_written(tmp_path: Path, rows: Rows, name: str, piece: int) -> None:
    path = tmp_path / name
    KINDS[name](path, rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_array, "_PIECE", piece)
        patch.setattr(columnar, "_ROWS", min(piece, 4))
        source = open_file(path)
        found = list(source.rows())
        assert [row.value for row in found] == rows and source.count() == len(rows)
        assert [row.done for row in found] == sorted(row.done for row in found)
        assert found[-1].done <= source.size
        assert list(source.rows()) == found
        source.close()


@pytest.mark.parametrize("name", sorted(KINDS))
def test_memory_holds_few_rows(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columnar, "_ROWS", 8)
    monkeypatch.setattr(json_array, "_PIECE", 1 << 14)
    path, rows = tmp_path / name, [{"text": f"{i} " + os.urandom(2000).hex()} for i in range(1000)]
    KINDS[name](path, rows)  # 4 MB
    source = open_file(path)
    for _ in source.rows():
        break  # what is imported at the first use is none of it
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    most = 0
    for count, row in enumerate(source.rows(), 1):
        assert row.value == rows[count - 1]
        most = max(most, pa.total_allocated_bytes() - before)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    source.close()
    assert count == 1000 and peak + most < 500_000


def test_values_inside_tables(tmp_path: Path) -> None:
    """JSON columns are decoded, and what rows of a struct lack is left out, but not columns."""
    rows: list[dict[str, Any]] = [
        {
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "calls": [{"x": 1}]}],
            "tools": None,
        },
        {"messages": [{"role": "user", "content": None}], "tools": '[{"a": null}]'},
    ]
    for row in rows[0]["messages"]:
        row.setdefault("content", None)
        row.setdefault("calls", None)
    rows[1]["messages"][0]["calls"] = None
    data = pa.Table.from_pylist(rows)
    tools = pa.ExtensionArray.from_storage(pa.json_(), data["tools"].combine_chunks())
    data = data.set_column(1, "tools", tools)
    path = tmp_path / "a.parquet"
    parquet.write_table(data, path)
    assert [row.value for row in open_file(path).rows()] == [
        {
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "calls": [{"x": 1}]}],
            "tools": None,
        },
        {"messages": [{"role": "user"}], "tools": [{"a": None}]},
    ]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", b'[{"a": 1},\n {"a": }]', "row 2: not valid JSON: Expecting value (line 2)"),
        ("a.json", b'[{"a": 1} {"a": 2}]', "row 1: not valid JSON: expected ','"),
        ("a.json", b'[{"a": 1}', "row 1: not valid JSON: expected ','"),
        (
            "a.json",
            b'[{"a": 1}]\n[{"a": 2}]',
            "row 1: not valid JSON: something follows the end of the array",
        ),
        ("a.json", b'[{"a": "\xe9"}]', "is not UTF-8 text"),
        ("a.csv", b'a,b\n1,2\n"1,2\n', "line 3: not valid CSV: unexpected end of data"),
        ("a.csv", b"a,a\n1,2\n", "its header has 'a' more than once"),
        ("a.csv", b"a,b\n1,\xe9\n", "line 2: not UTF-8 text"),
        ("a.parquet", b"PAR1 and no more", "cannot be read: Parquet magic bytes not found in footer"),
        ("a.parquet", b"", None),
        ("a.arrow", b"ARROW1 and no more", "cannot be read: "),
        ("a.jsonl.gz", b"\x1f\x8b\x08", "is packed (gzip): unpack it"),
    ],
)
def test_damaged_files(tmp_path: Path, name: str, content: bytes, said: str | None) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    if said is None:
        assert list(open_file(path).rows()) == []
        return
    with pytest.raises(UserError) as caught:
        list(open_file(path).rows())
    assert str(caught.value).startswith(f"{path}: {said}")


def test_rows_of_a_table_that_are_too_short(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('prompt,completion\na,"b\nc"\n\nd\n')
    good, bad = open_file(path).rows()
    assert good.value == {"prompt": "a", "completion": "b\nc"}
    assert (bad.where, str(bad.value)) == ("row 2 (line 5)", "has 1 values, but the header names 2 columns")
