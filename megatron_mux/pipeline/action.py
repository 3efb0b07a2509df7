"""An action: what one stage computes in one clock, and when it did."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

Pass = Literal["F", "B"]
Kind = Literal["F", "B", "N", "U"]

_FORM = re.compile(r"(\d+)(?:([FB])(\d+)\.(\d+)(?:\.(\d+))?|([NU])(\d+))")


@dataclass(frozen=True, order=True)
class Unit:
    """What travels through the pipeline as one tensor: a chunk of a micro-batch of a bucket.

    Attributes:
        bucket: Index of the bucket, from 0. Where steps follow each other without a flush it counts on over them:
            bucket b of B of step k is k B + b.
        micro_batch: Index of the micro-batch within its bucket, from 0.
        chunk: Index of the chunk within the packs of the micro-batch, from 0: forward in order, backward in reverse.
    """

    bucket: int
    micro_batch: int
    chunk: int = 0


@dataclass(frozen=True, order=True)
class Action:
    """One forward or backward pass of one chunk on one stage, or the end of a bucket's step there.

    The string form of a pass is `<stage><F|B><bucket>.<micro-batch>`, for instance `0F1.3`, and `0F1.3.2` for its
    chunk 2 (chunk 0 is not written); of the others `<stage><N|U><bucket>`, for instance `0N1`.

    Attributes:
        stage: Pipeline stage, from 0; with virtual stages there are several to a rank. Of `N` and `U`: the rank.
        kind: `F` forward, `B` backward. `N`: all of a bucket's backward passes are done here: its tasks' losses and
            the squared norms of their gradients, those of this rank added, go to the rank before. `U`: they have come
            back from the first rank, whole: clip, let the tasks' optimizers step here, pass them on to the next rank.
        bucket, micro_batch, chunk: See `Unit`; `N` and `U` are of a whole bucket.
    """

    stage: int
    kind: Kind
    bucket: int
    micro_batch: int = 0
    chunk: int = 0

    def __str__(self) -> str:
        if self.kind in ("N", "U"):
            return f"{self.stage}{self.kind}{self.bucket}"
        chunk = f".{self.chunk}" if self.chunk else ""
        return f"{self.stage}{self.kind}{self.bucket}.{self.micro_batch}{chunk}"

    @property
    def unit(self) -> Unit:
        """What it computes."""
        return Unit(self.bucket, self.micro_batch, self.chunk)

    @classmethod
    def of(cls, stage: int, kind: Kind, unit: Unit) -> Action:
        """The pass of `unit` on `stage`."""
        return cls(stage, kind, unit.bucket, unit.micro_batch, unit.chunk)

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read the string form.

        Raises:
            ValueError: `text` is not the form of an action.
        """
        match = _FORM.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{text!r} is not an action: write <stage><F|B><bucket>.<micro-batch>[.<chunk>], like 0F1.3, "
                "or <stage><N|U><bucket>, like 0N1"
            )
        stage, kind, bucket, micro_batch, chunk, end, ended = match.groups()
        if end:
            return cls(int(stage), "N" if end == "N" else "U", int(ended))
        return cls(int(stage), "F" if kind == "F" else "B", int(bucket), int(micro_batch), int(chunk or 0))

    @property
    def is_pass(self) -> bool:
        """Whether it computes a unit; else it ends a bucket's step."""
        return self.kind in ("F", "B")

    @property
    def is_backward(self) -> bool:
        """Whether what it makes goes to the stage before, else to the next."""
        return self.kind in ("B", "N")

    def before(self, stages: int, ranks: int) -> Action | None:
        """The action of the same kind that makes what this one needs; None: it needs nothing of another stage.

        Args:
            stages: Number of stages.
            ranks: They are on; `N` and `U` are of a rank, whatever the number of its stages.
        """
        return self._shifted(1 if self.is_backward else -1, stages, ranks)

    def after(self, stages: int, ranks: int) -> Action | None:
        """The action of the same kind that needs what this one makes; see `before`."""
        return self._shifted(-1 if self.is_backward else 1, stages, ranks)

    def _shifted(self, by: int, stages: int, ranks: int) -> Action | None:
        stage = self.stage + by
        return replace(self, stage=stage) if 0 <= stage < (stages if self.is_pass else ranks) else None


@dataclass(frozen=True)
class TimedAction:
    """When an action ran, or would run.

    Attributes:
        action: What ran.
        start, stop: From when to when in seconds, waiting for a neighbour's tensor left out; of the host's monotonic
            clock when measured, from zero when simulated.
        label: What to write on it in a picture.
    """

    action: Action
    start: float
    stop: float
    label: str
