"""Where experts are when a backbone is built, and what does not go with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_mux.errors import UserError
from megatron_mux.expert_shape import Placement
from megatron_mux.runtime import Parallel
from megatron_mux.shape import BackboneShape

if TYPE_CHECKING:
    from megatron_mux.backbone.weight_offload import Kind


def placement_or_default(
    shape: BackboneShape, parallel: Parallel, wanted: Placement | None
) -> Placement | None:
    """Which expert ranks hold which experts: what is wanted, or the default; None without experts."""
    if shape.experts is None or wanted is not None:
        return wanted
    return parallel.experts.placement(shape.experts.count, shape.experts.layers(shape.layers))


def check_experts(shape: BackboneShape, parallel: Parallel, residence: Kind) -> None:
    """Refuse experts that do not go with how the rest of the backbone is divided.

    Raises:
        UserError: Says what to change.
    """
    if shape.experts is None:
        parallel.experts.refuse("backbone without experts", shape.family)
        return
    if parallel.tp_size > 1 and not parallel.sequence_parallel:
        raise UserError(
            "With tensor parallelism, a backbone with experts needs --sequence-parallel: each tensor rank then routes "
            "its own rows."
        )
    if residence != "resident":
        parallel.experts.refuse("weights elsewhere", residence)
    if shape.quantisation is not None:
        parallel.experts.refuse("quantised weights", str(shape.quantisation))
    if residence.startswith("sharded") and parallel.experts.over_data:
        raise UserError(
            f"--mux-backbone-weights {residence} divides weights over data-parallel ranks, but their experts differ: "
            "use resident or offloaded, or experts within the tensor-parallel ranks."
        )
