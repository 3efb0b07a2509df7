"""One sequence of a packed micro-batch, as attention sees it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """One sequence on the token axis, or the part of it that a chunk holds.

    Attributes:
        task: Name of the task it belongs to.
        start: First row.
        length: Number of tokens.
        sequence: Index of the sequence within its task's whole step (the same on every rank and packing).
        past: Tokens of the sequence in earlier chunks: attended to through the keys and values they left.
        continues: Whether later chunks hold more of the sequence, and want this one's keys and values.
        positions: Positions of the whole sequence, those of a prefix included.
    """

    task: str
    start: int
    length: int
    sequence: int
    past: int = 0
    continues: bool = False
    positions: int = 0
