"""The parts of `expert_placement.py`: preparing cases, measuring methods in turns, following a longer run."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from expert_placement_cluster import Team, started
from expert_placement_methods import NODES, Placed, gradient_seconds, place, team_of, topology_of
from expert_placement_models import entropy, random_records, text_records, write_random_mixtral
from expert_placement_predicted import predict_cases
from expert_placement_results import CASES, ROOT, ZIPF, Results, title
from expert_placement_tables import short
from node_namespaces import connected_nodes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

from megatron_mux.fusion.device import cpu_name
from megatron_mux.moe.access_profile import AccessProfile
from megatron_mux.moe.topology import Topology
from tests import warm

MEMBERS = {"ep": range(len(NODES)), "broker": [len(NODES), *range(len(NODES))]}
"""Indices of the processes that train together; the last one is the master."""


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Do the parts that are asked for, as far as the output does not have them."""
    began = time.monotonic()
    results = Results(f"{cpu_name()}, 2 cores", CASES, arguments.output)
    wanted = [(name, slack) for name in arguments.cases for slack in arguments.slack]
    missing = [key for key in wanted if arguments.again or results.case(*key) is None]
    with ExitStack() as cleanup:
        work = arguments.work or Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="experts-")))
        work.mkdir(parents=True, exist_ok=True)
        if arguments.parts != ["predict"]:
            network = cleanup.enter_context(connected_nodes([*NODES, NODES[0]]))
            server = cleanup.enter_context(warm.Server())
            bench = Bench(arguments, network, server, work, results)
        if "prepare" in arguments.parts:
            bench.prepare(arguments.cases)
        if "measure" in arguments.parts and missing:
            bench.measure(missing)
        if "trace" in arguments.parts and arguments.trace:
            bench.trace(wanted)
        if "predict" in arguments.parts:
            predict_cases(results, wanted, work)
    results.content["minutes"] += (time.monotonic() - began) / 60
    results.write()
    return results.content


