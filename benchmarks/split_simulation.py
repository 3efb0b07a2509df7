"""Simulates a split server with up to 10,000 clients, by costs measured on this machine.

python benchmarks/split_simulation.py --measure           # costs of a server's requests, a minute on an idle machine
python benchmarks/split_simulation.py --output benchmarks/results/split-simulation.json
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from script import add_output, command_line, publish, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

if TYPE_CHECKING:
    from megatron_mux.split.simulation import Costs, Figures

ROOT = Path(__file__).resolve().parents[1]
COSTS = ROOT / "benchmarks/results/split-costs-cpu-2-cores.json"
_ROWS = (64, 128, 256, 512)
_ROUNDS = 5
_GIB = 1 << 30


def measure_costs(backbone: Path) -> dict[str, float]:
    """Costs of requests of one session (LoRA r=8 on q and v, cut 1/0), fitted to calls and rows."""
    import numpy as np
    import torch

    from megatron_mux import runtime
    from megatron_mux.backbone.model import Backbone
    from megatron_mux.backbone.registry import read_shape
    from megatron_mux.split.agreement import Proposal
    from megatron_mux.split.body import Body, Rows
    from megatron_mux.split.session_memory import profile
    from megatron_mux.tasks import TrainingSpec

    layers, parallel = read_shape(backbone).layers, runtime.initialize(device="cpu")
    body = Body(Backbone.load(backbone, parallel, split=(1, layers - 1, 0), stage=1, ends=False), parallel)
    adapter = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj", "v_proj"]}
    sizes: dict[str, Any] = {"train_rows": _ROWS[-1], "rows": _ROWS[-1], "sequences": 64, "longest": 64}
    proposal = Proposal(
        task="costs", fingerprint="", cut_front=1, cut_back=0, wire="f32", adapter=adapter,
        training=TrainingSpec(max_steps=1), total_steps=1, incarnation="0" * 16, **sizes,
    )  # fmt: skip
    part = proposal.body(body.backbone.shape)
    body.add("costs", proposal.adapter_spec(), proposal.training, part, 1)
    memory = profile(body, "costs", proposal, part)
    seconds: dict[str, list[float]] = {"forward": [], "backward": [], "kept": []}
    for count in _ROWS:
        hidden = torch.randn(count, body.backbone.shape.hidden)
        rows = Rows("costs", (64,) * (count // 64), tuple(range(count // 64)), 0, True, hidden, True)

        def again(rows: Rows = rows) -> None:
            _, kept = body.forward([rows], part, graph=True)
            assert kept is not None
            body.backward(kept, [rows.hidden])

        forward = _median(lambda rows=rows: body.forward([rows], part, graph=False))  # type: ignore[misc]
        backward = _median(again)
        seconds["forward"].append(forward)
        seconds["backward"].append(backward)
        seconds["kept"].append(backward - forward)
    found: dict[str, float] = {}
    for name, own in seconds.items():
        row, call = np.polyfit(_ROWS, own, 1)
        found |= {f"{name}_call_s": max(0.0, float(call)), f"{name}_row_s": float(row)}
    for name, size in (("forward", memory.forward), ("backward", memory.backward), ("graph", memory.graph)):
        found[f"{name}_row_bytes"] = size / memory.rows
    found["hidden_row_bytes"] = memory.hidden / memory.rows
    return {**found, "lasting_bytes": float(memory.lasting), "weights_bytes": float(body.shared_bytes)}


def _median(compute: Callable[[], object]) -> float:
    def once() -> float:
        began = time.perf_counter()
        compute()
        return time.perf_counter() - began

    once()
    return statistics.median(once() for _ in range(_ROUNDS))


def simulate(costs: Costs, clients: Sequence[int], scale: float, seed: int) -> list[dict[str, Any]]:
    """Every policy with so many clients.

    Args:
        costs: As measured.
        clients: How many.
        scale: How many times as fast as the measured machine the server is.
        seed: Of the fleet.
    """
    from dataclasses import replace

    from megatron_mux.split.policies import POLICIES
    from megatron_mux.split.simulation import Fleet, ServerOptions, Simulation

    timed = {name: getattr(costs, name) / scale for name in asdict(costs) if name.endswith("_s")}
    costs = replace(costs, **timed)
    found = []
    for count in clients:
        fleet = Fleet(count, arrivals_s=600 / count, steps=20, rows=(64, 512), drops=0.002, seed=seed)
        # Of the cards of one size: room for adapters, and for the requests of 32 clients at once.
        capacity = int(costs.lasting_bytes * count + 32 * costs.backward_row_bytes * fleet.rows[1])
        for policy in POLICIES:
            for together in (0, 2048) if policy == "on-demand" else (0,):
                room = max(
                    capacity, int(2.5 * (costs.weights_bytes + costs.backward_row_bytes * fleet.rows[1]))
                )
                options = ServerOptions(room, policy, most_together=together)
                began = time.perf_counter()
                figures = Simulation(costs, fleet, options).run()
                row = {"clients": count, "policy": policy, "together": together, "capacity": room}
                found.append({**row, **summary(figures), "simulated_in_s": time.perf_counter() - began})
    return found


def summary(figures: Figures) -> dict[str, float]:
    """What is published of a run."""
    import numpy as np

    waits = figures.waiting_s
    return {
        "step_s": float(np.mean(figures.step_s)),
        "communication_s": figures.communication_s,
        "computation_s": figures.computation_s,
        "waiting_s": 2 * float(waits.mean()),
        "p99_waiting_s": float(np.percentile(waits, 99)),
        "steps_per_s": figures.steps / figures.seconds,
        "jain": figures.jain,
        "most_reserved": figures.most_reserved,
        "requests_together": figures.together,
    }


def tables(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    rows = [
        (
            one["clients"],
            one["policy"] + (", co-batching" if one["together"] else ""),
            f"{one['step_s']:.2f}",
            f"{one['communication_s']:.2f}",
            f"{one['computation_s']:.3f}",
            f"{one['waiting_s']:.2f}",
            f"{one['p99_waiting_s']:.2f}",
            f"{one['steps_per_s']:.1f}",
            f"{one['jain']:.2f}",
            f"{one['most_reserved'] / _GIB:.1f} of {one['capacity'] / _GIB:.1f}",
        )
        for one in result["runs"]
    ]
    headings = "clients | policy | s a step | communication | computation | waiting | p99 of a wait"
    headings += " | steps/s | Jain | GiB reserved"
    head = (
        f"Simulated by costs measured on {result['hardware']}, with a server {result['scale']:g} times as fast. "
        "Clients arrive over ten minutes, take 20 steps of 64 to 512 rows, have links of 10 MB/s in the median, and "
        "drop out before 0.2% of their requests, for half a minute. Jain's index is over all clients, whose rows and "
        "links differ."
    )
    return "\n".join([head, "", *table(headings, rows)])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure costs, or simulate and publish; returns 2 if there are no costs yet."""
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--measure", action="store_true", help="measure costs and write them to --costs")
    add(
        "--costs", type=Path, default=COSTS, metavar="FILE", help="costs (benchmarks/results/split-costs-...)"
    )
    add("--backbone", type=Path, default=ROOT / ".quickstart/backbone", metavar="DIR", help="for --measure")
    add("--clients", type=int, nargs="+", default=[100, 1000, 10_000], metavar="N")
    add(
        "--scale", type=float, default=200.0, help="times as fast as the measured machine the server is (200)"
    )
    add("--seed", type=int, default=0)
    add_output(parser)
    arguments = parser.parse_args(argv)
    if arguments.measure:
        from engine_bench import cpu_name

        costs = {"hardware": f"{cpu_name()}, 2 cores", **measure_costs(arguments.backbone)}
        arguments.costs.write_text(json.dumps(costs, indent=1) + "\n")
        print(json.dumps(costs, indent=1))
        return 0
    if not arguments.costs.is_file():
        print(f"--costs {arguments.costs}: no such file: add --measure first", file=sys.stderr)
        return 2
    from megatron_mux.split.simulation import Costs

    read = json.loads(arguments.costs.read_text())
    hardware = read.pop("hardware")
    runs = simulate(Costs(**read), arguments.clients, arguments.scale, arguments.seed)
    result = {"hardware": hardware, "scale": arguments.scale, "runs": runs}
    publish(result, tables(result), arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
