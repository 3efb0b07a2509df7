"""Files that say where a backbone's experts are, and how often rows select them."""

from __future__ import annotations

from pathlib import Path

from megatron_mux.backbone.registry import BackboneInfo
from megatron_mux.errors import UserError
from megatron_mux.expert_shape import Placement
from megatron_mux.memory.assumed_routes import Access
from megatron_mux.shape import BackboneShape


def read_expert_files(
    shape: BackboneShape, placed: Path | None, profiled: Path | None
) -> tuple[Placement | None, Access | None]:
    """Which expert ranks hold which experts, and how likely rows select each.

    Args:
        placed: Of `--mux-expert-placement`, as megatron-mux place-experts writes it; None: experts are divided evenly.
        profiled: Of `--expert-profile`, as megatron-mux profile-experts writes it; None: rows select all equally often.

    Raises:
        UserError: A file is unreadable or for another backbone, or the backbone has no experts.
    """
    if placed is None and profiled is None:
        return None, None
    experts = shape.experts
    if experts is None:
        given = "--expert-profile" if placed is None else "--mux-expert-placement"
        raise UserError(f"{given} {placed or profiled}: a {shape.family} has no experts: remove it")
    # Imports torch.
    from megatron_mux.moe.access_profile import read_profile
    from megatron_mux.moe.placement import read_placement
    from megatron_mux.moe.profile_tasks import identity

    placement = access = None
    layers = experts.layers(shape.layers)
    model = identity(BackboneInfo(Path(), shape, "", {}))  # by its config: weights are not needed
    if placed is not None:
        file = read_placement(placed, model, workers_are="expert ranks")
        rows = dict(zip(layers, file.placement, strict=True))
        placement = Placement(file.workers, rows, file.nodes or ())
    if profiled is not None:
        profile = read_profile(profiled)
        if differences := profile.model.differences(model):
            raise UserError(f"{profiled}: model: is for another model: {', '.join(differences)}")
        access = {layer: tuple(row) for layer, row in zip(layers, profile.access.tolist(), strict=True)}
    return placement, access
