"""Data files: one pass that finds everything, then records by number."""

from __future__ import annotations

import hashlib
import json
import os
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from transformers import PreTrainedTokenizerFast

from megatron_mux.data.dataset import TaskDataset
from megatron_mux.data.mixture import Mixing
from megatron_mux.data.preference_file import PreferenceDataset
from megatron_mux.data.records import PromptCompletion, parse_json, record_of
from megatron_mux.data.section import DataSource
from megatron_mux.data.token_cache import TokenCacheWriter
from megatron_mux.data.tokenise import Tokeniser
from megatron_mux.data.tokenised_file import as_source, tokenise_file
from megatron_mux.data.tokenizer import load_tokenizer
from megatron_mux.errors import UserError
from tests.unit.data.tiny_tokenizers import build

Tokenizer = PreTrainedTokenizerFast


def write(path: Path, *records: Any) -> Path:
    lines = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in records]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def pair(prompt: str, completion: str) -> dict[str, str]:
    return {"prompt": prompt, "completion": completion}


def texts(data: TaskDataset, number: int) -> tuple[str, ...]:
    """What is not learned of a record, and what is."""
    example = data[number]
    parts = example.tokens[~example.labelled], example.tokens[example.labelled]
    return tuple(data.tokenizer.decode(part, skip_special_tokens=True) for part in parts)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data.jsonl"


def test_records_by_number(path: Path, tokenizer: Tokenizer) -> None:
    write(path, pair("hello", " yes"), b"", {"text": "a test"}, b"  \r", {"messages": [{"role": "user", "content": "é"},
          {"role": "assistant", "content": "no"}]}, {"instruction": "say", "output": "no"})  # fmt: skip
    data = TaskDataset(path, tokenizer, 64)
    assert (len(data), data.dropped, data.end_of_sequence) == (4, 0, tokenizer.eos_token_id)
    tokeniser = Tokeniser(tokenizer, 64)
    records = [record_of(parse_json(line)) for line in path.read_bytes().split(b"\n") if line.strip()]
    for i in range(4):
        example, again = data[i], tokeniser.encode(records[i])
        assert example.tokens.tolist() == again.tokens.tolist()
        assert (len(example.tokens), example.labelled.sum()) == (data.lengths[i], data.label_counts[i])
    assert data[-1].tokens.tolist() == data[3].tokens.tolist()
    assert data.distinct_completions is None
    assert data.fingerprint == hashlib.sha256(path.read_bytes()).hexdigest()
    for i in (4, -5):
        with pytest.raises(IndexError):
            data[i]


