"""The held-out records of several tasks, a group at a time: what one evaluation holds in memory at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron_mux.data.dataset import Example, TaskDataset
from megatron_mux.data.preference_file import PreferenceDataset
from megatron_mux.engine.task_state import TaskState
from megatron_mux.runtime import Parallel
from megatron_mux.tasks.evaluation import EvalSpec, GenerateSpec, Metric, choices_among

Tokens = npt.NDArray[np.int64]


class Records(Protocol):
    """What is evaluated: a `TaskDataset`, or some records of one."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Example: ...

    def candidates(self, number: int, /) -> tuple[list[Example], int]:
        """See `TaskDataset.candidates`."""

    @property
    def end_of_sequence(self) -> int:
        """See `TaskDataset`."""

    @property
    def distinct_completions(self) -> Sequence[str] | None:
        """See `TaskDataset`."""


@dataclass(frozen=True)
class HeldOut:
    """A task and the records that it is evaluated on.

    Attributes:
        task: The task, attached.
    """

    task: TaskState
    records: Records

    @property
    def name(self) -> str:
        """Of the task."""
        return self.task.task.spec.name

    @property
    def preferences(self) -> PreferenceDataset:
        """The records of a preference task."""
        assert isinstance(self.records, PreferenceDataset)
        return self.records

    @property
    def spec(self) -> EvalSpec | None:
        """The task's `eval` section; None: its records were given by a program."""
        return self.task.task.spec.eval

    @property
    def metrics(self) -> Sequence[Metric]:
        """What is measured beside the loss."""
        return ["accuracy"] if self.spec is None else self.spec.metrics

    @property
    def generates(self) -> GenerateSpec | None:
        """What is generated: nothing for records that a program gave, or of which only lengths are known."""
        is_own = self.records is self.task.task.evaluation and self.tokenizer is not None
        return self.spec.generates if self.spec is not None and is_own else None

    @property
    def measures_texts(self) -> bool:
        """Whether some metric needs a completion of every record."""
        return self.spec is not None and self.spec.measures_texts

    @property
    def tokenizer(self) -> Any:
        """Of the records; None if they have none."""
        return getattr(self.records, "tokenizer", None)

    @property
    def batch_size(self) -> int | None:
        """Most sequences of a pass that has some of this task; None is bound by tokens alone."""
        return None if self.spec is None else self.spec.per_device_eval_batch_size

    @property
    def choices(self) -> Sequence[str] | None:
        """The completions that are scored with every prompt; None: the record's own alone."""
        return choices_among(self.records, self.metrics)


class Unprompted(Enum):
    """Why nothing is generated for a record; completes "3 of 8 records have "."""

    NO_PROMPT = "no prompt to continue"
    CUT_PROMPT = "a prompt that data.max_length cuts: nothing is generated for them"


def prompt_and_completion(records: TaskDataset, number: int) -> tuple[Tokens, Tokens] | Unprompted:
    """The tokens before a record's last run of labels, and those of the run, uncut; or why there is no prompt."""
    example, kept = records.uncut(number)
    start, stop = np.flatnonzero(np.diff(example.labelled, prepend=False, append=False))[-2:].tolist()
    # Without a prompt every token but the first one is labelled, as after a prompt of one token.
    if start == 1 and example.unprompted:
        return Unprompted.NO_PROMPT
    if kept.start > 0 or kept.stop < start:
        return Unprompted.CUT_PROMPT
    return example.tokens[:start], example.tokens[start:stop]


@dataclass(frozen=True)
class HeldOutRecord:
    """A record as it is scored.

    Attributes:
        task: Name of its task.
        examples: Its sequence, or one with every completion of the file.
        own: Which of them is the record itself.
    """

    task: str
    examples: list[Example]
    own: int


@dataclass(eq=False)
class RecordGroups:
    """This rank's share of all tasks' records, task after task, as many at a time as fill some passes.

    A record is never divided.

    Attributes:
        tasks: The tasks, in one order on every rank.
        parallel: Where this rank stands: data-parallel ranks share the records of all tasks evenly.
        tokens: Tokens of a group, or more by a part of its last record.
        passes: Passes that the sequences of a group fill where a task bounds those of a pass.
        problems: Why tasks cannot be evaluated, by name: the same on every rank.
    """

    tasks: Sequence[HeldOut]
    parallel: Parallel
    tokens: int
    passes: int
    problems: dict[str, str] = field(default_factory=dict)
    _groups: Iterator[list[HeldOutRecord]] = field(init=False)

    def __post_init__(self) -> None:
        self._groups = self._in_groups()

    def next(self) -> list[HeldOutRecord] | None:
        """This rank's next group, empty if only others have one left; None once nobody has. Every rank calls it."""
        group = next(self._groups, [])
        return group if self.parallel.total([bool(group)])[0] else None

    def _in_groups(self) -> Iterator[list[HeldOutRecord]]:
        group: list[HeldOutRecord] = []
        tokens = sequences = 0
        for batch_size, record in self._mine():
            group.append(record)
            tokens += sum(len(example.tokens) for example in record.examples)
            sequences += len(record.examples)
            if tokens >= self.tokens or (batch_size and sequences >= self.passes * batch_size):
                yield group
                group, tokens, sequences = [], 0, 0
        if group:
            yield group

    def _mine(self) -> Iterator[tuple[int | None, HeldOutRecord]]:
        """This rank's records, each with the batch size of its task."""
        before = 0
        for task in self.parallel.experts.share(self.tasks):
            count = len(task.records)
            first = (self.parallel.dp_rank - before) % self.parallel.dp_size
            classifies = task.choices is not None
            for number in range(first, count, self.parallel.dp_size):
                if task.name in self.problems:
                    break
                read = task.records.candidates(number) if classifies else ([task.records[number]], 0)
                yield task.batch_size, HeldOutRecord(task.name, *read)
            before += count
