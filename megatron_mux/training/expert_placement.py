"""The placement of experts that a run asks for."""

from __future__ import annotations

from pathlib import Path

from megatron_mux.backbone.registry import BackboneInfo
from megatron_mux.errors import UserError
from megatron_mux.expert_shape import Placement
from megatron_mux.moe.placement import read_placement
from megatron_mux.moe.profile_tasks import identity


def expert_placement(file: Path | None, info: BackboneInfo, ranks: int) -> Placement | None:
    """Which expert ranks hold which experts.

    Args:
        file: Of `--mux-expert-placement`, if given.
        info: The backbone.
        ranks: Number of expert ranks.

    Returns:
        The file's placement; None for the backbone's default.

    Raises:
        UserError: The file is unreadable, for another backbone or another number of ranks, or leaves an expert out.
    """
    if file is None:
        return None
    experts = info.shape.experts
    if experts is None:
        raise UserError(f"--mux-expert-placement {file}: a {info.shape.family} has no experts: remove it")
    found = read_placement(file, identity(info), ranks)
    layers = experts.layers(info.shape.layers)
    return Placement(ranks, dict(zip(layers, found.placement, strict=True)), found.nodes or ())
