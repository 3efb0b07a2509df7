"""What an evaluation measures: which records plainly are classifications, and what is refused."""

from __future__ import annotations

import importlib.machinery
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import ValidationError

from megatron_mux.tasks import evaluation
from megatron_mux.tasks.evaluation import EvalSpec, choices_among, plain_choices


@dataclass
class Some:
    count: int
    distinct_completions: list[str] | None

    def __len__(self) -> int:
        return self.count


@pytest.mark.parametrize(
    ("count", "completions", "plain"),
    [
        (8, ["yes", "no"], True),
        (7, ["yes", "no"], False),  # fewer than four records for each
        (100, ["yes"], False),  # nothing to choose among
        (100, None, False),  # conversations, texts, or too many that differ
        (400, [str(i) for i in range(17)], False),
        (64, [str(i) for i in range(16)], True),
        (100, ["yes", "It is a long story, which began in the year of the flood."], False),
        (100, ["yes", "no\nbecause"], False),
        (100, [" yes\n", " no\n"], True),
    ],
)
def test_which_records_plainly_are_classifications(
    count: int, completions: list[str] | None, plain: bool
) -> None:
    records = Some(count, completions)
    assert (plain_choices(records) is not None) == plain
    assert choices_among(records, ["accuracy"]) == (completions if plain else None)
    assert choices_among(records, ["classification_accuracy"]) == completions
    assert choices_among(records, ["token_accuracy", "perplexity"]) is None


def spec(**fields: Any) -> EvalSpec:
    return EvalSpec.model_validate({"path": "held-out.jsonl", **fields})


def test_metrics_of_texts_generate() -> None:
    assert spec().metrics == ["accuracy"] and spec().generates is None
    asked = spec(metrics="exact_match").generates
    assert asked is not None and asked.max_new_tokens == 64
    own = spec(metrics=["perplexity"], generate={"max_new_tokens": 5, "samples": 1})
    assert own.generates is not None and not own.measures_texts


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong, said in (
        ({"metrics": ["bleu"]}, "rouge"),
        ({"metrics": ["rouge", "rouge"]}, "rouge twice"),
        ({"generate": {"max_new_tokens": 0}}, "max_new_tokens"),
        ({"generate": {"temperature": 0.5}}, "temperature"),
    ):
        with pytest.raises(ValidationError, match=said):
            spec(**wrong)
    nothing: importlib.machinery.ModuleSpec | None = None
    monkeypatch.setattr(evaluation, "find_spec", lambda name: nothing)
    with pytest.raises(ValidationError, match="pip install rouge-score"):
        spec(metrics=["rouge"])
