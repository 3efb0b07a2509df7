"""Held-out records that know how many of them are in use, and their evaluation."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megatron_mux.backbone.model import Backbone
from megatron_mux.data.dataset import Example
from megatron_mux.engine import Engine, EvalResult
from megatron_mux.runtime import Parallel
from tests.end_to_end.families import FAMILIES, lora, prefix
from tests.end_to_end.harness import Case, Records, random_records
from tests.reference import solo
from tests.reference.loop import Example as Pair

VOCABULARY = 96
COUNT = 60


@dataclass
class Watched(Records):
    """Records that know how many of them are in use.

    Attributes:
        candidates_of: Each record's sequence with every completion, if they are to be classified.
        most: The most sequences that were in use at once.
    """

    candidates_of: list[list[Pair]] = field(default_factory=list)
    most: int = 0
    _alive: weakref.WeakSet[Example] = field(default_factory=weakref.WeakSet)

    def __getitem__(self, index: int) -> Example:
        return self._handed_out(super().__getitem__(index))

    def candidates(self, index: int) -> tuple[list[Example], int]:
        """What a `TaskDataset` gives: the own completion is at the record's number modulo their number."""
        if not self.candidates_of:
            return [self[index]], 0
        found = self.candidates_of[index]
        examples = [Example(tokens.numpy(), labelled.numpy(), None) for tokens, labelled in found]
        return list(map(self._handed_out, examples)), index % len(found)

    def _handed_out(self, example: Example) -> Example:
        self._alive.add(example)
        self.most = max(self.most, len(self._alive))
        return example


def classified(choices: int) -> Watched:
    """Records with completions of different lengths after one prompt each."""
    completions = random_records(choices, VOCABULARY, 3, 6, seed=1).pairs
    found = Watched(random_records(COUNT, VOCABULARY, 3, 14, seed=2).pairs, end_of_sequence=7)
    found.distinct_completions = [str(i) for i in range(choices)]  # type: ignore[assignment]
    for prompt, _ in found.pairs:
        labelled = [torch.arange(len(prompt) + len(c)) >= len(prompt) for c, _ in completions]
        found.candidates_of.append(
            [(torch.cat([prompt, c]), mask) for (c, _), mask in zip(completions, labelled, strict=True)]
        )
    return found


def plain() -> Watched:
    """Records of different lengths, learned in part."""
    return Watched(random_records(COUNT, VOCABULARY, 4, 24, seed=3).pairs, end_of_sequence=7)


def make_case(name: str, path: Path) -> Case:
    """A task with a LoRA adapter or a prefix, not fresh."""
    section = prefix(3) if name == "prefix" else lora(FAMILIES["llama"].query_value, r=3)
    training = {"per_device_train_batch_size": 2, "max_steps": 5}
    initial = solo.random_adapter(path, section, seed=4, dtype=torch.float64)
    return Case("task", section, training, random_records(4, VOCABULARY, 4, 8, seed=5), initial)


def uneven(records: Watched, ranks: int) -> Watched:
    """Short records for all data-parallel ranks but the first, so that they have fewer passes and groups."""
    records.pairs = [
        pair if i % ranks == 0 else (pair[0][:4], pair[1][:4]) for i, pair in enumerate(records.pairs)
    ]
    for _, labelled in records.pairs:
        labelled[-1] = True
    return records


def evaluated(
    backbone: Backbone | Sequence[Backbone], parallel: Parallel, case: Case, records: Records
) -> EvalResult:
    """Evaluate a task that was registered for it alone."""
    engine = Engine(backbone, parallel)
    task = case.task
    task.evaluation = records.as_dataset()
    engine.register_tasks([task])
    try:
        result = engine.evaluate("task")
    finally:
        engine.remove_task("task")
    assert result is not None
    return result
