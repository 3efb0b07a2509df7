"""The ways to divide ranks that a backbone and its tasks allow."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_mux.base_ops import EXPERT_OPS
from megatron_mux.expert_ranks import size_problems
from megatron_mux.fusion.load import TaskLoad
from megatron_mux.fusion.mesh import Mesh
from megatron_mux.shape import BackboneShape


def adapts_experts(loads: Iterable[TaskLoad]) -> bool:
    """Whether some task has adapters on routed experts, whose matrices tensor ranks then do not divide."""
    return any(site.op in EXPERT_OPS for load in loads for site in load.ops)


def possible_meshes(
    shape: BackboneShape, ranks: int, virtual: int = 1, whole_experts: bool = False
) -> list[Mesh]:
    """List the ways to divide so many ranks.

    Args:
        shape: The backbone's.
        ranks: Number of ranks.
        virtual: Pipeline stages of each rank, where there are several ranks to a pipeline.
        whole_experts: Whether tensor ranks may not divide an expert; else they divide each as they do layers.
    """
    found = []
    for tensor in _divisors(ranks):
        for pipeline in _divisors(ranks // tensor):
            stages = pipeline * (virtual if pipeline > 1 else 1)
            mesh = Mesh(tensor, pipeline, ranks // (tensor * pipeline))
            if shape.experts is None:
                if not shape.parallel_problems(tensor, stages):
                    found.append(mesh)
                continue
            share = 1 if whole_experts else tensor
            for expert in _divisors(ranks // (pipeline * share)):
                if not (
                    shape.parallel_problems(tensor, stages, expert, share)
                    or size_problems(ranks, tensor, pipeline, expert, share)
                ):
                    found.append(Mesh(tensor, pipeline, mesh.data, expert=expert, expert_tensor=share))
    return found


def _divisors(count: int) -> list[int]:
    return [size for size in range(1, count + 1) if count % size == 0]