@dataclass
class Bench:
    """The measurement.

    Attributes:
        arguments: The command line.
        network: Of all processes.
        server: Forks them.
        work: Folder of models, records and profiles.
        results: So far.
        teams: By mode, while cases are measured.
    """

    arguments: argparse.Namespace
    network: Any
    server: warm.Server
    work: Path
    results: Results
    teams: dict[str, Team] = field(default_factory=dict)

    def prepare(self, names: Sequence[str]) -> None:
        """Make the models, records and profiles that the folder lacks."""
        missing = [name for name in names if not self._profile_file(name).is_file()]
        if not missing:
            return
        with started(self.server, self.network, [len(NODES)], 29510, "single") as single:
            for name in missing:
                records = self._records(name)
                if name in ZIPF:
                    write_random_mixtral(Path(self._model(name)), ZIPF[name])
                    random_records(records)
                else:
                    text_records(self.arguments.upcycled, ROOT / f".quickstart/data/{name}.jsonl", records)
                found = single.ask("profile", backbone=self._model(name), records=str(records))[0]
                profile = AccessProfile.model_validate(found)
                self._profile_file(name).write_text(profile.model_dump_json())
                say(f"{name}: entropy {entropy(torch.from_numpy(profile.access)):.3f}")

    def measure(self, wanted: Sequence[tuple[str, float]]) -> None:
        """Measure links, unless they have been, and cases."""
        self.prepare([name for name, _ in wanted])
        with ExitStack() as cleanup:
            for i, mode in enumerate(MEMBERS):
                team = started(self.server, self.network, MEMBERS[mode], 29520 + i, mode)
                self.teams[mode] = cleanup.enter_context(team)
            if not self._links():
                self._limit()
                links = {mode: team.ask("links", seconds=0.3)[0] for mode, team in self.teams.items()}
                self._links().update(links)
                self.results.write()
                say(f"links: {[(own['up'], own['down']) for own in links.values()]}")
            for name, slack in wanted:
                self.results.add_case(self._case(name, slack))
                say(short(self.results.case(name, slack) or {}))

    def trace(self, wanted: Sequence[tuple[str, float]]) -> None:
        """Count, for measured cases, bytes between nodes of each step of a longer run, by the experts of its rows."""
        missing = [key for key in wanted if self.results.case(*key)]
        if not self.arguments.again:
            missing = [key for key in missing if title(*key) not in self.results.traffic]
        if not missing:
            return
        self.prepare([name for name, _ in missing])
        with started(self.server, self.network, [len(NODES)], 29510, "single") as single:
            for name in dict.fromkeys(name for name, _ in missing):
                methods = {
                    f"{slack:g} {method}": (method, own["placement"])
                    for other, slack in missing
                    if other == name
                    for method, own in (self.results.case(name, slack) or {})["methods"].items()
                }
                found = single.ask(
                    "trace",
                    backbone=self._model(name),
                    records=str(self._records(name)),
                    batch=len(NODES),
                    steps=self.arguments.trace,
                    masters={key: team_of(method) == "broker" for key, (method, _) in methods.items()},
                    placements={key: placement for key, (_, placement) in methods.items()},
                    nodes=NODES,
                )[0]
                for _, slack in (key for key in missing if key[0] == name):
                    self.results.traffic[title(name, slack)] = {
                        method: found[key]
                        for key, (method, _) in methods.items()
                        if key == f"{slack:g} {method}"
                    }
                self.results.write()

    def _model(self, name: str) -> str:
        return str(self.work / name) if name in ZIPF else str(self.arguments.upcycled)

    def _records(self, name: str) -> Path:
        return self.work / f"{name}.pt"

    def _profile_file(self, name: str) -> Path:
        return self.work / f"{name}.profile.json"

    def _limit(self) -> None:
        between = 1e6 * self.arguments.between
        self.network.limit(between * self.arguments.local, between)

    def _links(self) -> dict[str, Any]:
        between = self.arguments.between
        return self.results.links(between, between * self.arguments.local)

    def _topologies(self) -> dict[str, Topology]:
        nodes = {"ep": list(NODES), "broker": [NODES[0], *NODES]}
        return {mode: topology_of(own, nodes[mode], mode == "broker") for mode, own in self._links().items()}

    def _case(self, name: str, slack: float) -> dict[str, Any]:
        """Measure all methods of a case in turns."""
        profile = AccessProfile.model_validate_json(self._profile_file(name).read_text())
        length = torch.load(self._records(name), weights_only=True).shape[1]
        topologies = self._topologies()
        placed = place(profile, topologies, len(NODES) * length, slack)
        for mode, team in self.teams.items():
            own = {method: one.placement for method, one in placed.items() if team_of(method) == mode}
            records = str(self._records(name))
            team.ask("load", backbone=self._model(name), records=records, batch=len(NODES), placements=own)
        self.network.unlimit()
        rest: dict[str, list[dict[str, Any]]] = {method: [] for method in placed}
        for first in (True, False, False, False):
            for method in placed:
                turn = self._turn(method, 1)
                rest[method] += [] if first else [turn]
        self._limit()
        turns: dict[str, list[dict[str, Any]]] = {method: [] for method in placed}
        order = list(placed)
        for round_ in range(self.arguments.rounds):
            for method in order[round_ % len(order) :] + order[: round_ % len(order)]:
                turns[method].append(self._turn(method, self.arguments.steps))
        return {
            "case": name,
            "slack": slack,
            "between_mb_s": self.arguments.between,
            "local_mb_s": self.arguments.between * self.arguments.local,
            "tokens": len(NODES) * length,
            "rounds": self.arguments.rounds,
            "steps": self.arguments.steps,
            "entropy": entropy(torch.from_numpy(profile.access)),
            "access": profile.access.tolist(),
            "methods": {
                method: _figures(turns[method], one, rest[method], topologies[team_of(method)])
                for method, one in placed.items()
            },
        }

    def _turn(self, method: str, steps: int) -> dict[str, Any]:
        """Take some steps by a method; returns seconds and bytes between nodes of each, and the counters of all."""
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
            "summed": answers[0]["summed"],
            "gradients": [_ring_bytes(size, nodes) for size in answers[0]["summed"]],
            "interface_bytes": sum(crossed.bytes.values()),
            "interface_payload": crossed.payload,
        }


def _figures(
    turns: Sequence[Mapping[str, Any]], placed: Placed, rest: Sequence[Mapping[str, Any]], topology: Topology
) -> dict[str, Any]:
    """Summarise a method's turns, over limited links and before that over links without limits."""
    sent = [size for turn in turns for size in turn["sent"]]
    routed = [size for turn in turns for size in turn["routed"]]
    seconds = [time_ for turn in turns for time_ in turn["seconds"]]
    at_rest = statistics.median(time_ for turn in rest for time_ in turn["seconds"])
    summing = gradient_seconds(rest[-1]["summed"][0], topology)
    return {
        "seconds": seconds,
        "median_s": statistics.median(seconds),
        "bytes": sent,
        "mean_bytes": statistics.mean(sent),
        "gradient_bytes": statistics.mean(size for turn in turns for size in turn["gradients"]),
        "routed_equals_sent": sent == routed,
        "interface_payload": sum(turn["interface_payload"] for turn in turns) / len(sent),
        "interface_bytes": sum(turn["interface_bytes"] for turn in turns) / len(sent),
        "predicted_bytes": placed.crossing,
        "rest_s": at_rest,
        "summed_bytes": rest[-1]["summed"][0],
        "transfers_s": placed.seconds,
        "gradients_s": summing,
        "predicted_s": placed.seconds + summing + at_rest,
        "compute_share": at_rest / statistics.median(seconds),
        "placement": placed.placement,
    }


def _ring_bytes(summed: int, nodes: Sequence[str]) -> float:
    """Bytes between nodes if processes sum so many bytes on a ring, as gloo does."""
    crossings = sum(a != b for a, b in zip(nodes, [*nodes[1:], nodes[0]], strict=True))
    return crossings * summed * 2 * (len(nodes) - 1) / len(nodes)


def say(line: str) -> None:
    """Print progress."""
    print(line, file=sys.stderr, flush=True)
