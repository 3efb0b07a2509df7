"""The flags of mixture-of-experts backbones: which ranks hold which experts."""

# ruff: noqa: RUF009 (a flag is a field with what argparse takes)

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_mux.arguments.flag import COUNT, FILE, flag
from megatron_mux.arguments.values import at_least, auto_or_none, counts, path_or_auto


@dataclass(frozen=True)
class ExpertFlags:
    """The part of `MuxArguments` that says where experts are."""

    expert_model_parallel_size: int = flag(
        "parallelism", "ranks that the experts of a layer are divided among (1)", 1, **COUNT
    )
    expert_tensor_parallel_size: int | None = flag(
        "parallelism", "ranks that share each expert (default: as many as share each layer)", **COUNT
    )
    mux_expert_placement: Path | Literal["auto"] | None = flag(
        "mux",
        "which ranks hold which experts, as megatron-mux place-experts writes it; auto: placed at the start by what "
        "the tasks' data select (default: neighbouring experts share one; with --mux-expert-managers, one after the "
        "other)",
        type=path_or_auto,
        metavar="FILE",
    )
    mux_expert_topology: Path | None = flag(
        "mux",
        "nodes and bandwidths that experts are placed by (default: the hosts of the ranks, measured at the start)",
        **FILE,
    )
    mux_replace_experts: Literal["auto", "off"] | None = flag(
        "mux",
        "auto: experts move between steps when that is predicted to pay (default with --mux-expert-placement auto); "
        "off: they stay (default otherwise)",
        choices=("auto", "off"),
    )
    mux_expert_managers: int | Literal["auto"] | None = flag(
        "mux",
        "N processes hold the routed experts and nothing else, the first one (their master) the rest of the backbone; "
        "auto: all processes but the first (default: none; each process holds a part of everything)",
        type=auto_or_none(at_least(1)),
        metavar="N",
    )
    mux_expert_capacity: tuple[int, ...] = flag(
        "mux",
        "experts, over all layers, that an expert manager can hold: one number for all of them, or one for each "
        "(default: any number)",
        (),
        type=counts,
        metavar="N[,N...]",
    )

    @property
    def expert_managers(self) -> int:
        """Number of expert managers; 0 without them."""
        if self.mux_expert_managers != "auto":
            return self.mux_expert_managers or 0
        text = os.environ.get("WORLD_SIZE", "1")
        return int(text) - 1 if text.isdecimal() and int(text) > 1 else 1

    @property
    def places_experts(self) -> bool:
        """Whether experts are placed at the start by what the tasks' data select."""
        return self.mux_expert_placement == "auto"

    @property
    def replaces_experts(self) -> bool:
        """Whether experts may move between steps."""
        return self.mux_replace_experts == "auto" or (
            self.mux_replace_experts is None and self.places_experts
        )
