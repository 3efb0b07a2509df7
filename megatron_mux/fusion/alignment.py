"""Alignment (MuxTune section 3.5): a step's sequences become micro-batches, packs and chunks.

Sequences of a task are laid end to end, never with another task's; a pack may be cut into equal chunks, of which the
last may be short. So no token is computed that carries no information. (The paper pads each sequence to its task's
maximum first; that is a mode here.)

They follow from the plan and from lengths that every rank knows: nobody has to ask anybody.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import chain, groupby
from typing import Literal, TypeVar

Mode = Literal["dense", "max-length", "longest"]
"""Sequences as they are; padded to their task's `max_length`; padded to the longest `max_length` of all tasks."""

LEAST_CHUNK = 64
"""Tokens of the smallest chunk that the paper's rule gives: smaller ones leave the device underused."""


@dataclass(frozen=True)
class Weights:
    """What a sequence costs, to balance micro-batches by: seconds, or any unit.

    Attributes:
        token: For each token.
        pair: For each pair of a token and one that it may attend to.
        label: For each labelled token (the loss head).
    """

    token: float = 1.0
    pair: float = 0.0
    label: float = 0.0

    def __post_init__(self) -> None:
        if not all(0 <= weight < math.inf for weight in (self.token, self.pair, self.label)):
            raise ValueError(f"weights are finite and not negative, got {self}")

    def of(self, tokens: int, labels: int) -> float:
        """The cost of one sequence."""
        return self.token * tokens + self.pair * (tokens * (tokens + 1) / 2) + self.label * labels


@dataclass(frozen=True)
class Item:
    """One sequence of a step.

    Attributes:
        sequence: Its number within the task's step.
        tokens: Its length, padding included.
        cost: What it weighs when micro-batches are balanced.
        record: Number of its record within the task's step: sequences of a record are never divided over pipelines or
            micro-batches.
    """

    task: str
    sequence: int
    tokens: int
    cost: float
    record: int


@dataclass(frozen=True)
class Slice:
    """What a chunk holds of a sequence.

    Attributes:
        task, sequence: Which one.
        start, stop: Its first token in the chunk, and one past the last.
    """

    task: str
    sequence: int
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        """How many."""
        return self.stop - self.start


Shared = TypeVar("Shared")
Chunk = tuple[Slice, ...]
"""What is computed in one clock: slices of several packs, in the order of their tasks."""

MicroBatchChunks = tuple[Chunk, ...]
"""The chunks of one micro-batch, in the order of forward passes."""


def paper_chunk(max_lengths: Sequence[int]) -> int:
    """The paper's chunk size: the greatest power of two that divides all maximum lengths, and at least 64."""
    if not max_lengths or min(max_lengths) < 1:
        raise ValueError(f"a chunk size is for lengths of at least 1, got {list(max_lengths)}")
    size = LEAST_CHUNK
    while all(length % (2 * size) == 0 for length in max_lengths):
        size *= 2
    return size


def padded_lengths(mode: Mode, max_lengths: Mapping[str, int]) -> dict[str, int]:
    """To how many tokens each task's sequences are padded; empty in mode `dense`."""
    if mode == "dense":
        return {}
    longest = max(max_lengths.values(), default=0)
    return {name: length if mode == "max-length" else longest for name, length in max_lengths.items()}


class Filled:
    """What pipelines and micro-batches hold already, so that what comes next goes where there is least.

    Args:
        micro_batches: C.
    """

    def __init__(self, pipelines: int = 1, micro_batches: int = 1) -> None:
        self.pipelines = [0.0] * pipelines
        self.micro_batches = [[0.0] * micro_batches for _ in range(pipelines)]

    def next_bucket(self, micro_batches: int) -> None:
        """Begin with empty micro-batches; pipelines stay as they are."""
        self.micro_batches = [[0.0] * micro_batches for _ in self.pipelines]


def cut_into_chunks(
    items: Sequence[Item], chunk: int | None, filled: Filled, data_rank: int = 0
) -> tuple[MicroBatchChunks, ...]:
    """Cut one pipeline's share of a hybrid task's step.

    Args:
        items: The hybrid task's sequences over all pipelines, task after task.
        chunk: Tokens of a chunk; None: micro-batches are not cut.
        filled: What there is so far; changed.

    Returns:
        C micro-batches, of which some may be empty; no chunk is.
    """
    records = [tuple(group) for _, group in groupby(items, key=lambda item: (item.task, item.record))]
    mine = share_out(records, [_cost(record) for record in records], filled.pipelines)[data_rank]
    parts = share_out(mine, [_cost(record) for record in mine], filled.micro_batches[data_rank])
    return tuple(_micro_batch(list(chain(*part)), chunk) if part else () for part in parts)


