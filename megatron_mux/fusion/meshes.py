"""The ways to divide ranks that a backbone allows."""

from __future__ import annotations

from megatron_mux.fusion.mesh import Mesh
from megatron_mux.shape import BackboneShape


def possible_meshes(shape: BackboneShape, ranks: int, virtual: int = 1) -> list[Mesh]:
    """List the ways to divide so many ranks. Experts are divided among pipelines, each of them as layers are.

    Args:
        shape: The backbone's.
        ranks: Number of ranks.
        virtual: Pipeline stages of each rank, where there are several ranks to a pipeline.
    """
    found = []
    for tensor in _divisors(ranks):
        for pipeline in _divisors(ranks // tensor):
            data = ranks // (tensor * pipeline)
            stages = pipeline * (virtual if pipeline > 1 else 1)
            if shape.experts is None:
                if not shape.parallel_problems(tensor, stages):
                    found.append(Mesh(tensor, pipeline, data))
                continue
            for expert in _divisors(data):
                if not shape.parallel_problems(tensor, stages, expert, tensor):
                    found.append(Mesh(tensor, pipeline, data, expert=expert, expert_tensor=tensor))
    return found


def _divisors(count: int) -> list[int]:
    return [size for size in range(1, count + 1) if count % size == 0]