def test_records_with_nothing_to_learn_are_dropped_and_counted(path: Path, tokenizer: Tokenizer) -> None:
    long = "hello world this is a test" * 5
    write(path, pair(long, "yes"), pair("a", "yes"), pair(long, "no"), pair("b", "no"))
    data = TaskDataset(path, tokenizer, 8)
    assert (len(data), data.dropped) == (2, 2)
    assert [texts(data, i) for i in range(2)] == [("a", "yes"), ("b", "no")]
    assert data.label_counts.min() > 0
    with pytest.raises(
        UserError, match=r"none of its 2 records has a token to learn within data.max_length 8"
    ):
        TaskDataset(write(path, pair(long, "yes"), pair(long, "no")), tokenizer, 8)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_an_empty_file(path: Path, tokenizer: Tokenizer, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(UserError, match="is empty"):
        TaskDataset(path, tokenizer, 8)


def test_every_bad_line_is_named(path: Path, tokenizer: Tokenizer) -> None:
    no_role = {"messages": [{"content": "no"}]}
    write(path, pair("a", "b"), b"{", no_role, pair("a", "b"), {"text": 3}, b"\xff")
    with pytest.raises(UserError) as caught:
        TaskDataset(path, tokenizer, 8)
    assert [p.removeprefix(f"{path}: ").split(": ")[0] for p in caught.value.problems] == [
        "line 2", "line 3", "line 5", "line 6",
    ]  # fmt: skip


def test_many_bad_lines_are_counted(path: Path, tokenizer: Tokenizer) -> None:
    write(path, *[b"{"] * 1000, *[pair("a", "b")] * 1000)
    with pytest.raises(UserError) as caught:
        TaskDataset(path, tokenizer, 8)
    assert len(caught.value.problems) == 21
    assert "1000 bad rows in all" in caught.value.problems[-1]


def test_messages_need_a_template(path: Path) -> None:
    write(path, {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    with pytest.raises(UserError, match=r"data.jsonl: messages need a chat template"):
        TaskDataset(path, build(None), 8)


def test_choices(path: Path, tokenizer: Tokenizer) -> None:
    write(path, pair("a", "yes"), {"instruction": "b", "output": "no"}, pair("c", "yes"))
    data = TaskDataset(path, tokenizer, 64)
    assert data.distinct_completions == ["yes", "no"]
    candidates, own = data.candidates(1)
    assert [example.completion_text for example in candidates] == ["yes", "no"] and own == 1
    assert candidates[1].tokens.tolist() == data[1].tokens.tolist()
    for count, small in ((128, True), (129, False)):
        write(path, *(pair("a", f"answer {i}") for i in range(count)))
        found = TaskDataset(path, tokenizer, 64)
        assert (found.distinct_completions is not None) is small
        if not small:
            (alone,), own = found.candidates(0)
            assert own == 0 and alone.tokens.tolist() == found[0].tokens.tolist()


def test_choices_may_be_long_and_come_from_a_file_with_many(path: Path, tokenizer: Tokenizer) -> None:
    long = ["yes " * 500, "no " * 500]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_mux.data.token_cache._LONGEST_COMPLETIONS", 1000)
        write(path, *(pair("a", text) for text in long))
        assert TaskDataset(path, tokenizer, 4096).distinct_completions == long
    many = [pair("a" * 50, f"answer {i}") for i in range(200)]
    data = TaskDataset(write(path, pair("a", "yes"), *many, pair("b", "no")), tokenizer, 20)
    assert (len(data), data.distinct_completions) == (2, ["yes", "no"])


def test_a_cut_candidate_always_keeps_a_label(path: Path, tokenizer: Tokenizer) -> None:
    write(path, pair("hello", "yes it is a test"), pair("hello world", "no"))
    for length in range(2, 9):
        try:
            data = TaskDataset(path, tokenizer, length)
        except UserError:
            continue
        assert all(example.labelled.sum() for i in range(len(data)) for example in data.candidates(i)[0])


def test_what_becomes_of_a_file_does_not_disturb(path: Path, tokenizer: Tokenizer) -> None:
    """A task learns from what was tokenised; the next one that opens the file gets what it holds then."""
    write(path, pair("a", "yes"), pair("b", "no"))
    data = TaskDataset(path, tokenizer, 32)
    for change in (
        lambda: path.write_bytes(path.read_bytes() + b"more"),
        lambda: path.write_bytes(b"{"),
        lambda: os.replace(write(path.with_name("other"), pair("else", "no")), path),
    ):
        change()
        assert [texts(data, i) for i in range(2)] == [("a", "yes"), ("b", "no")]
    assert [texts(TaskDataset(path, tokenizer, 32), 0)] == [("else", "no")]
    path.unlink()
    candidates, own = data.candidates(1)
    assert (len(candidates), own, data.distinct_completions) == (2, 1, ["yes", "no"])


def test_memory_holds_places_not_records(
    path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_mux.data.row_reader.SupervisedReader.rows", 8)
    line = json.dumps(pair("hello world " * 200, "yes")).encode() + b"\n"
    path.write_bytes(line * 1000)  # 2.4 MB
    told: list[tuple[int, int, int]] = []
    tracemalloc.start()
    data = TaskDataset(path, tokenizer, 1024, progress=lambda *so_far: told.append(so_far))
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(data) == 1000
    assert held < 200_000
    assert peak < 1_000_000
    assert told[-1] == (path.stat().st_size, path.stat().st_size, 1000)
    assert told == sorted(told)
    data.close()


# -- the tokenizer of a backbone


def test_loading_a_tokenizer(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save_pretrained(tmp_path / "good")
    loaded = load_tokenizer(tmp_path / "good")
    assert loaded("hello")["input_ids"] == tokenizer("hello")["input_ids"]
    assert loaded.chat_template == tokenizer.chat_template


def test_tokenizers_that_are_of_no_use(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    build(eos_token=None).save_pretrained(tmp_path / "endless")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    for name, said in (
        ("missing", "no such directory"),
        ("empty", "holds no tokenizer"),
        ("endless", "no end-of-sequence token"),
        ("broken", "cannot be loaded"),
    ):
        with pytest.raises(UserError, match=said) as caught:
            load_tokenizer(tmp_path / name)
        assert "\n" not in str(caught.value)


# -- cuts, mixtures, several files


@pytest.mark.parametrize("side", ["right", "left"])
def test_what_a_cut_loses_is_counted(path: Path, tokenizer: Tokenizer, side: str) -> None:
    long = "hello world this is a test" * 3
    rows = [pair(long, "yes"), pair("a", "yes, " + long), pair("a", "b"), {"text": long}]
    write(path, *rows, {"messages": [{"role": "user", "content": "a"}]})
    uncut = TaskDataset(path, tokenizer, 1000)
    assert (uncut.cut.longer, uncut.cut.lost, uncut.dropped) == (0, 0, 1)
    assert uncut.cut.lines(1000) == ["1 of 5 records have no token to learn and were dropped"]
    data = TaskDataset(path, tokenizer, 9, truncation_side=side)
    emptied = int(side == "right")  # of the first record the completion is last
    assert (data.cut.longer, data.cut.emptied, data.dropped) == (3, emptied, 1 + emptied)
    assert data.cut.labels == uncut.label_counts.sum()
    assert data.cut.lost == uncut.label_counts.sum() - data.label_counts.sum()
    said = "warning: 3 of 5 records are longer than 9 tokens; cutting them loses "
    said += f"{data.cut.lost} of {data.cut.labels} tokens"
    assert data.cut.lines(9)[0].startswith(said)
    for i in range(len(data)):
        example, whole = data[i], uncut[i + emptied]
        record = record_of(rows[i + emptied])
        kept = slice(None, 9) if side == "right" else slice(-9, None)
        assert example.tokens.tolist() == whole.tokens[kept].tolist()
        assert example.labelled[1:].tolist() == whole.labelled[kept][1:].tolist() and not example.labelled[0]
        again = Tokeniser(tokenizer, 9, side).encode(record)
        assert again.tokens.tolist() == example.tokens.tolist()
        assert again.labelled.tolist() == example.labelled.tolist()
        assert (data.lengths[i], data.label_counts[i]) == (len(example.tokens), example.labelled.sum())


def test_a_mixture_of_sources(tmp_path: Path, tokenizer: Tokenizer) -> None:
    many = write(tmp_path / "many.jsonl", *(pair(f"a {i}", "yes") for i in range(30)))
    few = write(tmp_path / "few.jsonl", pair("a" * 50, "cut off"), *(pair(f"b {i}", "no") for i in range(3)))
    sources = [as_source(many), as_source(few)]
    data = TaskDataset(sources, tokenizer, 20, mixing=Mixing((1.0, 2.0), True, 3))
    order = Mixing((1.0, 2.0), True, 3).order([30, 3])
    alone = [f"a {i}" for i in range(30)] + [f"b {i}" for i in range(3)]
    records = [PromptCompletion(alone[i], "yes" if i < 30 else "no") for i in order]
    assert len(data) == len(order)
    assert (data.dropped, data.distinct_completions) == (1, ["yes", "no"] if order[0] < 30 else ["no", "yes"])
    tokeniser = Tokeniser(tokenizer, 20)
    for i, record in enumerate(records):
        assert data[i].tokens.tolist() == tokeniser.encode(record).tokens.tolist()
    prints = {
        TaskDataset(sources, tokenizer, 20, mixing=Mixing(weights, True, seed)).fingerprint
        for weights, seed in (((1.0, 2.0), 3), ((1.0, 2.0), 4), ((2.0, 2.0), 3))
    }
    assert len(prints) == 3 and data.fingerprint in prints
    with pytest.raises(UserError, match=r"many.jsonl: none of its 30 (.|\n)*few.jsonl: none of its 4 "):
        TaskDataset(sources, tokenizer, 2, mixing=Mixing())


def test_several_files(tmp_path: Path, tokenizer: Tokenizer) -> None:
    first = write(tmp_path / "1.jsonl", pair("a", "b"))
    second = tmp_path / "2.csv"
    second.write_text("prompt,completion\nc,d\ne,f\n")
    data = TaskDataset(DataSource(path=(first, second)), tokenizer, 20)
    assert [texts(data, i) for i in range(3)] == [tuple(two) for two in ("ab", "cd", "ef")]


def test_one_process_of_a_host_tokenises(
    path: Path, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one waits for it, and finds the tokens."""
    write(path, *(pair("a", str(i)) for i in range(100)))
    made: list[Path] = []
    init = TokenCacheWriter.__init__

    def slow(self: TokenCacheWriter, directory: Path) -> None:
        init(self, directory)
        made.append(directory)
        time.sleep(0.3)

    monkeypatch.setattr(TokenCacheWriter, "__init__", slow)
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda _: tokenise_file(path, tokenizer, tmp_path / "tokens"), range(3)))
    assert len(made) == 1 and len({one.entry for one in found}) == 1
    assert [entry.name for entry in (tmp_path / "tokens").iterdir()] == [Path(found[0].entry).name]


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_preference_records_come_from_any_source(tmp_path: Path, tokenizer: Tokenizer, loss: str) -> None:
    rows = [{"prompt": f"a {i}", "chosen": " yes" * (1 + i * 3), "rejected": " no"} for i in range(4)]
    plain = PreferenceDataset(write(tmp_path / "a.jsonl", *rows), tokenizer, 12, loss, tmp_path / "tokens")
    renamed = [{"question": r["prompt"], "chosen": r["chosen"], "worse": r["rejected"]} for r in rows]
    parquet.write_table(pa.Table.from_pylist(renamed), tmp_path / "a.parquet")
    columns = {"prompt": "question", "chosen": "chosen", "rejected": "worse"}
    source = DataSource(path=tmp_path / "a.parquet", columns=columns)
    data = PreferenceDataset(source, tokenizer, 12, loss, tmp_path / "tokens")
    assert [data[i].tokens.tolist() for i in range(len(data))] == [
        plain[i].tokens.tolist() for i in range(len(plain))
    ]
    assert (data.lengths.max(), data.cut.longer > 0, data.cut) == (12, True, plain.cut)
    assert data.cut.labels - data.cut.lost == data.completion_counts.sum()
    parquet.write_table(pa.Table.from_pylist([{"prompt": "a", "chosen": "b"}]), tmp_path / "bad.parquet")
    with pytest.raises(UserError, match=r"bad.parquet: row 1: no record for loss: "):
        PreferenceDataset(tmp_path / "bad.parquet", tokenizer, 12, loss, tmp_path / "tokens")
