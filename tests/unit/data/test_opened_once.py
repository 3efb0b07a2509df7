"""A file is hashed once; its tokens are mapped once for all tasks of a process, until the last of them leaves."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from transformers import PreTrainedTokenizerFast

from megatron_mux.data import digests
from megatron_mux.data.dataset import DataFiles
from megatron_mux.data.section import DataSource
from megatron_mux.data.sources.source import Source
from megatron_mux.data.tokenised_file import as_source, tokenise_file

_LONG_AGO = (1e9, 1e9)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "a.jsonl", "ab")


def write(path: Path, texts: str) -> Path:
    path.write_text("".join(json.dumps({"prompt": "q", "completion": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def files(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> DataFiles:
    return DataFiles(tokenizer, print, tmp_path / "tokens")


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files, each time that one is hashed, by a process that knows none yet."""
    names: list[str] = []
    digest = Source.digest

    def note(self: Source) -> str:
        names.append(self.path.name)
        return digest(self)

    monkeypatch.setattr(Source, "digest", note)
    monkeypatch.setattr(digests, "_hashed", {})
    return names


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of files are fine enough to tell that a new one has changed."""
    monkeypatch.setattr(digests, "_SETTLED_NS", -(10**12))


def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_hashed", {})


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_a_file_is_hashed_once_however_many_tasks_read_it(
    path: Path, files: DataFiles, hashed: list[str]
) -> None:
    training = [files.open(path, 16 + i % 2) for i in range(20)]
    renamed = DataSource(path=path, columns={"text": "completion"})
    others = [files.open(renamed, 16), files.open([as_source(path), renamed], 16)]
    assert hashed == ["a.jsonl"] and len(training + others) == 22


def test_other_processes_do_not_hash_what_one_has_hashed(
    path: Path, files: DataFiles, hashed: list[str], settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tokenise_file(path, files.tokenizer, files.cache)
    for _ in range(3):
        another_process(monkeypatch)
        assert tokenise_file(path, files.tokenizer, files.cache) == first
    link = path.with_name("link.jsonl")
    link.symlink_to(path)
    assert tokenise_file(link, files.tokenizer, files.cache) == first
    assert hashed == ["a.jsonl"]


@pytest.mark.parametrize("keeps_time", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_file_of_the_same_size_with_other_content_is_noticed(
    path: Path, files: DataFiles, hashed: list[str], settled: None, in_place: bool, keeps_time: bool
) -> None:
    os.utime(path, _LONG_AGO)
    before = files.open(path, 16)
    size, inode = path.stat().st_size, path.stat().st_ino
    changed = write(path if in_place else path.with_name("new"), "cd")
    if keeps_time:
        os.utime(changed, _LONG_AGO)
    os.replace(changed, path)
    assert path.stat().st_size == size and (path.stat().st_ino == inode) == in_place
    after = files.open(path, 16)
    assert len(hashed) == 2 and before.fingerprint != after.fingerprint
    assert (before.distinct_completions, after.distinct_completions) == (["a", "b"], ["c", "d"])


def test_a_file_that_was_just_written_is_not_remembered_for_others(
    path: Path, files: DataFiles, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for times in (1, 2):
        another_process(monkeypatch)
        tokenise_file(path, files.tokenizer, files.cache)
        assert len(hashed) == times
    assert not (Path(str(files.cache)) / "digests").exists()


def test_what_nobody_asks_for_is_forgotten_after_a_month(
    path: Path, files: DataFiles, hashed: list[str], settled: None
) -> None:
    tokenise_file(path, files.tokenizer, files.cache)
    (old,) = (Path(str(files.cache)) / "digests").iterdir()
    os.utime(old, (1.0, 1.0))
    tokenise_file(write(path.with_name("b.jsonl"), "cd"), files.tokenizer, files.cache)
    assert not old.exists() and len(hashed) == 2


def test_a_damaged_index_is_no_index(
    path: Path, files: DataFiles, hashed: list[str], settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tokenise_file(path, files.tokenizer, files.cache)
    (known,) = (Path(str(files.cache)) / "digests").iterdir()
    for content in ("", "[]", "{}", '{"file": 3'):
        known.write_text(content)
        another_process(monkeypatch)
        assert tokenise_file(path, files.tokenizer, files.cache) == first
    assert len(hashed) == 5


def test_many_tasks_take_few_descriptors_and_hold_one_index(path: Path, files: DataFiles) -> None:
    other = write(path.with_name("b.jsonl"), "cde")
    pairs = path.with_name("pairs.jsonl")
    pairs.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    before = descriptors()
    data: list[Any] = [files.open((path, other)[i % 2], 16) for i in range(300)]
    data += [files.open(pairs, 16, loss="dpo") for _ in range(100)]
    assert data[300].lengths is data[399].lengths
    assert descriptors() == before
    assert data[0].lengths is data[298].lengths and data[1].label_counts is data[299].label_counts
    data += [files.open(write(path.with_name(f"{i}.jsonl"), f"x{i % 10}"), 16) for i in range(50)]
    table = path.with_name("a.parquet")
    parquet.write_table(pa.Table.from_pylist([{"prompt": "a", "completion": "b"}]), table)
    data += [files.open(table, 16) for _ in range(50)]
    assert descriptors() == before


def mapped(entry: str) -> int:
    """Files of a cache entry that are mapped into memory."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count(entry)


def test_sources_are_closed_when_their_last_task_leaves(path: Path, files: DataFiles) -> None:
    first, second = files.open(path, 16), files.open(path, 8)
    entry = first.tokenised[0].entry
    assert second.tokenised[0].entry == entry and mapped(entry) == 4
    first.close()
    assert mapped(entry) == 4 and len(second[0].tokens)
    del second
    assert mapped(entry) == 0
