"""What one rank meets, all have to know: a rank that gave up alone would leave the others waiting for it."""

from __future__ import annotations

import torch.distributed as dist

from megatron_mux.errors import SharedError
from megatron_mux.runtime import Parallel


def first_problem(problem: str, parallel: Parallel) -> str:
    """The problem of the first rank that has one, in the same words on every rank; empty if none has.

    Every rank calls it. Not for a step's hot path: objects travel.

    Args:
        problem: This rank's, or empty.
        parallel: Where this rank stands.

    Returns:
        The problem, with the rank named unless it is the first.
    """
    problems = [problem]
    if parallel.world_size > 1:
        problems = [""] * parallel.world_size
        dist.all_gather_object(problems, problem)
    for rank, text in enumerate(problems):
        if text:
            return f"rank {rank}: {text}" if rank else text
    return ""


def raise_on_every_rank(problem: str, parallel: Parallel) -> None:
    """Go on only if no rank has a problem. Every rank calls it.

    Args:
        problem: This rank's, or empty.
        parallel: Where this rank stands.

    Raises:
        SharedError: On every rank, with the words of the first that has a problem.
    """
    if parallel.total([bool(problem)])[0]:
        raise SharedError(first_problem(problem, parallel))
