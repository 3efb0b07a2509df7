"""Place the experts of an MoE backbone on workers, by how often tasks use them.

    megatron-mux place-experts --profile profile.json --topology topology.json
    megatron-mux place-experts --profile profile.json --topology topology.json --objective full --output FILE
    megatron-mux place-experts --profile profile.json --topology topology.json --slots 43 --solver paper-lp --json

The profile comes from megatron-mux profile-experts. Prints what a step's transfers are predicted to take with this
placement and with those of other systems, and a lower bound. See docs/expert-placement.md.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_mux.arguments.flag import COUNT, FILE
from megatron_mux.arguments.parser import Parser
from megatron_mux.arguments.values import at_least
from megatron_mux.errors import UserError, exit_status
from megatron_mux.moe.solvers.names import OBJECTIVES, SOLVERS

if TYPE_CHECKING:
    from megatron_mux.moe.access_profile import AccessProfile
    from megatron_mux.moe.solvers.solve import Comparison

PROGRAM = "megatron-mux place-experts"


def build_parser(program: str = PROGRAM) -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = Parser(prog=program, description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--profile", **FILE, required=True, help="access profile of the tasks")
    add("--topology", **FILE, required=True, help="workers, nodes and bandwidths")
    add(
        "--objective",
        choices=OBJECTIVES,
        default="vela",
        help="vela: the paper's (8), master to workers (default); full: rows once per worker, both directions, shared "
        "links, compute; from every worker if the topology has no master",
    )
    add("--solver", choices=SOLVERS, default="auto", help="auto: ours (default); or one of the baselines")
    add(
        "--slots",
        **COUNT,
        help="experts that each worker holds over all layers (default: the topology's capacities)",
    )
    add("--tokens", **COUNT, default=4096, help="tokens of a step (4096)")
    add("--hidden-size", **COUNT, help="features of a token (default: the profile's)")
    add("--bytes-per-value", **COUNT, default=2, help="bytes of a feature that is sent (2)")
    add(
        "--groups",
        **COUNT,
        default=1,
        help="groups that experts are routed by, which EPLB keeps on one node (1: none)",
    )
    add("--seconds", **COUNT, default=60, help="time limit of the search (60)")
    add("--seed", type=at_least(0), default=0, metavar="N", help="seed of the random placement (0)")
    add("--output", **FILE, help="write the placement, for --mux-expert-placement FILE")
    add("--json", action="store_true", help="print one JSON object instead of a table")
    return parser


def main(argv: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Place and print; returns 2 if the input is wrong."""
    return exit_status(lambda: run(build_parser(program).parse_args(argv)), program)


def run(arguments: argparse.Namespace) -> None:
    """Place and print, with a parsed command line."""
    from megatron_mux.moe.access_profile import read_profile
    from megatron_mux.moe.links import Traffic, routing_bytes
    from megatron_mux.moe.placement import write_placement
    from megatron_mux.moe.solvers.solve import solve
    from megatron_mux.moe.topology import read_topology

    _check_output(arguments)
    profile, topology = read_profile(arguments.profile), read_topology(arguments.topology)
    hidden = _hidden_size(arguments, profile)
    if arguments.slots is not None:
        topology = topology.with_slots(arguments.slots)
    routing = routing_bytes(profile.top_k) if arguments.objective == "full" else 0.0
    traffic = Traffic(arguments.tokens, float(hidden * arguments.bytes_per_value), routing)
    try:
        best = solve(
            profile,
            topology,
            traffic,
            arguments.objective,
            arguments.solver,
            arguments.seconds,
            arguments.seed,
            arguments.groups,
        )
    except UserError as error:
        source = (
            arguments.topology
            if arguments.slots is None
            else f"{arguments.topology}, --slots {arguments.slots}"
        )
        raise UserError(*(f"{source}: {problem}" for problem in error.problems)) from error
    # Between replicas of an expert, the nodes decide.
    nodes = [worker.node for worker in topology.workers]
    details = {"nodes": nodes, **describe(best, arguments.objective)}
    if arguments.output is not None:
        try:
            write_placement(
                arguments.output, profile.model, len(topology.workers), best.solution.placement, details
            )
        except OSError as error:
            raise UserError(
                f"--output {arguments.output}: cannot be written: {error.strerror or error}"
            ) from error
    if arguments.json:
        model, workers = profile.model.model_dump(), len(topology.workers)
        print(
            json.dumps({"model": model, "workers": workers, "placement": best.solution.placement, **details})
        )
        return
    _print(best, details, arguments)


