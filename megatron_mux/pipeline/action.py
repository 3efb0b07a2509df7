"""Actions: the unit of work of a schedule, one forward or backward pass of one chunk on one stage."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

Pass = Literal["F", "B"]
Kind = Literal["F", "B", "N", "U"]

_FORM = re.compile(r"(\d+)(?:([FB])(\d+)\.(\d+)(?:\.(\d+))?|([NU])(\d+))")


@dataclass(frozen=True, order=True)
class ChunkId:
    """Which chunk of which micro-batch of which bucket: it travels through the pipeline as one tensor.

    Attributes:
        bucket: Index of the bucket, from 0. When several steps run without a flush, the index keeps counting:
            bucket b (of B) in step k has index k B + b.
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
        stage: Index of the pipeline stage, from 0; a rank with virtual stages has several. For `N` and `U`: the rank.
        kind: `F` is a forward pass, `B` a backward pass. `N` (norm) runs once all backward passes of a bucket are done
            on this rank: it adds this rank's losses and squared gradient norms and sends the sums to the previous
            rank. `U` (update) runs when the totals have come back from the first rank: it clips gradients, steps the
            tasks' optimizers, and passes the totals on to the next rank.
        bucket, micro_batch, chunk: See `ChunkId`. `N` and `U` concern a whole bucket.
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
    def chunk_id(self) -> ChunkId:
        """The chunk that this pass computes."""
        return ChunkId(self.bucket, self.micro_batch, self.chunk)

    @classmethod
    def of(cls, stage: int, kind: Kind, chunk_id: ChunkId) -> Action:
        """The pass of `chunk_id` on `stage`."""
        return cls(stage, kind, chunk_id.bucket, chunk_id.micro_batch, chunk_id.chunk)

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
        """Whether this is a forward or backward pass (not `N` or `U`)."""
        return self.kind in ("F", "B")

    @property
    def is_backward(self) -> bool:
        """Whether its result goes to the previous stage; otherwise it goes to the next one."""
        return self.kind in ("B", "N")

    def before(self, stages: int, ranks: int) -> Action | None:
        """The action on the neighbouring stage whose result this one needs; None if it needs none.

        Args:
            ranks: Number of ranks. `N` and `U` run once per rank, however many stages it has.
        """
        return self._shifted(1 if self.is_backward else -1, stages, ranks)

    def after(self, stages: int, ranks: int) -> Action | None:
        """The action on the neighbouring stage that needs this one's result; see `before`."""
        return self._shifted(-1 if self.is_backward else 1, stages, ranks)

    def _shifted(self, by: int, stages: int, ranks: int) -> Action | None:
        stage = self.stage + by
        return replace(self, stage=stage) if 0 <= stage < (stages if self.is_pass else ranks) else None


@dataclass(frozen=True)
class TimedPart:
    """When a part of a pass ran whose batches are computed in turns: a piece of one batch, or the message after it.

    Attributes:
        batch: Index of the batch.
        piece: Index of the piece among those of its batch.
        start, stop: Seconds, on the clock of the pass. A message starts once it has been issued and the one before it
            has arrived, and stops when it has arrived.
        message: The kind of the message; empty: this is a piece.
    """

    batch: int
    piece: int
    start: float
    stop: float
    label: str
    message: str = ""


@dataclass(frozen=True)
class TimedAction:
    """When an action ran, measured or simulated.

    Attributes:
        start, stop: Seconds, without the time spent waiting for a neighbour's tensor. Measured times are on the host's
            monotonic clock, simulated ones start from zero.
        parts: Pieces and messages of a pass whose batches are computed in turns.
    """

    action: Action
    start: float
    stop: float
    label: str
    parts: tuple[TimedPart, ...] = ()
