"""Measure the time of a backbone's operators on this device, for the planner.

    megatron-mux profile --backbone DIR
    megatron-mux profile --backbone DIR --gpus 2

This takes about two minutes on two cores. The profile is kept in the user's cache directory, where runs and
megatron-mux plan with the same backbone, device and versions find it. On a CPU, start as many processes as the run will
have on a host: they measure at the same time, since they will compute at the same time. With two or more processes,
all-reduce and transfers between ranks are measured, too. A backbone with experts is measured as a run divides them:
give the run's flags.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_mux.arguments.flag import COUNT, DIRECTORY, MODEL
from megatron_mux.arguments.model import check_tf32, in_bf16
from megatron_mux.arguments.parser import BACKBONE, Parser
from megatron_mux.arguments.values import at_least
from megatron_mux.cli.launch import add_process_flags, processes_needed, run_command

if TYPE_CHECKING:
    from megatron_mux.fusion.profiler.profile import Profile

PROGRAM = "megatron-mux profile"


def build_parser(program: str = PROGRAM) -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = Parser(prog=program, description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--backbone", **MODEL, required=True, help=BACKBONE)
    add("--tensor-model-parallel-size", **COUNT, default=1, help="ranks that share each layer (1)")
    add(
        "--expert-model-parallel-size",
        **COUNT,
        default=1,
        help="ranks that the experts of a layer are divided among (1)",
    )
    add(
        "--expert-tensor-parallel-size",
        **COUNT,
        help="ranks that share each expert (default: as many as share each layer)",
    )
    add(
        "--sequence-parallel",
        action="store_true",
        help="needed by experts with tensor parallelism; changes nothing without experts",
    )
    add("--bf16", action="store_const", const=True, help="in bfloat16 (default: as a run on this device)")
    add("--fp32", action="store_false", dest="bf16", default=None, help="in fp32, as with --mux-fp32")
    add(
        "--backbone-dtype",
        choices=("nf4", "int8", "fp8"),
        help="weights quantised, as with --mux-backbone-dtype",
    )
    add(
        "--mux-tf32", action="store_true", help="with fp32 products in TF32, as with the run's flag; on a GPU"
    )
    add(
        "--most-tokens",
        type=at_least(32),
        metavar="N",
        help="tokens of the largest measurement (2048; on a GPU 16384)",
    )
    add("--rounds", **COUNT, default=7, help="repetitions of each measurement (7)")
    add("--directory", **DIRECTORY, help="directory for the profile (default: the user's cache)")
    add("--force", action="store_true", help="measure again even if there is a profile")
    add("--json", action="store_true", help="print one JSON object instead of a table")
    add_process_flags(parser, "default: as many as the parallel sizes need")
    return parser


def main(argv: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Measure, save and print; returns 2 if the input is wrong."""
    words = list(sys.argv[1:] if argv is None else argv)
    return run_command("profile", words, build_parser(program), run, program, processes_needed)


def run(arguments: argparse.Namespace) -> None:
    """Measure, save and print, with a parsed command line."""
    import torch

    from megatron_mux.backbone.model import Backbone
    from megatron_mux.backbone.registry import read_backbone_info, stored_dtype
    from megatron_mux.console import progress_bar
    from megatron_mux.fusion.profiler.measure import measure
    from megatron_mux.fusion.profiler.profile_store import (
        about_run,
        load_profile,
        profile_directory,
        save_profile,
    )
    from megatron_mux.runtime import has_bf16, initialize, use_tf32

    info = read_backbone_info(arguments.backbone, arguments.backbone_dtype)
    tensor, expert = arguments.tensor_model_parallel_size, arguments.expert_model_parallel_size
    has_experts = info.shape.experts is not None
    expert_tensor = arguments.expert_tensor_parallel_size or (tensor if has_experts else 1)
    info.check_parallel(tensor, 1, expert, expert_tensor)
    parallel = initialize(
        tensor,
        # Norms of a backbone without experts are timed on all rows.
        sequence_parallel=arguments.sequence_parallel and has_experts,
        expert_parallel=expert,
        expert_tensor_parallel=expert_tensor,
    )
    fast = parallel.device.type == "cuda" and has_bf16(parallel.device)
    bf16 = in_bf16(arguments.bf16, stored_dtype(arguments.backbone), fast)
    dtype = torch.bfloat16 if bf16 else torch.float32
    if arguments.mux_tf32:
        check_tf32(parallel.device.type, bf16)
        use_tf32()
    divided = {"expert_parallel": expert, "expert_tensor": expert_tensor}
    about = about_run(info.shape, parallel.device.type, dtype, tensor, **divided)
    directory = arguments.directory or profile_directory()
    profile = None if arguments.force else load_profile(about, directory)
    if profile is not None and parallel.world_size > 1 and not profile.links:
        profile = None  # measured by one process, so without transfers between ranks
    seconds = 0.0
    if profile is None:
        backbone = Backbone.load(arguments.backbone, parallel, dtype, quantise=arguments.backbone_dtype)
        most = arguments.most_tokens or (2048 if parallel.device.type == "cpu" else 16384)
        start = time.perf_counter()
        with progress_bar("measuring", parallel.rank == 0, stays=True) as progress:
            profile = measure(backbone, about, most, arguments.rounds, progress)
        seconds = time.perf_counter() - start
        if parallel.rank == 0:
            save_profile(profile, directory)
    if parallel.rank != 0:
        return
    where = directory / f"{profile.key}.json"
    if arguments.json:
        print(json.dumps({**asdict(profile), "path": str(where), "seconds": seconds}))
    else:
        _print(profile, where, seconds)


def _print(profile: Profile, where: Path, seconds: float) -> None:
    """Print forward and backward milliseconds of each curve at four of its sizes."""
    from rich.table import Table

    from megatron_mux.console import make_console

    table = Table(title=f"{profile.source} on {profile.about['device']}, {profile.about['dtype']}")
    table.add_column("operator", no_wrap=True)
    for column in ("size: forward / backward ms", "", "", ""):
        table.add_column(column)
    for name, curve in profile.curves.items():
        if name.startswith("utilisation"):
            continue
        chosen = sorted({round(i * (len(curve.sizes) - 1) / 3) for i in range(4)})
        cells = [
            f"{curve.sizes[i]:.0f}: {curve.forward[i] * 1e3:.2f} / {curve.backward[i] * 1e3:.2f}"
            for i in chosen
        ]
        table.add_row(name, *cells)
    console = make_console()
    console.print(table)
    console.print(
        f"{'measured in ' + format(seconds, '.0f') + ' s' if seconds else 'found an existing profile'}: {where}"
    )
