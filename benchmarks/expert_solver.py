"""How close the placement of experts comes to its lower bound, and what other placements take.

python benchmarks/expert_solver.py                     # three sizes under the paper's objective: half a minute

Access probabilities by Zipf's law with exponent 0.8, in random order in each layer; links between nodes an eighth as
fast as within; no slot to spare. Costs are relative to ours.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from script import add_output, command_line, publish, table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run by file path, from a checkout

SIZES = ((32, 8, (2, 2, 2), 2), (48, 128, (2, 2, 2, 2), 8), (58, 256, (8,) * 8, 8))
"""Layers, experts of a layer, workers of each node, experts of a token."""
SECONDS = 60.0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[0, 1, 2], choices=range(len(SIZES)))
    add_output(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Place, and publish."""
    arguments = parse(argv)
    cases = [_case(*SIZES[i]) for i in arguments.sizes]
    publish({"cases": cases}, markdown(cases), arguments.output)
    return 0


def _case(layers: int, experts: int, nodes: Sequence[int], top_k: int) -> dict[str, Any]:
    from megatron_mux.moe.links import Traffic
    from megatron_mux.moe.solvers.solve import solve
    from tests.unit.moe.instances import make_profile, make_topology

    workers = sum(nodes)
    profile = make_profile(layers, experts, top_k, 0.8, seed=1)
    topology = make_topology(list(nodes), math.ceil(layers * experts / workers), 8.0)
    began = time.perf_counter()
    found = solve(profile, topology, Traffic(4096, 8192.0), "vela", "auto", SECONDS)
    ours = found.solution.objective
    return {
        "size": f"{layers} x {experts} x {workers}",
        "seconds": time.perf_counter() - began,
        "gap": found.solution.gap,
        "relative": {
            name: found.problem.placement_cost(placement) / ours
            for name, placement in found.baselines.items()
        },
    }


def markdown(cases: Sequence[dict[str, Any]]) -> str:
    """Render the table."""
    names = list(cases[0]["relative"])
    rows = [
        (
            case["size"],
            f"{case['gap']:.3%}",
            f"{case['seconds']:.2f}",
            *(f"{case['relative'][name]:.2f}" for name in names),
        )
        for case in cases
    ]
    heading = " | ".join(["layers x experts x workers", "above the bound", "seconds", *names])
    return "\n".join(table(heading, rows))


if __name__ == "__main__":
    sys.exit(main())
