"""Combine several LoRA adapters into one, as peft's add_weighted_adapter does.

    megatron-mux combine --adapter movie=DIR hamlet=DIR --weights 0.7 0.3 --method ties --density 0.5 \
        --output DIR

Only the adapters' files are read. With --backbone, DARE draws in the order in which the model has its modules, as peft
does, so that the same seed gives the same adapter.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict

from megatron_mux.arguments.flag import COUNT, DIRECTORY, MODEL
from megatron_mux.arguments.parser import ADAPTER, Parser
from megatron_mux.arguments.values import at_least, named_path
from megatron_mux.errors import UserError, exit_status, to_stderr

PROGRAM = "megatron-mux combine"


def build_parser(program: str = PROGRAM) -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = Parser(prog=program, description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add(
        "--adapter",
        type=named_path,
        required=True,
        nargs="+",
        metavar="[NAME=]DIR",
        help=f"adapters, {ADAPTER}",
    )
    add(
        "--weights",
        type=_weight,
        required=True,
        nargs="+",
        metavar="W",
        help="weight of each, in the same order",
    )
    add(
        "--method",
        default="linear",
        help="linear, cat, svd, ties, dare_linear, dare_ties, magnitude_prune (linear); all but the first two also "
        "with _svd at the end, which combines products instead of matrices",
    )
    add("--density", type=float, metavar="SHARE", help="part of the values that pruning methods keep")
    add(
        "--majority-sign-method",
        choices=("total", "frequency"),
        default="total",
        help="how TIES elects signs",
    )
    add("--svd-rank", **COUNT, help="rank of the result, with svd (the largest one)")
    add("--seed", type=at_least(0), default=0, metavar="N", help="of DARE's random choices (0)")
    add("--backbone", **MODEL, help="the adapters' backbone, for the order of modules")
    add("--output", **DIRECTORY, required=True, help="new directory for the combined adapter")
    add("--json", action="store_true", help="print one JSON object instead of a table")
    return parser


def main(argv: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Combine and print; returns 2 if the input is wrong."""
    return exit_status(lambda: run(build_parser(program).parse_args(argv)), program)


def run(arguments: argparse.Namespace) -> None:
    """Combine and print, with a parsed command line."""
    from megatron_mux.console import print_result
    from megatron_mux.merging.combine import Recipe, combine
    from megatron_mux.saved_files import find_adapter

    adapters = {name: find_adapter(path, to_stderr) for name, path in arguments.adapter}
    if len(adapters) != len(arguments.adapter):
        raise UserError("--adapter: two adapters have the same NAME: give each its own.")
    if len(adapters) != len(arguments.weights):
        raise UserError(
            f"--weights: {len(arguments.weights)} weights for {len(adapters)} adapters: give one for each."
        )
    recipe = Recipe(
        arguments.method,
        arguments.density,
        arguments.majority_sign_method,
        arguments.svd_rank,
        arguments.seed,
    )
    combined = combine(adapters, arguments.weights, recipe, arguments.output, arguments.backbone)
    if arguments.json:
        print(json.dumps({**asdict(combined), "output": str(arguments.output)}))
        return
    cells = {
        "modules": str(combined.modules),
        "rank": str(combined.rank),
        "MB": f"{combined.size / 1e6:.1f}",
        "seconds": f"{combined.seconds:.1f}",
    }
    title = f"{len(adapters)} adapters combined ({arguments.method})"
    print_result(title, cells, f"combined adapter: {arguments.output}")


def _weight(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}")
    return value
