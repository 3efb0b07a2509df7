"""Records of which only the lengths are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_mux.data.tokenise import Example
from megatron_mux.fusion.load import TaskLoad
from megatron_mux.fusion.plan import Plan


class LengthsAlone:
    """What the engine takes for a `TaskDataset`: every token is 0, the last ones of each record are labelled.

    Args:
        lengths: Tokens of each record.
        labels: Labelled tokens of each, at its end.
    """

    distinct_completions = None
    end_of_sequence = 0
    dropped = 0
    path = Path("rehearsal")

    def __init__(self, lengths: Sequence[int], labels: Sequence[int]) -> None:
        self.lengths: npt.NDArray[np.int32] = np.array(lengths, np.int32)
        self.label_counts: npt.NDArray[np.int32] = np.array(labels, np.int32)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> Example:
        length, labels = int(self.lengths[number]), int(self.label_counts[number])
        return Example(np.zeros(length, np.int64), np.arange(length) >= length - labels, None)


class AsGiven:
    """In place of a planner, where there is a plan already."""

    memory_limit = None

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def plan(self, loads: Mapping[str, TaskLoad]) -> Plan:
        """The plan."""
        return self._plan

    def check(self, loads: Mapping[str, TaskLoad]) -> None:
        """Nothing is refused."""

    def priced(self, plan: Plan, loads: Mapping[str, TaskLoad]) -> Plan:
        """The plan as it is."""
        return plan
