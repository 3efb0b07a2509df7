"""Ranks agree on objects, and on problems: a rank that stopped alone would leave the others waiting in a collective.

Objects are pickled: not for a step's hot path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_mux.errors import SharedError, UserError, failed_allocation
from megatron_mux.runtime import Parallel

T = TypeVar("T")


def everyones(value: T, parallel: Parallel) -> list[T]:
    """Every rank's value, by rank. Every rank calls it."""
    values = [value] * parallel.world_size
    if parallel.world_size > 1:
        dist.all_gather_object(values, value)
    return values


def from_first(value: T, parallel: Parallel) -> T:
    """The first rank's value on every rank. Every rank calls it."""
    shared = [value]
    if parallel.world_size > 1:
        dist.broadcast_object_list(shared, src=0)
    return shared[0]


def computed_by_first(compute: Callable[[], T], parallel: Parallel) -> T:
    """Compute a value on the first rank; returns it on every rank. Every rank calls it.

    Raises:
        SharedError: The first rank's computation raised an exception, which is raised there as it is.
    """
    values: list[T] = []
    if parallel.rank == 0:
        try:
            values.append(compute())
        except Exception as error:
            from_first((values, str(error) if isinstance(error, UserError) else repr(error)), parallel)
            raise
    values, problem = from_first((values, ""), parallel)
    if problem:
        raise SharedError(problem)
    return values[0]


def first_problem(problem: str, parallel: Parallel) -> str:
    """Return the first rank's problem on every rank; empty if no rank has one.

    Every rank calls it.

    Args:
        problem: This rank's, or empty.
        parallel: Where this rank stands.

    Returns:
        The problem, with the rank named unless it is the first.
    """
    for rank, text in enumerate(everyones(problem, parallel)):
        if text:
            return f"rank {rank}: {text}" if rank else text
    return ""


def raise_on_every_rank(problem: str, parallel: Parallel) -> None:
    """Raise on every rank if any rank has a problem. Every rank calls it.

    Args:
        problem: This rank's, or empty.
        parallel: Where this rank stands.

    Raises:
        SharedError: With the problem of the first rank that has one.
    """
    if parallel.total([bool(problem)])[0]:
        raise SharedError(first_problem(problem, parallel))


@contextmanager
def out_of_memory_on_every_rank(what: str, parallel: Parallel) -> Iterator[None]:
    """Context without collectives that every rank enters.

    Args:
        what: What there is no memory for.
        parallel: Where this rank stands.

    Raises:
        SharedError: Some rank ran out of memory.
    """
    problem = ""
    try:
        yield
    except torch.OutOfMemoryError as error:
        problem = f"{what} ({failed_allocation(error)})"
    raise_on_every_rank(problem, parallel)
