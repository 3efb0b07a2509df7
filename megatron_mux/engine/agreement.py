"""Ranks agree on problems: a rank that stopped alone would leave the others waiting for it in a collective."""

from __future__ import annotations

import torch.distributed as dist

from megatron_mux.errors import SharedError
from megatron_mux.runtime import Parallel


def first_problem(problem: str, parallel: Parallel) -> str:
    """Return the first rank's problem on every rank; empty if no rank has one.

    Every rank calls it. It gathers objects: not for a step's hot path.

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
    """Raise on every rank if any rank has a problem. Every rank calls it.

    Args:
        problem: This rank's, or empty.
        parallel: Where this rank stands.

    Raises:
        SharedError: With the problem of the first rank that has one.
    """
    if parallel.total([bool(problem)])[0]:
        raise SharedError(first_problem(problem, parallel))
