"""Which layers each stage of a run has: as flags say, as the known plan has it, or balanced by cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_mux.arguments import MuxArguments
from megatron_mux.backbone.split import Split, even_split, parse_layout, split_between
from megatron_mux.errors import UserError
from megatron_mux.fusion.plan import Plan
from megatron_mux.fusion.planner.balance import balanced_split
from megatron_mux.fusion.planner.planning_context import PlanningContext
from megatron_mux.fusion.schedules import PIPELINE_SCHEDULES, Schedule


def split_layers(
    context: PlanningContext, arguments: MuxArguments, known: Plan | None, share: Callable[[Any], Any]
) -> PlanningContext:
    """The context with the layers of each stage in its mesh.

    Args:
        context: Its tasks are what layers are balanced for.
        arguments: The command line.
        known: The plan of the continued run or of a plan file: its split stays unless a flag says otherwise, since
            another split rounds differently.
        share: Gives every rank the first rank's value.

    Raises:
        UserError: The flags do not fit the backbone's layers.
    """
    ranks, layers = context.mesh.pipeline, context.info.shape.layers
    if ranks == 1:
        return context
    split = _by_flags(arguments, layers, ranks)
    virtual = _virtual(arguments, layers, ranks)
    if split is None and known is not None and known.ranks == ranks:
        own = known.split or even_split(layers, max(known.stages, 1))
        # A file's plan that is for something else is refused later, where plans are checked.
        if sum(own) == layers and len(own) == known.stages and (virtual is None or known.virtual == virtual):
            split = own
    if split is None:
        split = share(balanced_split(context, virtual or 1))
    divided = context.with_split(split)
    _check_schedule(arguments.mux_schedule, divided.mesh.virtual)
    return divided


def _by_flags(arguments: MuxArguments, layers: int, ranks: int) -> Split | None:
    """The split that flags ask for; None: they do not say."""
    if arguments.pipeline_model_parallel_layout is not None:
        split = parse_layout(arguments.pipeline_model_parallel_layout)
        flag = f"--pipeline-model-parallel-layout {arguments.pipeline_model_parallel_layout}"
        if sum(split) != layers:
            raise UserError(f"{flag}: has {sum(split)} layers, the backbone {layers}")
        if len(split) % ranks:
            raise UserError(f"{flag}: has {len(split)} stages, which {ranks} ranks cannot share evenly")
        return split
    stages = ranks * (_virtual(arguments, layers, ranks) or 1)
    first, last = arguments.decoder_first_pipeline_num_layers, arguments.decoder_last_pipeline_num_layers
    if first is not None or last is not None:
        return split_between(layers, stages, first, last)
    if arguments.mux_layer_split == "even":
        return even_split(layers, stages)
    return None


def _check_schedule(schedule: Schedule, virtual: int) -> None:
    """Refuse a schedule that has no order for this many stages per rank."""
    traits = PIPELINE_SCHEDULES[schedule]
    if virtual > 1 and not traits.virtual:
        raise UserError(f"--mux-schedule {schedule}: runs one stage per rank, not {virtual}: remove it")
    if virtual == 1 and not traits.single:
        raise UserError(
            f"--mux-schedule {schedule}: needs several stages per rank: add --num-virtual-stages-per-pipeline-rank"
        )


def _virtual(arguments: MuxArguments, layers: int, ranks: int) -> int | None:
    """Stages per rank; None: no flag says."""
    virtual = arguments.num_virtual_stages_per_pipeline_rank
    flag = f"--num-virtual-stages-per-pipeline-rank {virtual}"
    each = arguments.num_layers_per_virtual_pipeline_stage
    if each is not None:
        flag = f"--num-layers-per-virtual-pipeline-stage {each}"
        virtual, rest = divmod(layers, each * ranks)
        if rest or not virtual:
            raise UserError(f"{flag}: {ranks} ranks cannot share the backbone's {layers} layers like that")
    if virtual is not None and layers < ranks * virtual:
        raise UserError(f"{flag}: the backbone's {layers} layers cannot fill {ranks * virtual} stages")
    return virtual
