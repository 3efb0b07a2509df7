"""Simulates a split server with up to 10,000 clients, by costs measured on this machine.

python benchmarks/split_simulation.py --measure           # costs of a server's requests, a minute on an idle machine
python benchmarks/split_simulation.py --output benchmarks/results/split-simulation.json    # and .md, .svg

Every policy, `on-demand` also with co-batching, for each number of clients. The same seed gives the same figures.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from script import add_output, command_line, publish, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

if TYPE_CHECKING:
    from benchmarks.simulated_split.fleet import Costs, Figures

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
    from megatron_mux.split.protocol.agreement import Proposal
    from megatron_mux.split.server.body import Body, Rows
    from megatron_mux.split.server.session_memory import profile
    from megatron_mux.tasks import TrainingSpec

    layers, parallel = read_shape(backbone).layers, runtime.initialize(device="cpu")
    body = Body(Backbone.load(backbone, parallel, split=(1, layers - 1, 0), stage=1, ends=False), parallel)
    adapter = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj", "v_proj"]}
    sizes: dict[str, Any] = {"train_rows": _ROWS[-1], "rows": _ROWS[-1], "sequences": 64, "longest": 64}
    proposal = Proposal(
        task="costs", fingerprint="", cut_front=1, cut_back=0, wire="f32", adapter=adapter,
        training=TrainingSpec(max_steps=1), total_steps=1, run="0" * 16, incarnation="0" * 16, **sizes,
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
    from benchmarks.simulated_split.fleet import Fleet, ServerOptions
    from benchmarks.simulated_split.simulate import Simulation
    from megatron_mux.split.server.policies import POLICIES

    timed = {name: getattr(costs, name) / scale for name in asdict(costs) if name.endswith("_s")}
    costs = replace(costs, **timed)
    found = []
    for count in clients:
        fleet = Fleet(count, arrivals_s=600 / count, steps=20, rows=(64, 512), drops=0.002, seed=seed)
        # Of the cards of one size: room for what sessions hold, and for the backward passes of 32 clients at once.
        most = costs.memory(fleet.rows[1])
        capacity = (most.lasting + most.hidden) * count + 32 * most.backward
        for policy, together in [*((policy, 0) for policy in POLICIES), ("on-demand", 2048)]:
            room = max(capacity, int(2.5 * (costs.weights_bytes + most.backward)))
            began = time.perf_counter()
            figures = Simulation(costs, fleet, ServerOptions(room, policy, most_together=together)).run()
            seconds = time.perf_counter() - began
            row = {"clients": count, "policy": policy, "together": together, "capacity": room}
            found.append({**row, **summary(figures), "simulated_in_s": seconds})
            print(f"{count} clients, {policy}: {seconds:.0f} s", file=sys.stderr, flush=True)
    return found


def summary(figures: Figures) -> dict[str, Any]:
    """What is published of a run; seconds of a step are those while its client was connected."""
    import numpy as np

    from benchmarks.simulated_split.fleet import Part

    parts = {part.name.lower(): figures.steps[:, part] for part in Part}
    parts["step"] = figures.steps.sum(axis=1) - parts.pop("away")
    seconds = {
        f"{name}_s": {"mean": float(own.mean())} | {f"p{q}": float(np.percentile(own, q)) for q in (50, 99)}
        for name, own in parts.items()
    }
    return {
        **seconds,
        "joining_s": float(figures.joining_s.mean()),
        "steps_per_s": figures.steps_per_s,
        "busy": figures.busy_s / figures.seconds,
        "jain": figures.jain,
        "most_reserved": figures.most_reserved,
        "requests_together": figures.together,
    }


def label(run: dict[str, Any]) -> str:
    """The name of a run's policy."""
    return str(run["policy"]) + (", co-batching" if run["together"] else "")


def tables(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    rows = [
        (
            run["clients"],
            label(run),
            *(f"{run[name]['mean']:.3g}" for name in ("step_s", "communication_s", "computation_s")),
            *(f"{run['scheduling_s'][which]:.3g}" for which in ("mean", "p50", "p99")),
            f"{run['steps_per_s']:.1f}",
            f"{run['jain']:.2f}",
            f"{run['most_reserved'] / _GIB:.1f} of {run['capacity'] / _GIB:.1f}",
        )
        for run in result["runs"]
    ]
    headings = "clients | policy | s a step | communication | computation | scheduling | its p50 | its p99"
    headings += " | steps/s | Jain | GiB reserved"
    head = (
        f"Simulated by costs measured on {result['hardware']}, with a server {result['scale']:g} times as fast. "
        "Clients arrive over ten minutes and take 20 steps of 64 to 512 rows; in the median they have 10 MB/s, 20 ms "
        "of latency and 0.1 ms of computation a row; before 0.2% of their requests they are away for half a minute. "
        "Seconds are those of a client's optimizer step while it is connected; scheduling is all that a request waits "
        "on the server. Jain's index is over each client's speed relative to having the server for itself."
    )
    return "\n".join([head, "", *table(headings, rows)])


def draw_steps(result: dict[str, Any], file: Path) -> None:
    """Plot the time of a step by the number of clients."""
    from plot import Curve, draw

    runs: dict[str, list[tuple[int, float]]] = {}
    for run in result["runs"]:
        runs.setdefault(label(run), []).append((run["clients"], run["step_s"]["mean"]))
    colours = ("tab:blue", "tab:green", "tab:red", "tab:purple", "black", "tab:orange")
    curves = [
        Curve(name, sorted(points), own) for (name, points), own in zip(runs.items(), colours, strict=False)
    ]
    draw(file, curves, ("clients", "seconds of an optimizer step"), log_y=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure costs, or simulate and publish; returns 2 if there are no costs yet."""
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--measure", action="store_true", help="measure costs and write them to --costs")
    add("--costs", type=Path, default=COSTS, metavar="FILE", help=f"of requests ({COSTS.relative_to(ROOT)})")
    add("--backbone", type=Path, default=ROOT / ".quickstart/backbone", metavar="DIR", help="for --measure")
    add("--clients", type=int, nargs="+", default=[100, 1000, 10_000], metavar="N", help="(100 1000 10000)")
    add(
        "--scale",
        type=float,
        default=200.0,
        metavar="X",
        help="times as fast as measured the server is (200)",
    )
    add("--seed", type=int, default=0, help="of all random numbers (0)")
    add_output(parser)
    arguments = parser.parse_args(argv)
    if arguments.measure:
        from megatron_mux.fusion.device import cpu_name

        costs = {"hardware": f"{cpu_name()}, 2 cores", **measure_costs(arguments.backbone)}
        arguments.costs.write_text(json.dumps(costs, indent=1) + "\n")
        print(json.dumps(costs, indent=1))
        return 0
    if not arguments.costs.is_file():
        print(f"--costs {arguments.costs}: no such file: measure it first, with --measure", file=sys.stderr)
        return 2
    from benchmarks.simulated_split.fleet import Costs

    read = json.loads(arguments.costs.read_text())
    hardware = read.pop("hardware")
    runs = simulate(Costs(**read), arguments.clients, arguments.scale, arguments.seed)
    result = {"hardware": hardware, "scale": arguments.scale, "seed": arguments.seed, "runs": runs}
    if arguments.output is not None:
        draw_steps(result, arguments.output.with_suffix(".svg"))
    publish(result, tables(result), arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
