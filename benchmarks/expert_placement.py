"""Traffic and time of fine-tuning with experts placed in several ways, over real links of limited bandwidth.

python benchmarks/expert_placement.py --output benchmarks/results/expert-placement-cpu-2-cores.json    # as root
python benchmarks/expert_placement.py --cases zipf-0.8 --rounds 2 --slack 1            # a part
python benchmarks/expert_placement.py --upcycled DIR --cases movie austen       # DIR: by examples/moe/upcycle.py

Three network namespaces are nodes, with two workers each; what crosses between them goes over links that are a
sixteenth as fast as those within. The links are measured, the tasks' data is profiled, experts are placed by every
method, and methods take turns, some steps at a time.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from namespaces import NamespacesRefused
from script import add_output, command_line, publish

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

ROOT = Path(__file__).resolve().parents[1]
NODES = ("a", "a", "b", "b", "c", "c")
"""The node of each worker."""

ZIPF = {f"zipf-{skew}": skew for skew in (0.0, 0.4, 0.8, 1.2)}
TEXTS = ("movie", "austen")
CASES = (*TEXTS, *ZIPF)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME", help=", ".join(CASES))
    add(
        "--slack",
        type=float,
        nargs="+",
        default=[1.0, 1.25],
        metavar="X",
        help="slots for each expert (1 1.25)",
    )
    add("--modes", nargs="+", choices=("ep", "broker"), default=["ep", "broker"], help="default: both")
    add(
        "--upcycled",
        type=Path,
        default=ROOT / ".quickstart/moe",
        metavar="DIR",
        help="see examples/moe/upcycle.py",
    )
    add("--rounds", type=int, default=4, help="turns of each method (4)")
    add("--steps", type=int, default=1, help="steps in each turn (1)")
    add("--trace", type=int, default=60, metavar="N", help="steps of the longer run of each text (60)")
    add("--between", type=float, default=2.0, metavar="MB/S", help="bandwidth between nodes (2)")
    add("--local", type=float, default=16.0, metavar="X", help="times that bandwidth within a node (16)")
    add("--json", action="store_true", help="print JSON instead of tables")
    add_output(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and publish; returns 2 if there can be no namespaces, or a model is missing."""
    arguments = parse(argv)
    if set(arguments.cases) & set(TEXTS) and not (arguments.upcycled / "config.json").is_file():
        print(
            f"--upcycled {arguments.upcycled}: there is no model: make it with "
            f"examples/moe/upcycle.py --output {arguments.upcycled}, or choose --cases zipf-...",
            file=sys.stderr,
        )
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that namespaces are removed
    try:
        result = measure(arguments)
    except NamespacesRefused as error:
        print(f"network namespaces need root and iproute2: {error}", file=sys.stderr)
        return 2
    from expert_placement_tables import draw, markdown

    if arguments.output is not None:
        draw(result, arguments.output)
    publish(result, markdown(result), arguments.output, arguments.json)
    return 0


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all cases."""
    from expert_placement_cluster import started
    from node_namespaces import connected_nodes

    from tests import warm

    began = time.monotonic()
    with ExitStack() as cleanup:
        network = cleanup.enter_context(connected_nodes([*NODES, NODES[0]]))
        server = cleanup.enter_context(warm.Server())
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="expert-placement-")))
        single = cleanup.enter_context(started(server, network, [len(NODES)], 29510, "single"))
        members = {"ep": range(len(NODES)), "broker": [len(NODES), *range(len(NODES))]}
        teams = {
            mode: cleanup.enter_context(started(server, network, members[mode], 29520 + i, mode))
            for i, mode in enumerate(arguments.modes)
        }
        bench = Bench(arguments, network, single, teams, folder)
        result = bench.run()
    result["minutes"] = (time.monotonic() - began) / 60
    return result


@dataclass
class Bench:
    """The measurement.

    Attributes:
        arguments: The command line.
        network: Of all processes.
        single: A team of one process, which profiles.
        teams: By mode.
        folder: For models and records.
    """

    arguments: argparse.Namespace
    network: Any
    single: Any
    teams: Mapping[str, Any]
    folder: Path

    def run(self) -> dict[str, Any]:
        """Measure links, then each case."""
        from engine_bench import cpu_name
        from expert_placement_methods import topology_of

        local = self.arguments.between * self.arguments.local
        self.limit()
        links, topologies = {}, {}
        for mode, team in self.teams.items():
            links[mode] = team.ask("links", seconds=0.15)[0]
            master = mode == "broker"
            nodes = [NODES[0], *NODES] if master else list(NODES)
            topologies[mode] = topology_of(links[mode], nodes, master)
            say(f"links measured by {mode}: {links[mode]['up']} {links[mode]['down']}")
        cases, traffic = [], {}
        for name in self.arguments.cases:
            model, records, batch = self.prepare(name)
            profile = self.profile(model, records)
            for slack in self.arguments.slack:
                cases.append(self.case(name, slack, model, records, batch, profile, topologies))
                if name in TEXTS:
                    title = f"{name}, {slack:g}x slots"
                    traffic[title] = self.trace(cases[-1], model, records, batch)
        return {
            "hardware": f"{cpu_name()}, 2 cores",
            "between_mb_s": self.arguments.between,
            "local_mb_s": local,
            "rounds": self.arguments.rounds,
            "steps": self.arguments.steps,
            "links": links,
            "cases": cases,
            "traffic": traffic,
        }

    def limit(self) -> None:
        """Limit all links."""
        between = 1e6 * self.arguments.between
        self.network.limit(between * self.arguments.local, between)

    def prepare(self, name: str) -> tuple[str, str, int]:
        """Return a case's model, the file of its records, and the sequences of a step."""
        from expert_placement_models import random_records, text_records, write_random_mixtral

        records = self.folder / f"{name}.pt"
        if name in ZIPF:
            write_random_mixtral(self.folder / name, ZIPF[name])
            random_records(records)
            return str(self.folder / name), str(records), len(NODES)
        text_records(self.arguments.upcycled, ROOT / f".quickstart/data/{name}.jsonl", records)
        return str(self.arguments.upcycled), str(records), len(NODES)

    def profile(self, model: str, records: str) -> Any:
        """Count which experts the records select."""
        from megatron_mux.moe.access_profile import AccessProfile

        return AccessProfile.model_validate(self.single.ask("profile", backbone=model, records=records)[0])

    def case(
        self,
        name: str,
        slack: float,
        model: str,
        records: str,
        batch: int,
        profile: Any,
        topologies: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Measure all methods of a case in turns."""
        import torch
        from expert_placement_methods import place, team_of
        from expert_placement_models import entropy
        from expert_placement_tables import short

        length = torch.load(records, weights_only=True).shape[1]
        placed = place(profile, topologies, batch * length, slack)
        for mode, team in self.teams.items():
            own = {method: one.placement for method, one in placed.items() if team_of(method) == mode}
            team.ask("load", backbone=model, records=records, batch=batch, placements=own)
        self.network.unlimit()
        rest: dict[str, list[float]] = {method: [] for method in placed}
        for first in (True, False, False, False):
            for method in placed:
                seconds = self.turn(method, 1)["seconds"]
                rest[method] += [] if first else seconds
        self.limit()
        turns: dict[str, list[dict[str, Any]]] = {method: [] for method in placed}
        order = list(placed)
        for round_ in range(self.arguments.rounds):
            for method in order[round_ % len(order) :] + order[: round_ % len(order)]:
                turns[method].append(self.turn(method, self.arguments.steps))
        found = {
            "case": name,
            "slack": slack,
            "tokens": batch * length,
            "entropy": entropy(torch.from_numpy(profile.access)),
            "access": profile.access.tolist(),
            "methods": {
                method: self.figures(turns[method], one, statistics.median(rest[method]))
                for method, one in placed.items()
            },
        }
        say(short(found))
        return found

    def trace(self, case: Mapping[str, Any], model: str, records: str, batch: int) -> dict[str, list[float]]:
        """Bytes between nodes of each step of a longer run, by the experts that its rows select."""
        from expert_placement_methods import team_of

        found: dict[str, list[float]] = self.single.ask(
            "trace",
            backbone=model,
            records=records,
            batch=batch,
            steps=self.arguments.trace,
            masters={method: team_of(method) == "broker" for method in case["methods"]},
            placements={method: own["placement"] for method, own in case["methods"].items()},
            nodes=NODES,
        )[0]
        return found

    def turn(self, method: str, steps: int) -> dict[str, Any]:
        """Take some steps by a method; returns seconds and bytes between nodes of each, and the counters of all."""
        from expert_placement_methods import team_of

        mode = team_of(method)
        nodes = [NODES[0], *NODES] if mode == "broker" else NODES
        before = self.network.crossed()
        answers = self.teams[mode].ask("steps", method=method, count=steps)
        crossed = self.network.crossed().since(before)
        all_ended = [max(times) for times in zip(*(one["ends"] for one in answers), strict=True)]
        ends = [max(one["start"] for one in answers), *all_ended]
        counted: dict[str, list[int]] = {}
        for key in ("sent", "routed"):
            counted[key] = [
                sum(
                    size
                    for own, answer in zip(nodes, answers, strict=True)
                    for other, size in zip(nodes, answer[key][step], strict=True)
                    if own != other
                )
                for step in range(steps)
            ]
        return {
            "seconds": [end - start for start, end in zip(ends, ends[1:], strict=False)],
            **counted,
            "gradients": [_ring_bytes(size, nodes) for size in answers[0]["summed"]],
            "interface_bytes": sum(crossed.bytes.values()),
            "interface_payload": crossed.payload,
        }

    def figures(self, turns: Sequence[Mapping[str, Any]], placed: Any, rest: float) -> dict[str, Any]:
        """Summarise a method's turns."""
        sent = [size for turn in turns for size in turn["sent"]]
        routed = [size for turn in turns for size in turn["routed"]]
        seconds = [time_ for turn in turns for time_ in turn["seconds"]]
        payload = sum(turn["interface_payload"] for turn in turns)
        return {
            "seconds": seconds,
            "median_s": statistics.median(seconds),
            "bytes": sent,
            "mean_bytes": statistics.mean(sent),
            "gradient_bytes": statistics.mean(size for turn in turns for size in turn["gradients"]),
            "routed_equals_sent": sent == routed,
            "interface_payload": payload / len(sent),
            "interface_bytes": sum(turn["interface_bytes"] for turn in turns) / len(sent),
            "predicted_bytes": placed.crossing,
            "rest_s": rest,
            "predicted_s": placed.seconds + rest,
            "compute_share": rest / statistics.median(seconds),
            "placement": placed.placement,
        }


def _ring_bytes(summed: int, nodes: Sequence[str]) -> float:
    """Bytes between nodes if processes sum so many bytes on a ring, as gloo does."""
    crossings = sum(a != b for a, b in zip(nodes, [*nodes[1:], nodes[0]], strict=True))
    return crossings * summed * 2 * (len(nodes) - 1) / len(nodes)


def say(line: str) -> None:
    """Print progress."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
