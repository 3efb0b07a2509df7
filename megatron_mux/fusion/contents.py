"""What chunks of a step contain, as tables of bytes want it."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from itertools import groupby

import numpy as np

from megatron_mux.footprint.content import ATTENTION, Contents
from megatron_mux.fusion.alignment import Slice
from megatron_mux.fusion.step import Lengths
from megatron_mux.kernels.attention.short import LONGEST, pairs_and_padding


def contents_of(
    micro_batches: Sequence[Sequence[Slice]],
    lengths: Mapping[str, Lengths],
    columns: Mapping[str, int],
    width: int,
    device: str,
    prefixed: Collection[str] = (),
) -> Contents:
    """What micro-batches, or chunks of them, contain.

    Args:
        micro_batches: The pieces of each.
        lengths: Of each task's step.
        columns: The signature of each task.
        prefixed: Tasks whose sequences have a prefix.
    """
    rows, labels = (np.zeros((len(micro_batches), width)) for _ in range(2))
    sequences, copied = (np.zeros(len(micro_batches)) for _ in range(2))
    attention = np.zeros((len(micro_batches), len(ATTENTION)))
    for number, pieces in enumerate(micro_batches):
        sequences[number] = len(pieces)
        short: list[int] = []
        runs: list[tuple[int, Hashable]] = []
        for piece in pieces:
            of_task, column = lengths[piece.task], columns[piece.task]
            whole, labelled = of_task.tokens[piece.sequence], of_task.labels[piece.sequence]
            rows[number, column] += piece.tokens
            labels[number, column] += max(0, min(piece.stop, whole) - max(piece.start, whole - labelled))
            copied[number] += piece.start + piece.tokens * (piece.stop < whole)
            task = piece.task if piece.task in prefixed else None
            is_short = not piece.start and task is None and piece.tokens <= LONGEST
            short += [piece.tokens] * is_short
            # Neighbours of one length that see as many keys are computed at once, with one mask.
            masked = piece.tokens * piece.stop * (piece.start > 0 or task is not None)
            alike = piece.tokens, task, piece.start and (piece.sequence, piece.start)
            runs.append((0, "short") if is_short else (masked, alike))
        if device == "cpu":
            calls = [masked for (masked, _), _ in groupby(runs)]
            total, joined = rows[number].sum(), len(calls) > 1
            long = total - sum(short)
            attention[number] = *pairs_and_padding(short), long, total * joined, long * joined, sum(calls)
    return Contents(rows, labels, sequences, copied, attention)