def _check_output(arguments: argparse.Namespace) -> None:
    """Check that the placement does not overwrite what it is made from."""
    inputs = {arguments.profile.resolve(), arguments.topology.resolve()}
    if arguments.output is not None and arguments.output.resolve() in inputs:
        raise UserError(f"--output {arguments.output}: is an input: choose another file")


def _hidden_size(arguments: argparse.Namespace, profile: AccessProfile) -> int:
    hidden = profile.model.hidden_size
    if arguments.hidden_size is None:
        if hidden is None:
            raise UserError(f"--hidden-size: is needed: {arguments.profile} has no model.hidden_size")
        return hidden
    if hidden is not None and hidden != arguments.hidden_size:
        raise UserError(
            f"--hidden-size {arguments.hidden_size}: model.hidden_size of {arguments.profile} is {hidden}"
        )
    return int(arguments.hidden_size)


def describe(best: Comparison, objective: str) -> dict[str, Any]:
    """Return what is known of a placement, as JSON: seconds of a step, and bytes between nodes per token."""
    solution, problem = best.solution, best.problem
    return {
        "objective": objective,
        "solver": solution.solver,
        "objective_s": solution.objective,
        "lower_bound_s": solution.lower_bound,
        "gap": solution.gap if math.isfinite(solution.gap) else None,
        "search_s": solution.seconds,
        "finished": solution.finished,
        "baselines": {name: problem.placement_cost(owners) for name, owners in best.baselines.items()},
        "cross_node_bytes_per_token": {
            solution.solver: problem.cross_node_bytes(solution.placement),
            **{name: problem.cross_node_bytes(owners) for name, owners in best.baselines.items()},
        },
    }


def _print(best: Comparison, details: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Print the placement's figures next to those of the baselines."""
    from rich.table import Table

    from megatron_mux.console import make_console

    problem, solution = best.problem, best.solution
    table = Table(
        title=f"{problem.layers} layers x {problem.experts} experts on {problem.workers} workers, "
        f"{int(problem.capacities.sum())} slots, objective {arguments.objective}"
    )
    for column in ("placement", "ms a step", "above bound", "cross-node bytes a token", "against contiguous"):
        table.add_column(column, justify="left" if column == "placement" else "right")
    bytes_of = details["cross_node_bytes_per_token"]
    usual = bytes_of["contiguous"]
    figures = {solution.solver: solution.objective, **details["baselines"]}
    for name, seconds in sorted(figures.items(), key=lambda entry: entry[1]):
        above = f"{seconds / solution.lower_bound - 1:.2%}" if solution.lower_bound > 0 else "-"
        less = f"{bytes_of[name] / usual - 1:+.1%}" if usual > 0 else "-"
        table.add_row(name, f"{seconds * 1e3:.4g}", above, f"{bytes_of[name]:,.0f}", less)
    console = make_console()
    console.print(table)
    copies = sum(len(workers) - 1 for row in solution.placement for workers in row)
    ended = "" if solution.finished else "; the time limit ended it: more --seconds may find a better one"
    bound = f"lower bound {solution.lower_bound * 1e3:.4g} ms, gap {solution.gap:.3%}"
    lines = [f"{bound}, {copies} replica(s), found in {solution.seconds:.2f} s{ended}"]
    if arguments.output is not None:
        lines.append(f"written to {arguments.output}")
    console.print("\n".join(lines), soft_wrap=True, highlight=False)
