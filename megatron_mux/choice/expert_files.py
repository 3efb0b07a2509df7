"""Files that say where a backbone's experts are, and how often rows select them."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from megatron_mux.backbone.registry import BackboneInfo
from megatron_mux.errors import UserError
from megatron_mux.expert_shape import Placement
from megatron_mux.memory.assumed_routes import Access
from megatron_mux.shape import BackboneShape


@dataclass(frozen=True)
class ExpertFiles:
    """Files of a tool's command line.

    Attributes:
        placement: Of `--mux-expert-placement`, as megatron-mux place-experts writes it; None: experts are divided
            evenly.
        profile: Of `--expert-profile`, as megatron-mux profile-experts writes it; None: rows select all equally often.
    """

    placement: Path | None = None
    profile: Path | None = None

    @classmethod
    def of(cls, arguments: Namespace) -> ExpertFiles:
        """Those of parsed arguments."""
        return cls(arguments.mux_expert_placement, arguments.expert_profile)

    def read(self, shape: BackboneShape) -> tuple[Placement | None, Access | None]:
        """Which expert ranks hold which experts, and how likely rows select each.

        Args:
            shape: The backbone's.

        Raises:
            UserError: A file is unreadable or for another backbone, or the backbone has no experts.
        """
        if self.placement is None and self.profile is None:
            return None, None
        experts = shape.experts
        if experts is None:
            given = "--expert-profile" if self.placement is None else "--mux-expert-placement"
            raise UserError(
                f"{given} {self.placement or self.profile}: a {shape.family} has no experts: remove it"
            )
        # Imports torch.
        from megatron_mux.moe.access_profile import read_profile
        from megatron_mux.moe.placement import read_placement
        from megatron_mux.moe.profile_tasks import identity

        placement = access = None
        layers = experts.layers(shape.layers)
        model = identity(BackboneInfo(Path(), shape, "", {}))  # by its config: weights are not needed
        if self.placement is not None:
            file = read_placement(self.placement, model, workers_are="expert ranks")
            rows = dict(zip(layers, file.placement, strict=True))
            placement = Placement(file.workers, rows, file.nodes or ())
        if self.profile is not None:
            profile = read_profile(self.profile)
            if differences := profile.model.differences(model):
                raise UserError(f"{self.profile}: model: is for another model: {', '.join(differences)}")
            access = {layer: tuple(row) for layer, row in zip(layers, profile.access.tolist(), strict=True)}
        return placement, access
