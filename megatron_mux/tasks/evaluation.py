"""The `eval` section: held-out records, what is measured on them, and when."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, ClassVar, Literal, Protocol, TypeVar, get_args

from pydantic import Field, model_validator

from megatron_mux.data.section import SOURCE_REFUSED, DataSource
from megatron_mux.section import LARGEST_BATCH, LARGEST_COUNT, Refused, Section, problem

T = TypeVar("T")

TOKENS_PER_PASS = 2048
"""Of an evaluation: large enough to use the processor well, small enough to bound activations."""

Metric = Literal[
    "accuracy", "token_accuracy", "classification_accuracy", "exact_match", "rouge", "perplexity"
]
"""What can be measured beside the loss."""

OF_TEXTS: frozenset[Metric] = frozenset({"exact_match", "rouge"})
"""Metrics of generated texts."""

LOWER_IS_BETTER = frozenset({"loss", "perplexity"})
"""Figures of an evaluation that a better model has lower."""

MOST_SAMPLES = 1000

# A small evaluation is cut into as many passes, times the ranks of a pipeline, unless they get smaller than
# `_LEAST_PER_PASS` tokens: with fewer the stages wait for each other.
_FILLING = 4
_LEAST_PER_PASS = 128

_PLAIN_CHOICES = 16
_RECORDS_PER_CHOICE = 4
_LONGEST_CHOICE = 40


class GenerateSpec(Section):
    """Greedy generation on the prompts of the held-out records."""

    max_new_tokens: int = Field(default=64, ge=1, le=LARGEST_COUNT)
    """Maximum number of tokens after a prompt; end-of-sequence or the chat template's end of turn stops earlier."""
    samples: int = Field(default=3, ge=0, le=MOST_SAMPLES)
    """Number of completions that are written to `samples.jsonl` and shown, of the file's first records. Without a
    metric of generated texts nothing else is generated."""


WHEN_EVALUATED = (
    "an eval section evaluates before the first step, every eval_steps and at the end: leave it out"
)
"""Said of fields of `transformers` that choose when to evaluate."""


class EvalSpec(DataSource):
    """Held-out records, read like those of the `data` section, and when to evaluate on them."""

    eval_steps: int = Field(default=500, ge=1, le=LARGEST_COUNT)
    """Evaluate every so many of the task's steps, besides at its beginning and end."""
    per_device_eval_batch_size: int | None = Field(default=None, ge=1, le=LARGEST_BATCH)
    """Maximum number of sequences evaluated together, those of other tasks included; None: as many as fill a pass.
    Affects memory, not results."""
    metrics: list[Metric] = Field(default=["accuracy"])
    """What is measured beside the loss. `accuracy` is `classification_accuracy` where the records plainly are
    classifications (see `plain_choices`), else `token_accuracy`."""
    generate: GenerateSpec | None = None
    """Generation on the prompts; None: none, unless a metric asks for it."""

    refused: ClassVar[Mapping[str, Refused]] = {
        **SOURCE_REFUSED,
        "eval_strategy": Refused(WHEN_EVALUATED, (None, "steps")),
        "evaluation_strategy": Refused(WHEN_EVALUATED, (None, "steps")),
        "do_eval": Refused(WHEN_EVALUATED, (None, True)),
        "eval_on_start": Refused(WHEN_EVALUATED, (None, False, True)),
    }

    @model_validator(mode="before")
    @classmethod
    def _one_metric(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("metrics"), str):
            return {**value, "metrics": [value["metrics"]]}
        return value

    @model_validator(mode="after")
    def _check_metrics(self) -> EvalSpec:
        twice = [name for name in get_args(Metric) if self.metrics.count(name) > 1]
        if twice:
            raise problem(f"metrics has {twice[0]} twice: name it once")
        if "rouge" in self.metrics and find_spec("rouge_score") is None:
            raise problem(
                "metrics: rouge needs the package rouge-score: pip install rouge-score, or leave rouge out"
            )
        return self

    @property
    def generates(self) -> GenerateSpec | None:
        """What is generated, if anything is."""
        return self.generate or (GenerateSpec() if self.measures_texts else None)

    @property
    def measures_texts(self) -> bool:
        """Whether some metric compares generated texts with the records' own."""
        return not OF_TEXTS.isdisjoint(self.metrics)


def tokens_per_pass(total: int, ranks: int) -> int:
    """Tokens of a pass of an evaluation.

    Args:
        total: Tokens that a pipeline evaluates.
        ranks: Of the pipeline.
    """
    if ranks == 1:
        return TOKENS_PER_PASS
    return min(TOKENS_PER_PASS, max(_LEAST_PER_PASS, -(-total // (_FILLING * ranks))))


def filled(
    items: Iterable[T],
    size: Callable[[T], int],
    most: int = TOKENS_PER_PASS,
    together: Callable[[T], float] = lambda item: math.inf,
) -> Iterator[list[T]]:
    """Yield items in order, as many at a time as fill a pass; a larger one is by itself.

    Args:
        items: What is packed.
        size: Returns an item's tokens.
        most: Tokens of a pass.
        together: Returns how many items a pass with this one may have.
    """
    some: list[T] = []
    tokens, limit = 0, math.inf
    for item in items:
        length, count = size(item), together(item)
        if some and (tokens + length > most or len(some) >= min(limit, count)):
            yield some
            some, tokens, limit = [], 0, math.inf
        some.append(item)
        tokens, limit = tokens + length, min(limit, count)
    if some:
        yield some


class Completions(Protocol):
    """Records, as far as is asked here: a `TaskDataset`."""

    def __len__(self) -> int: ...

    @property
    def distinct_completions(self) -> Sequence[str] | None:
        """The completions that occur, if every record has one and few differ."""


def choices_among(records: Completions, metrics: Sequence[Metric]) -> Sequence[str] | None:
    """The completions that an evaluation scores with every prompt; None where it scores the record's own alone.

    Args:
        records: The held-out records.
        metrics: What is measured.
    """
    if "classification_accuracy" in metrics:
        return records.distinct_completions
    return plain_choices(records) if "accuracy" in metrics else None


def plain_choices(records: Completions) -> Sequence[str] | None:
    """The completions, where the records plainly are classifications.

    That is: every record has a prompt and a completion (conversations have none); 2 to 16 completions differ, each of
    one line and at most 40 characters; and there are at least four times as many records.
    """
    choices = records.distinct_completions
    if choices is None or not 2 <= len(choices) <= _PLAIN_CHOICES:
        return None
    if len(records) < _RECORDS_PER_CHOICE * len(choices):
        return None
    texts = [text.strip() for text in choices]
    return choices if all(len(text) <= _LONGEST_CHOICE and "\n" not in text for text in texts) else None
