"""Cached tokens are those of the tokenizer, for every shape of record and every cut; entries are whole or not there."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from megatron_mux.data import token_cache, tokenised_file
from megatron_mux.data.dataset import TaskDataset
from megatron_mux.data.records import PromptCompletion, Record, record_of
from megatron_mux.data.tokenise import Example, Tokeniser
from megatron_mux.data.tokenised_file import progress_lines, tokenise_file
from megatron_mux.data.tokenizer import tokenizer_fingerprint
from megatron_mux.errors import UserError
from tests.unit.data.tiny_tokenizers import build

_TEXT = st.text(alphabet="ab é\n", max_size=12)
_TURN = st.builds(
    lambda q, a: [{"role": "user", "content": q}, {"role": "assistant", "content": a}], _TEXT, _TEXT
)
_RECORDS = st.one_of(
    st.fixed_dictionaries({"prompt": _TEXT, "completion": st.sampled_from(["yes", "no", "a test"])}),
    st.fixed_dictionaries({"text": _TEXT}),
    st.fixed_dictionaries({"instruction": _TEXT, "input": _TEXT, "output": _TEXT}),
    st.lists(_TURN, min_size=1, max_size=3).map(lambda turns: {"messages": [*chain(*turns)]}),
    st.builds(lambda text: {"messages": [{"role": "user", "content": text}]}, _TEXT),  # nothing to learn
)


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


Usable = list[tuple[Record, Example]]


def expected(records: list[Any], tokeniser: Tokeniser) -> tuple[Usable, int, list[str] | None]:
    """The usable records, the number of the others, and the distinct completions, without a cache."""
    parsed = [record_of(record) for record in records]
    usable = [
        pair for pair in zip(parsed, map(tokeniser.encode, parsed), strict=True) if pair[1].labelled.sum()
    ]
    texts = list(dict.fromkeys(example.completion_text for _, example in usable))
    known = [text for text in texts if text is not None]
    small = len(known) == len(texts) <= 16
    return usable, len(parsed) - len(usable), known if small else None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(records=st.lists(_RECORDS, min_size=1, max_size=12), prefix=st.booleans(), length=st.integers(2, 40))
def test_cached_records_are_those_of_the_tokenizer(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    llama_like: PreTrainedTokenizerFast,
    records: list[Any],
    prefix: bool,
    length: int,
) -> None:
    path = write(tmp_path / "data.jsonl", records)
    chosen = llama_like if prefix else tokenizer
    for max_length in (length, 1000, 2):  # one entry serves all of them
        tokeniser = Tokeniser(chosen, max_length)
        wanted, dropped, completions = expected(records, tokeniser)
        try:
            data = TaskDataset(path, chosen, max_length)
        except UserError as error:
            assert not wanted and f"none of its {dropped} records" in str(error)
            continue
        assert (len(data), data.dropped, data.distinct_completions) == (len(wanted), dropped, completions)
        for i, (record, example) in enumerate(wanted):
            found = data[i]
            assert (
                found.tokens.dtype == example.tokens.dtype and found.labelled.dtype == example.labelled.dtype
            )
            assert found.tokens.tolist() == example.tokens.tolist()
            assert found.labelled.tolist() == example.labelled.tolist()
            assert (data.lengths[i], data.label_counts[i]) == (len(example.tokens), example.labelled.sum())
            unprompted = isinstance(record, PromptCompletion) and not record.prompt
            assert data.uncut(i)[0].unprompted == unprompted
            if isinstance(record, PromptCompletion) and completions is not None:
                others, own = data.candidates(i)
                assert completions[own] == example.completion_text
                for text, other in zip(completions, others, strict=True):
                    again = tokeniser.encode(replace(record, completion=text))
                    assert (other.tokens.tolist(), other.completion_text) == (again.tokens.tolist(), text)
                    assert other.labelled.tolist() == again.labelled.tolist()
        data.close()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "tokens"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "data.jsonl", [{"text": f"hello {i}"} for i in range(10)])


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on nothing is tokenised."""

    def encode_many(*arguments: Any) -> None:
        raise AssertionError("tokenised again")

    monkeypatch.setattr(Tokeniser, "encode_many", encode_many)


