"""How layers are divided among the stages of a run: as flags say, as the run that is continued had it, or by cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megatron_mux.arguments import MuxArguments
from megatron_mux.backbone.split import Split, even_split, parse_layout, split_between
from megatron_mux.errors import UserError
from megatron_mux.fusion.balance import balanced_split
from megatron_mux.fusion.desk import Mesh, Premises
from megatron_mux.fusion.load import TaskLoad
from megatron_mux.fusion.plan import Plan


def divided(
    premises: Premises,
    arguments: MuxArguments,
    loads: Sequence[TaskLoad],
    known: Plan | None,
    share: Callable[[Any], Any],
) -> Premises:
    """The premises with a mesh that says which layers each stage has.

    Args:
        premises: Their mesh says how many ranks there are.
        arguments: The command line.
        loads: The tasks of the run.
        known: The plan of the run that is continued, or of a file: its split stays unless a flag says otherwise, since
            another one rounds differently.
        share: Gives every rank what the first one has.

    Raises:
        UserError: The flags do not fit the backbone's layers.
    """
    mesh, layers = premises.mesh, premises.info.shape.layers
    if mesh.pipeline == 1:
        return premises
    split = _by_flags(arguments, layers, mesh.pipeline)
    virtual = _virtual(arguments, layers, mesh.pipeline)
    if split is None and known is not None and known.ranks == mesh.pipeline:
        own = known.split or even_split(layers, max(known.stages, 1))
        # Of a file that is for something else, what is wrong is said where it is checked.
        if sum(own) == layers and len(own) == known.stages and (virtual is None or known.virtual == virtual):
            split = own
    if split is None:
        split = share(balanced_split(premises, loads, virtual or 1))
    found = Mesh(mesh.tensor, mesh.pipeline, mesh.data, split)
    _check_schedule(arguments.mux_schedule, found.virtual)
    return replace(premises, mesh=found)


def _by_flags(arguments: MuxArguments, layers: int, ranks: int) -> Split | None:
    """What flags say of the layers of each stage; None: nothing."""
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


def _check_schedule(schedule: str, virtual: int) -> None:
    """Refuse a schedule that knows no order for so many stages to a rank."""
    if virtual > 1 and schedule in ("1f1b", "gpipe"):
        raise UserError(f"--mux-schedule {schedule}: knows one stage to a rank, not {virtual}: leave it out")
    if virtual == 1 and schedule == "interleaved":
        raise UserError(
            "--mux-schedule interleaved: needs several stages to a rank: add --num-virtual-stages-per-pipeline-rank"
        )


def _virtual(arguments: MuxArguments, layers: int, ranks: int) -> int | None:
    """Stages of each rank; None: no flag says."""
    virtual = arguments.num_virtual_stages_per_pipeline_rank
    flag = f"--num-virtual-stages-per-pipeline-rank {virtual}"
    each = arguments.num_layers_per_virtual_pipeline_stage
    if each is not None:
        flag = f"--num-layers-per-virtual-pipeline-stage {each}"
        virtual, rest = divmod(layers, each * ranks)
        if rest or not virtual:
            raise UserError(f"{flag}: {ranks} ranks cannot share the backbone's {layers} layers so")
    if virtual is not None and layers < ranks * virtual:
        raise UserError(f"{flag}: the backbone's {layers} layers cannot fill {ranks * virtual} stages")
    return virtual
