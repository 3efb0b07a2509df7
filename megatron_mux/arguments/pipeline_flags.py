"""Flags that say which layers a stage has and in which order stages work."""

from __future__ import annotations

import argparse

from megatron_mux.arguments.model import MuxArguments
from megatron_mux.arguments.values import at_least


def add_pipeline_flags(parser: argparse.ArgumentParser) -> None:
    """Add Megatron's flags for uneven and virtual stages, and those of ours that go with them."""
    add = parser.add_argument_group("pipeline stages").add_argument
    add(
        "--decoder-first-pipeline-num-layers", type=at_least(1), metavar="N",
        help="layers of the first stage (default: by cost)",
    )  # fmt: skip
    add(
        "--decoder-last-pipeline-num-layers", type=at_least(1), metavar="N",
        help="layers of the last stage (default: by cost)",
    )  # fmt: skip
    add(
        "--pipeline-model-parallel-layout", metavar="LAYOUT",
        help="layers of every stage: E embedding, t a layer, L loss, | the end of a stage, such as 'Et*9|t*7L'",
    )  # fmt: skip
    add(
        "--num-virtual-stages-per-pipeline-rank", type=at_least(1), metavar="N",
        help="stages of each rank, in turns around the pipeline (1)",
    )  # fmt: skip
    add(
        "--num-layers-per-virtual-pipeline-stage", type=at_least(1), metavar="N",
        help="the same, said by the layers of a stage",
    )  # fmt: skip
    add(
        "--mux-layer-split", choices=("cost", "even"), default="cost",
        help="cost: stages take equally long by the profile (default); even: equal numbers of layers",
    )  # fmt: skip
    add(
        "--mux-schedule", choices=("planned", "1f1b", "gpipe", "interleaved"), default="planned",
        help="planned: structured multi-bucket 1F1B (default); 1f1b: the fewest micro-batches in flight; gpipe and "
        "interleaved flush the pipeline after each step, and interleaved plans those that it has no order for",
    )  # fmt: skip


def contradictory(arguments: MuxArguments) -> list[str]:
    """What is wrong with these flags together; a sentence each."""
    given = {
        "--decoder-first-pipeline-num-layers": arguments.decoder_first_pipeline_num_layers,
        "--decoder-last-pipeline-num-layers": arguments.decoder_last_pipeline_num_layers,
        "--pipeline-model-parallel-layout": arguments.pipeline_model_parallel_layout,
        "--num-virtual-stages-per-pipeline-rank": arguments.num_virtual_stages_per_pipeline_rank,
        "--num-layers-per-virtual-pipeline-stage": arguments.num_layers_per_virtual_pipeline_stage,
    }
    present = [flag for flag, value in given.items() if value is not None]
    problems = []
    if arguments.pipeline_model_parallel_size == 1:
        problems += [f"{flag}: needs --pipeline-model-parallel-size of at least 2" for flag in present]
        ours = {"--mux-schedule": arguments.mux_schedule != "planned"}
        ours["--mux-layer-split"] = arguments.mux_layer_split != "cost"
        problems += [
            f"{flag}: needs --pipeline-model-parallel-size of at least 2"
            for flag, given in ours.items()
            if given
        ]
    layout = "--pipeline-model-parallel-layout"
    if layout in present:
        problems += [f"{flag}: {layout} says so itself: leave it out" for flag in present if flag != layout]
    if arguments.mux_layer_split == "even":
        problems += [
            f"--mux-layer-split even: {flag} says otherwise: leave one out"
            for flag in present
            if "virtual" not in flag
        ]
    each, times = "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"
    if each in present and times in present:
        problems.append(f"{each}: {times} says otherwise: leave one out")
    virtual = (arguments.num_virtual_stages_per_pipeline_rank or 1) > 1 or each in present
    if virtual:
        problems += [
            f"{flag}: counts a rank's layers in Megatron, here there are several stages to a rank: use {layout}"
            for flag in present
            if "decoder" in flag
        ]
    return problems
