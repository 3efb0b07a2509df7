"""Checks of flags against each other and against the file system."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_mux.arguments.model import MuxArguments, changed_flags
from megatron_mux.arguments.values import destination
from megatron_mux.saved_files import MANIFESTS, run_of_task

# What a run's directory always holds, and what a Megatron checkpoint may hold.
_MEGATRON_CHECKPOINT = re.compile(
    r"latest_checkpointed_iteration\.txt|\.metadata|metadata\.json|iter_\d{7}|mp_rank_\d\d.*"
)
# Without effect only where nothing is loaded but the backbone.
_NOT_WITH_LOAD = ("--finetune", "--no-load-optim", "--no-load-rng")
# What a plan file sets, by the flag that sets it otherwise.
_IN_PLAN = {
    "--mux-align": "the alignment",
    "--mux-chunk-size": "the chunk size",
    "--mux-micro-batches": "the number of micro-batches",
    "--mux-schedule": "the schedule",
}


def contradictions(arguments: MuxArguments, parsed: Mapping[str, Any]) -> list[str]:
    """Flags that contradict each other or the file system.

    Args:
        arguments: The parsed arguments.
        parsed: The same as argparse returned it, including flags that `arguments` has no field for.

    Returns:
        One sentence per problem.
    """
    problems = []
    if parsed["backbone"] is None:
        problems.append("--backbone: is missing: give the directory of a Hugging Face model")
    elif not os.path.isdir(arguments.backbone):
        problems.append(
            f"--backbone {arguments.backbone}: no such directory (nothing is downloaded from a hub)"
        )
    comes_later = arguments.mux_watch is not None or parsed.get("server") is not None
    if arguments.mux_tasks is None and not comes_later:
        problems.append("--mux-tasks: is missing: give a task file, or a directory to watch with --mux-watch")
    if arguments.mux_tasks is not None and not os.path.isfile(arguments.mux_tasks):
        flag = "" if parsed.get("tasks") else "--mux-tasks "  # as it was given
        problems.append(f"{flag}{arguments.mux_tasks}: {_no_file(arguments.mux_tasks)}")
    if arguments.bf16 and arguments.mux_fp32:
        problems.append("--mux-fp32: contradicts --bf16: remove one of them")
    problems += _stages(arguments)
    problems += _planning(arguments)
    problems += _expert_managers(arguments)
    problems += _moving_experts(arguments)
    if arguments.mux_watch is not None and not os.path.isdir(arguments.mux_watch):
        problems.append(f"--mux-watch {arguments.mux_watch}: no such directory: create it first")
    for flag, directory in (("--save", arguments.save), ("--load", arguments.load)):
        if directory is not None and os.path.lexists(directory) and not os.path.isdir(directory):
            problems.append(f"{flag} {directory}: is not a directory")
    for flag, value in (
        ("--save-interval", arguments.save_interval),
        ("--mux-keep-checkpoints", arguments.mux_keep_checkpoints),
        ("--mux-save-rate", arguments.mux_save_rate),
        ("--break-lock", arguments.break_lock or None),
    ):
        if value is not None and arguments.save is None:
            problems.append(f"{flag}: needs --save DIR")
    if arguments.load is not None:
        problems += _not_a_run(arguments.load)
    problems += _of_existing_scripts(arguments)
    if arguments.recompute_granularity != "full":
        problems += [
            f"{flag}: needs --recompute-granularity full"
            for flag in ("--recompute-method", "--recompute-num-layers")
            if parsed[destination(flag)] is not None
        ]
    if (
        arguments.save is not None
        and parsed["backbone"] is not None
        and _same(arguments.save, arguments.backbone)
    ):
        problems.append(f"--save {arguments.save}: is the backbone's directory: choose another")
    return problems


def _stages(arguments: MuxArguments) -> list[str]:
    """What is wrong with the flags for the layers and the schedule of stages."""
    problems = []
    given = changed_flags(arguments, "pipeline stages")
    if arguments.pipeline_model_parallel_size == 1:
        problems += [f"{flag}: needs --pipeline-model-parallel-size of at least 2" for flag in given]
    present = [flag for flag in given if not flag.startswith("--mux-")]
    layout = "--pipeline-model-parallel-layout"
    if layout in present:
        problems += [
            f"{flag}: {layout} already sets all stages: remove it" for flag in present if flag != layout
        ]
    if arguments.mux_layer_split == "even":
        problems += [
            f"--mux-layer-split even: contradicts {flag}: remove one of them"
            for flag in present
            if "virtual" not in flag
        ]
    each, times = "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"
    if each in present and times in present:
        problems.append(f"{each}: contradicts {times}: remove one of them")
    virtual = (arguments.num_virtual_stages_per_pipeline_rank or 1) > 1 or each in present
    if virtual:
        problems += [
            f"{flag}: counts a rank's layers in Megatron, but here each rank has several stages: use {layout}"
            for flag in present
            if "decoder" in flag
        ]
    return problems


def _planning(arguments: MuxArguments) -> list[str]:
    """What is wrong with the flags for how tasks share a step."""
    problems = []
    if arguments.mux_plan is not None:
        if not os.path.isfile(arguments.mux_plan):
            problems.append(f"--mux-plan {arguments.mux_plan}: {_no_file(arguments.mux_plan)}")
        if arguments.mux_policy != "auto":
            problems.append(
                f"--mux-policy {arguments.mux_policy}: the plan file already sets the policy: remove it"
            )
        given = [*changed_flags(arguments, "mux"), *changed_flags(arguments, "pipeline stages")]
        problems += [
            f"{flag}: the plan file already sets {_IN_PLAN[flag]}: remove it"
            for flag in given
            if flag in _IN_PLAN
        ]
    if arguments.mux_communication_ctas is not None:
        if arguments.tensor_model_parallel_size == 1:
            problems.append("--mux-communication-ctas: needs --tensor-model-parallel-size of at least 2")
        if arguments.mux_policy != "auto" or arguments.mux_interleave == "off":
            problems.append(
                "--mux-communication-ctas: bounds hidden messages, and this run hides none: remove it, or use "
                "--mux-policy auto without --mux-interleave off"
            )
    if isinstance(arguments.mux_memory_limit, int) and arguments.mux_policy != "auto":
        problems.append(
            f"--mux-memory-limit: --mux-policy {arguments.mux_policy} does not respect it: use --mux-policy auto"
        )
    return problems


def _expert_managers(arguments: MuxArguments) -> list[str]:
    """What is wrong with the flags for a master and its expert managers."""
    if arguments.mux_expert_managers is None:
        return ["--mux-expert-capacity: needs --mux-expert-managers"] if arguments.mux_expert_capacity else []
    sizes = {
        "--tensor-model-parallel-size": arguments.tensor_model_parallel_size,
        "--pipeline-model-parallel-size": arguments.pipeline_model_parallel_size,
        "--expert-model-parallel-size": arguments.expert_model_parallel_size,
        "--expert-tensor-parallel-size": arguments.expert_tensor_parallel_size or 1,
    }
    problems = [
        f"{flag} {size}: contradicts --mux-expert-managers, whose master is one process: remove one of them"
        for flag, size in sizes.items()
        if size > 1
    ]
    if arguments.mux_backbone_weights != "resident":
        problems.append(
            f"--mux-backbone-weights {arguments.mux_backbone_weights}: not with --mux-expert-managers yet: remove it"
        )
    return problems


def _moving_experts(arguments: MuxArguments) -> list[str]:
    """What is wrong with the flags that place and move experts."""
    found = [("--mux-expert-placement auto", arguments.places_experts)]
    found.append(("--mux-replace-experts auto", arguments.mux_replace_experts == "auto"))
    asking = [flag for flag, given in found if given]
    if not asking:
        topology = arguments.mux_expert_topology
        needs = "needs --mux-expert-placement auto or --mux-replace-experts auto"
        return [] if topology is None else [f"--mux-expert-topology {topology}: {needs}"]
    problems = []
    if arguments.expert_model_parallel_size == 1 and arguments.mux_expert_managers is None:
        where = "--expert-model-parallel-size of at least 2, or --mux-expert-managers"
        problems += [
            f"{flag}: experts are on one rank, or one group of tensor ranks: it needs {where}"
            for flag in asking
        ]
    if arguments.mux_backbone_dtype is not None:
        problems += [
            f"{flag}: contradicts --mux-backbone-dtype {arguments.mux_backbone_dtype}: only experts in place move"
            for flag in asking
        ]
    if arguments.mux_backbone_weights != "resident":
        problems += [
            f"{flag}: contradicts --mux-backbone-weights {arguments.mux_backbone_weights}: only resident experts move"
            for flag in asking
        ]
    return problems


def _of_existing_scripts(arguments: MuxArguments) -> list[str]:
    """What is wrong with flags that scripts of Megatron give, and that only some values make superfluous."""
    problems = []
    if arguments.load is not None:
        advice = (
            "a resumed task has all that was saved; to start from its adapter alone use adapter_name_or_path"
        )
        problems += [f"{flag}: {advice}" for flag in arguments.without_effect if flag in _NOT_WITH_LOAD]
    return problems


def _no_file(path: Path) -> str:
    return "is a directory, not a file" if os.path.isdir(path) else "no such file"


def _not_a_run(directory: Path) -> list[str]:
    """What is wrong with the directory of `--load` if it is not a run's."""
    try:
        names = os.listdir(directory)
    except OSError:
        return []  # missing: the run starts anew there
    if MANIFESTS in names:
        return []
    if run := run_of_task(directory):
        return [f"--load {directory}: is a task's directory: give its run's, {run}"]
    if "adapter_config.json" in names:
        return [f"--load {directory}: is a PEFT adapter: start from it by adapter_name_or_path in tasks.yaml"]
    megatron = any(_MEGATRON_CHECKPOINT.fullmatch(name) for name in names)
    if megatron or "config.json" in names or any(name.endswith((".safetensors", ".bin")) for name in names):
        return [f"--load {directory}: is a model, not a run of megatron-mux: use --backbone {directory}"]
    return []


def _same(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)