def test_a_file_is_tokenised_once_wherever_it_lies(
    path: Path, cache: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tokenise_file(path, tokenizer, cache)
    forbid(monkeypatch)
    assert tokenise_file(path, tokenizer, cache) == first
    elsewhere = Path(shutil.copy(path, path.with_name("copy.jsonl")))
    assert tokenise_file(elsewhere, tokenizer, cache).entry == first.entry
    path.write_text(path.read_text() + "\n")
    with pytest.raises(AssertionError):
        tokenise_file(path, tokenizer, cache)


def test_what_tells_tokenizers_apart(tokenizer: PreTrainedTokenizerFast) -> None:
    mine = tokenizer_fingerprint(tokenizer)
    assert mine == tokenizer_fingerprint(build())
    tokenizer("hello", truncation=True, max_length=2)  # leaves its mark in the tokenizer
    assert mine == tokenizer_fingerprint(tokenizer)
    others = [build(None), build(prefix=True), build(suffix=True), build(eos_token="<|im_end|>")]
    assert len({mine, *map(tokenizer_fingerprint, others)}) == 5


@pytest.mark.parametrize("damage", ["cut", "missing", "version", "rubbish"])
def test_a_damaged_entry_is_made_again(
    path: Path, cache: Path, tokenizer: PreTrainedTokenizerFast, damage: str
) -> None:
    entry = Path(tokenise_file(path, tokenizer, cache).entry)
    if damage == "cut":
        os.truncate(entry / "tokens.bin", 8)
    elif damage == "missing":
        (entry / "spans.bin").unlink()
    else:
        meta = json.loads((entry / "meta.json").read_text())
        (entry / "meta.json").write_text(json.dumps({**meta, "format": 0}) if damage == "version" else "[")
    data = TaskDataset(path, tokenizer, 32, cache=cache)
    assert Path(data.tokenised[0].entry) == entry
    again = Tokeniser(tokenizer, 32).encode(PromptCompletion(None, "hello 3"))
    assert data[3].tokens.tolist() == again.tokens.tolist()


def test_nothing_half_written_is_left(
    path: Path, cache: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_text(path.read_text() + "{\n")
    with pytest.raises(UserError, match="line 11"):
        tokenise_file(path, tokenizer, cache)
    assert list(cache.iterdir()) == []

    def full(*arguments: Any) -> None:
        raise OSError(28, os.strerror(28))

    write(path, [{"text": "hello"}])
    monkeypatch.setattr(token_cache, "write", full)
    with pytest.raises(UserError, match=r"cannot be kept there: No space left.*--mux-data-cache"):
        tokenise_file(path, tokenizer, cache)
    assert list(cache.iterdir()) == []


def test_of_two_processes_that_write_an_entry_the_first_wins(
    path: Path, cache: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = token_cache.TokenCacheWriter.finish
    other: list[str] = []

    def late(self: token_cache.TokenCacheWriter, *arguments: Any) -> Path:
        if not other:
            other.append("begun")
            other.append(tokenise_file(path, tokenizer, cache).entry)
        return finish(self, *arguments)

    monkeypatch.setattr(token_cache.TokenCacheWriter, "finish", late)
    monkeypatch.setattr(tokenised_file, "locked", nullcontext)  # as where files cannot be locked
    assert tokenise_file(path, tokenizer, cache).entry == other[1]
    assert [str(entry) for entry in cache.iterdir()] == [other[1]]


def test_entries_that_nobody_opens_are_removed(
    path: Path, cache: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    old = Path(tokenise_file(path, tokenizer, cache).entry)
    used = Path(tokenise_file(write(path, [{"text": "another"}]), tokenizer, cache).entry)
    partial = cache / ".partial-killed"
    partial.mkdir()
    for place in (old / "meta.json", used / "meta.json", partial):
        os.utime(place, (1.0, 1.0))
    token_cache.open_entry(used)  # it is opened, which is noted
    newest = Path(tokenise_file(write(path, [{"text": "a third"}]), tokenizer, cache).entry)
    assert set(cache.iterdir()) == {used, newest}


def test_where_tokens_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_MUX_CACHE", str(tmp_path / "mine"))
    directory = token_cache.token_cache_directory
    assert directory(tmp_path / "given") == tmp_path / "given"
    assert directory() == tmp_path / "mine" / "tokens"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEGATRON_MUX_CACHE", str(tmp_path / "file"))
    assert directory().name == "tokens" and directory() != tmp_path / "file" / "tokens"


def test_progress_is_told_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    said: list[str] = []
    monkeypatch.setattr("megatron_mux.data.tokenised_file.time.monotonic", lambda: now)
    tell = progress_lines(Path("data.jsonl"), said.append)
    for now in (1.0, 9.0, 11.0, 12.0, 22.0):
        tell(int(now), 44, int(100 * now))
    assert said == [
        "tokenising data.jsonl: 25%, 100 records/s",
        "tokenising data.jsonl: 50%, 100 records/s",
    ]
