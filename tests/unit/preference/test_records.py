"""Preference records: TRL's columns, prompts that are found, pairs that are divided; bad lines by number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_mux.data.bad_record import BadRecordError
from megatron_mux.data.preference import PreferenceTokeniser, parse_preference
from megatron_mux.data.preference_file import PreferenceDataset
from megatron_mux.data.section import DataSource
from megatron_mux.data.tokenizer import load_tokenizer
from megatron_mux.errors import UserError
from tests.end_to_end.workplace import write_tokenizer

TEMPLATE = (
    "{% if tools %}{{ tools[0]['name'] }} {% endif %}{% if short %}w9 {% endif %}"
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
SKY = [{"role": "user", "content": "w1 w2"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    found = load_tokenizer(directory)
    found.chat_template = TEMPLATE
    return found


def answer(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def test_messages_go_through_the_chat_template(tokenizer: Any) -> None:
    record = parse_preference({"prompt": SKY, "chosen": answer("w3"), "rejected": answer("w4 w5")}, "dpo")
    for example, text in zip(
        PreferenceTokeniser(tokenizer, "dpo").encode(record), ("w3", "w4 w5"), strict=True
    ):
        whole = tokenizer.apply_chat_template(SKY + answer(text), tokenize=True, return_dict=False)
        prompt = tokenizer.apply_chat_template(
            SKY, tokenize=True, add_generation_prompt=True, return_dict=False
        )
        assert example.tokens.tolist() == whole
        assert whole[: len(prompt)] == prompt
        assert example.labelled.tolist() == [False] * len(prompt) + [True] * (len(whole) - len(prompt))


def test_pairs_in_openais_format_are_those_of_ours() -> None:
    tools = [{"name": "w8"}]
    theirs = {
        "input": {"messages": SKY, "tools": tools, "parallel_tool_calls": True},
        "preferred_output": answer("w3"),
        "non_preferred_output": answer("w4"),
    }
    ours = {"prompt": SKY, "chosen": answer("w3"), "rejected": answer("w4"), "tools": tools}
    for loss in ("dpo", "orpo", "kto"):
        assert parse_preference(theirs, loss) == parse_preference(ours, loss)
    with pytest.raises(BadRecordError, match='"non_preferred_output" is missing'):
        parse_preference({**theirs, "non_preferred_output": None}, "dpo")
    with pytest.raises(BadRecordError, match='"preferred_output" must be'):
        parse_preference({**theirs, "preferred_output": 3}, "dpo")


def test_tools_and_variables_reach_the_template(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"prompt": SKY, "chosen": answer("w3"), "rejected": answer("w4"), "tools": [{"name": "w8"}]}]
    source = DataSource(path=write(tmp_path / "a.jsonl", rows), chat_template_kwargs={"short": True})
    data = PreferenceDataset(source, tokenizer, 32, "dpo", tmp_path)
    assert [tokenizer.decode(data[i].tokens).split()[:2] for i in range(2)] == [["w8", "w9"]] * 2


def test_a_file_that_changes_while_it_is_read_leaves_no_tokens(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "w1", "chosen": " w2", "rejected": " w3"}])
    monkeypatch.setattr("megatron_mux.data.sources.source.Source.is_unchanged", False)
    with pytest.raises(UserError, match="was changed while it was read"):
        PreferenceDataset(path, tokenizer, 16, "dpo", tmp_path / "tokens")
    assert list((tmp_path / "tokens").iterdir()) == []


def test_what_tables_hold() -> None:
    """Labels as text and as numbers, and nulls for what is missing."""
    row: dict[str, Any] = {"prompt": "w1", "completion": "w2", "chosen": None, "rejected": None}
    for label in ("True", "true", "1", 1, True):
        assert parse_preference({**row, "label": label}, "kto").desirable is True
    for label in ("FALSE", "0", 0, False):
        assert parse_preference({**row, "label": label}, "kto").desirable is False
    pair = {"chosen": SKY + answer("w3"), "rejected": SKY + answer("w4")}
    found = parse_preference({"prompt": None, **pair}, "dpo")
    assert found == parse_preference(pair, "dpo") and found.prompt == SKY


def test_long_records_are_cut_and_those_without_a_completion_left_out(tokenizer: Any, tmp_path: Path) -> None:
    pairs = [
        {"prompt": "w1 w2", "chosen": " w3 w4 w5 w6", "rejected": " w7"},
        {"prompt": "w1 w2 w3 w4 w5", "chosen": " w6", "rejected": " w7"},
    ]
    path = write(tmp_path / "long.jsonl", pairs)
    data = PreferenceDataset(path, tokenizer, 5, "dpo", tmp_path)
    assert (len(data), data.dropped) == (2, 1)
    assert data.lengths.tolist() == [5, 4]
    assert data.completion_counts.tolist() == [3, 2]
    assert data.starts.tolist() == [2, 2]
    odds = PreferenceDataset(path, tokenizer, 5, "orpo", tmp_path)
    begins = tokenizer.bos_token_id
    assert [int(odds[i].tokens[0]) for i in range(2)] == [begins, begins], "as ORPO's trainer begins them"
    assert odds.label_counts.tolist() == [4, 2], "a chosen sequence's prompt is learned, too"
    assert np.count_nonzero(odds[0].labelled) == 4


@pytest.mark.parametrize(
    ("loss", "record", "words"),
    [
        ("dpo", {"prompt": "w1", "completion": "w2"}, ["loss: dpo", '"chosen"', "'completion'"]),
        ("kto", {"prompt": "w1", "completion": "w2"}, ["loss: kto", '"label"']),
        ("kto", {"prompt": "w1", "completion": "w2", "label": "yes"}, ['"label"', "true or false"]),
        ("dpo", {"prompt": SKY, "chosen": SKY, "rejected": SKY, "tools": "w1"}, ['"tools"', "JSON schemas"]),
        ("dpo", {"prompt": SKY, "chosen": SKY, "rejected": [{**SKY[0], "content": "\ud800"}]}, ["surrogate"]),
        ("kto", {"prompt": "w1", "completion": "w2", "label": 2}, ['"label"', "1 or 0"]),
        ("dpo", {"prompt": "w1", "chosen": "w2", "rejected": None}, ['"rejected" must be text']),
        ("dpo", {"prompt": "w1", "chosen": 3, "rejected": "w2"}, ['"chosen"', "text"]),
        ("dpo", {"prompt": "w1", "chosen": "w1", "rejected": SKY}, ["both"]),
        ("dpo", {"chosen": "w1", "rejected": "v2 v3"}, ['"prompt"', "alike"]),
    ],
)
def test_bad_records_are_refused_by_line(
    loss: str, record: dict[str, Any], words: list[str], tokenizer: Any, tmp_path: Path
) -> None:
    with pytest.raises(BadRecordError):
        parse_preference(record, loss)
    good = {"prompt": "w1", "chosen": " w2", "rejected": " w3"}
    path = write(tmp_path / "bad.jsonl", [good, record, good])
    with pytest.raises(UserError) as raised:
        PreferenceDataset(path, tokenizer, 16, loss, tmp_path)
    assert len(raised.value.problems) == 1
    assert all(word in str(raised.value) for word in ["line 2", *words]), raised.value


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
