"""What a task's held-out records cannot be measured by is refused before anything runs, and the accuracy is named."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_mux.data.dataset import TaskDataset
from megatron_mux.data.stop_tokens import stop_tokens
from megatron_mux.data.tokenizer import load_tokenizer
from megatron_mux.engine import Task
from megatron_mux.engine.evaluation.evaluator import EvalResult
from megatron_mux.engine.evaluation.held_out import HeldOut, Unprompted, prompt_and_completion
from megatron_mux.engine.evaluation.texts import with_texts
from megatron_mux.engine.generation.passes import Completion, Prompt
from megatron_mux.tasks import TaskSpec
from megatron_mux.training.eval_setup import accuracy_measured, problems_of_evaluation
from tests.end_to_end.workplace import write_tokenizer

TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}<unk>\n{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    write_tokenizer(tmp_path)
    return load_tokenizer(tmp_path)


def dataset(
    path: Path, tokenizer: Any, records: Sequence[dict[str, Any]], length: int = 16, side: str = "right"
) -> TaskDataset:
    file = path / "held-out.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return TaskDataset(file, tokenizer, length, cache=path / "cache", truncation_side=side)


def spec(**fields: Any) -> TaskSpec:
    task = {"name": "t", "adapter": {"peft_type": "LORA"}, "data": {"path": "x"}}
    return TaskSpec.model_validate({**task, "eval": {"path": "y", **fields}})


def test_which_accuracy_is_measured(tmp_path: Path, tokenizer: Any) -> None:
    pairs = [{"prompt": f"w{i}", "completion": f"w{i % 2}"} for i in range(8)]

    def said(records: TaskDataset, **fields: Any) -> str:
        return "".join(accuracy_measured(Task(spec(**fields), records, records)))

    labels = dataset(tmp_path, tokenizer, pairs)
    assert "the likeliest of the 2 that occur (w0, w1)" in said(labels)
    few = dataset(tmp_path, tokenizer, pairs[:7])
    assert "share of labelled tokens" in said(few)
    assert "beside the classification" in said(few, metrics=["accuracy", "classification_accuracy"])
    assert not said(few, metrics=["token_accuracy"])
    assert not list(problems_of_evaluation(spec(metrics=["classification_accuracy"], generate={}), few))


def test_what_cannot_be_measured_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    texts = dataset(tmp_path, tokenizer, [{"text": "w1 w2"}] * 5)
    (refused,) = problems_of_evaluation(spec(metrics=["classification_accuracy"]), texts)
    assert "classification_accuracy needs records that all have a prompt" in refused
    (refused,) = problems_of_evaluation(spec(generate={"samples": 1}), texts)
    assert "held-out.jsonl have no prompt" in refused and "raise" not in refused
    long = dataset(tmp_path, tokenizer, [{"prompt": "w1 w2", "completion": "w3 w4"}], 3, "left")
    (refused,) = problems_of_evaluation(spec(generate={"samples": 1}), long)
    assert refused.endswith("or raise data.max_length")


def test_prompts_and_completions(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = TEMPLATE
    turns = [("user", "w1"), ("assistant", "w2"), ("user", "w3 w4"), ("assistant", "w5")]
    messages = [{"role": role, "content": content} for role, content in turns]
    records = dataset(
        tmp_path, tokenizer, [{"messages": messages}, {"prompt": "w1", "completion": "w2"}, {"text": "w1 w2"}]
    )

    def texts(number: int) -> list[str] | None:
        found = prompt_and_completion(records, number)
        return None if isinstance(found, Unprompted) else [tokenizer.decode(part.tolist()) for part in found]

    first = texts(0)
    assert first is not None and first[0].endswith("w4 <unk> <s>") and first[1].startswith("w5")
    assert texts(1) == ["w1", "w2 </s>"] and texts(2) is None


def test_texts_of_records_that_are_cut(tmp_path: Path, tokenizer: Any) -> None:
    """Whole prompts are continued, and compared with whole completions; other records are counted."""
    answer = " ".join(f"w{i}" for i in range(10, 30))
    rows = [{"prompt": p, "completion": answer} for p in ("w1 w2 w3 w4", "")] + [{"text": answer}]
    rows.append({"prompt": "w5", "completion": "w6"})
    asked: list[Prompt] = []

    def generate(prompts: Sequence[Prompt]) -> list[Completion]:
        asked.extend(prompts)
        return [Completion(tuple(tokenizer(answer)["input_ids"]), "stop")] * len(prompts)

    found: dict[str, EvalResult] = {}
    one_rank: Any = SimpleNamespace(dp_size=1, total=lambda flags: flags)
    make: Any = lambda stop: SimpleNamespace(generate=generate)
    for side in ("right", "left"):
        records = dataset(tmp_path, tokenizer, rows, 10, side)
        state: Any = SimpleNamespace(task=Task(spec(metrics=["exact_match"]), records, records))
        result = with_texts({"t": EvalResult({}, 4)}, [HeldOut(state, records)], make, one_rank)["t"]
        assert isinstance(result, EvalResult)
        found[side] = result
    assert [tokenizer.decode(one.tokens.tolist()) for one in asked] == ["w1 w2 w3 w4", "w5", "w5"]
    assert [one.reference for one in found["right"].samples] == [answer, "w6"]
    assert [found[side].values["exact_match"] for side in found] == [0.5, 0]
    no_prompt = "2 of 4 records have no prompt to continue"
    assert found["right"].notes == (no_prompt,)
    assert found["left"].notes[0] == no_prompt
    assert found["left"].notes[1].startswith("1 of 4 records have a prompt that data.max_length cuts")


def test_stop_tokens(tmp_path: Path, tokenizer: Any) -> None:
    end, unknown = tokenizer.eos_token_id, tokenizer.unk_token_id
    assert stop_tokens(tokenizer) == {end}
    tokenizer.chat_template = TEMPLATE  # closes a turn with a special token
    assert stop_tokens(tokenizer) == {end, unknown}
    tokenizer.chat_template = "{{ no_such_function() }}"
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, 7]}))
    assert stop_tokens(tokenizer) == {end, 7}