def _cost(record: Sequence[Item]) -> float:
    return sum(item.cost for item in record)


def share_out(items: Sequence[Shared], costs: Sequence[float], filled: list[float]) -> list[list[Shared]]:
    """Split items into parts of nearly equal cost: the dearest first, each to the part that has least so far.

    Args:
        filled: What each part holds already; changed.

    Returns:
        A list for each part, items in their original order; some may be empty. Deterministic.
    """
    chosen: list[list[int]] = [[] for _ in filled]
    least = [(cost, 0, part) for part, cost in enumerate(filled)]
    heapify(least)
    for i in sorted(range(len(items)), key=lambda i: (-costs[i], i)):
        _, count, part = least[0]
        filled[part] += costs[i]
        chosen[part].append(i)
        heapreplace(least, (filled[part], count + 1, part))
    return [[items[i] for i in sorted(indices)] for indices in chosen]


def _micro_batch(items: Sequence[Item], chunk: int | None) -> MicroBatchChunks:
    longest = max(item.tokens for item in items)
    if chunk is None or longest <= chunk:
        # Every pack would be one chunk.
        return (tuple(Slice(item.task, item.sequence, 0, item.tokens) for item in items),)
    clocks = -(-longest // chunk)
    packs = [_cut(pack, chunk) for pack in _packs(items, clocks * chunk)]
    return _chunks_of(packs, clocks, [item.task for item in items])


def _packs(items: Sequence[Item], capacity: int) -> list[list[Item]]:
    """Each task's sequences end to end in packs of at most `capacity` tokens: longest first, where it still fits."""
    packs: list[tuple[str, int, list[Item]]] = []
    for item in sorted(items, key=lambda item: -item.tokens):
        for i, (task, filled, pack) in enumerate(packs):
            if task == item.task and filled + item.tokens <= capacity:
                packs[i] = (task, filled + item.tokens, [*pack, item])
                break
        else:
            packs.append((item.task, item.tokens, [item]))
    return [pack for _, _, pack in packs]


def _cut(pack: Sequence[Item], chunk: int) -> list[list[Slice]]:
    """The chunks of a pack, all of `chunk` tokens but the last."""
    chunks: list[list[Slice]] = [[]]
    room = chunk
    for item in pack:
        at = 0
        while at < item.tokens:
            if not room:
                chunks.append([])
                room = chunk
            taken = min(room, item.tokens - at)
            chunks[-1].append(Slice(item.task, item.sequence, at, at + taken))
            at, room = at + taken, room - taken
    return chunks


def _chunks_of(packs: Sequence[list[list[Slice]]], clocks: int, tasks: Sequence[str]) -> MicroBatchChunks:
    """Let each pack begin where clocks come out most even: longest packs first."""
    filled = [0] * clocks
    cells: list[list[Slice]] = [[] for _ in range(clocks)]
    for pack in sorted(packs, key=lambda pack: -sum(s.tokens for chunk in pack for s in chunk)):
        sizes = [sum(s.tokens for s in chunk) for chunk in pack]

        def unevenness(first: int, sizes: Sequence[int] = sizes) -> tuple[int, int]:
            return sum(2 * filled[first + i] * n for i, n in enumerate(sizes)), first

        first = min(range(clocks - len(pack) + 1), key=unevenness)
        for i, chunk in enumerate(pack):
            filled[first + i] += sizes[i]
            cells[first + i] += chunk
    order = {task: i for i, task in enumerate(dict.fromkeys(tasks))}
    return tuple(tuple(sorted(cell, key=lambda s: (order[s.task], s.sequence))) for cell in cells if cell)


def padding_shares(lengths: Mapping[str, Sequence[int]], pad_to: Mapping[str, int]) -> dict[str, float]:
    """Of all tokens that a step computes, the shares that carry no information.

    Args:
        lengths: Raw lengths of each task's sequences in the step.
        pad_to: From `padded_lengths`.

    Returns:
        `plan`: with this alignment; `within_tasks`: if sequences were padded to the longest of their task's batch;
        `zero_padded`: to the longest of all tasks.
    """
    longest = max((max(tokens, default=0) for tokens in lengths.values()), default=0)
    computed = {
        "plan": sum(len(t) * pad_to[name] if pad_to else sum(t) for name, t in lengths.items()),
        "within_tasks": sum(len(t) * max(t, default=0) for t in lengths.values()),
        "zero_padded": sum(len(t) for t in lengths.values()) * longest,
    }
    real = sum(sum(t) for t in lengths.values())
    return {name: 1 - real / tokens if tokens else 0.0 for name, tokens in computed.items()}
