"""The measurement of `expert_placement.py`: methods in turns over limited links, then a longer run of one process."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from expert_placement import CASES, ROOT, ZIPF
from expert_placement_cluster import Team, started
from expert_placement_methods import (
    NODES,
    TEAM_NODES,
    Placed,
    gradient_seconds,
    placed_by_all,
    predictions,
    solved,
    team_of,
    topology_of,
)
from expert_placement_models import entropy, random_records, text_records, write_random_mixtral
from node_namespaces import Network, connected_nodes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

from megatron_mux.fusion.device import cpu_name
from megatron_mux.moe.access_profile import AccessProfile
from megatron_mux.moe.topology import Topology
from tests import warm

LOCAL = 16
"""Times the bandwidth between nodes that links within a node have."""

MEMBERS = {"ep": range(len(NODES)), "broker": [len(NODES), *range(len(NODES))], "single": [len(NODES)]}
"""Indices of the processes that train together; the last process is the master, which also profiles."""


class Bench:
    """Measures cases.

    Args:
        arguments: The command line.
        before: What was measured earlier.
    """

    network: Network
    teams: dict[str, Team]
    topologies: dict[str, Topology]

    def __init__(self, arguments: argparse.Namespace, before: Mapping[str, Any]) -> None:
        self.arguments, self._began = arguments, time.monotonic()
        hardware = f"{cpu_name()}, 2 cores"
        nothing = {"hardware": hardware, "minutes": 0.0, "links": {}, "cases": [], "traffic": {}}
        self.content: dict[str, Any] = {**nothing, **before}

    def measure(self) -> Iterator[dict[str, Any]]:
        """Yield all that is measured so far, after each case."""
        with ExitStack() as cleanup:
            work = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="experts-")))
            self.network = cleanup.enter_context(connected_nodes([*NODES, NODES[0]]))
            server = cleanup.enter_context(warm.Server())
            self.teams = {
                mode: cleanup.enter_context(started(server, self.network, members, 29520 + i, mode))
                for i, (mode, members) in enumerate(MEMBERS.items())
            }
            self._limit()
            links = {mode: self.teams[mode].ask("links", seconds=0.3)[0] for mode in TEAM_NODES}
            self.content["links"][f"{self.arguments.between:g} {self.arguments.between * LOCAL:g}"] = links
            self.topologies = {
                mode: topology_of(links[mode], nodes, mode == "broker") for mode, nodes in TEAM_NODES.items()
            }
            for name in self.arguments.cases:
                backbone, records = self._prepare(name, work)
                found = self.teams["single"].ask("profile", backbone=backbone, records=records)[0]
                profile = AccessProfile.model_validate(found)
                for slack in self.arguments.slack:
                    self._add(self._case(name, slack, backbone, records, profile))
                    yield self.content

    def _prepare(self, name: str, work: Path) -> tuple[str, str]:
        """The model and the records of a case."""
        records = work / f"{name}.pt"
        if name not in ZIPF:
            text_records(self.arguments.upcycled, ROOT / f".quickstart/data/{name}.jsonl", records)
            return str(self.arguments.upcycled), str(records)
        write_random_mixtral(work / name, ZIPF[name])
        random_records(records)
        return str(work / name), str(records)

    def _add(self, case: dict[str, Any]) -> None:
        """Add a case, in place of an earlier one of the same name and slots."""
        key = (case["case"], case["slack"])
        others = [own for own in self.content["cases"] if (own["case"], own["slack"]) != key]
        self.content["cases"] = sorted(
            [*others, case], key=lambda own: (CASES.index(own["case"]), own["slack"])
        )
        self.content["minutes"] += (time.monotonic() - self._began) / 60
        self._began = time.monotonic()
        seconds = {method: round(own["median_s"], 2) for method, own in case["methods"].items()}
        print(f"{key}: entropy {case['entropy']:.3f}, seconds {seconds}", file=sys.stderr, flush=True)

    def _limit(self) -> None:
        between = 1e6 * self.arguments.between
        self.network.limit(between * LOCAL, between)

    def _case(
        self, name: str, slack: float, backbone: str, records: str, profile: AccessProfile
    ) -> dict[str, Any]:
        """Measure all methods of a case in turns."""
        tokens = len(NODES) * torch.load(records, weights_only=True).shape[1]
        found = {mode: solved(profile, own, tokens, slack) for mode, own in self.topologies.items()}
        placed = placed_by_all(found, tokens)
        run = {"backbone": backbone, "records": records, "batch": len(NODES)}
        for mode in TEAM_NODES:
            own = {method: one.placement for method, one in placed.items() if team_of(method) == mode}
            self.teams[mode].ask("load", **run, placements=own)
        self.network.unlimit()
        rest = {method: [self._turn(method) for _ in range(4)][1:] for method in placed}
        self._limit()
        turns: dict[str, list[dict[str, Any]]] = {method: [] for method in placed}
        order = list(placed)
        for round_ in range(self.arguments.rounds):
            first = round_ % len(order)
            for method in order[first:] + order[:first]:
                turns[method].append(self._turn(method))
        if self.arguments.trace:
            masters = {method: team_of(method) == "broker" for method in placed}
            placements = {method: one.placement for method, one in placed.items()}
            more = {"masters": masters, "placements": placements, "nodes": NODES}
            traced = self.teams["single"].ask("trace", steps=self.arguments.trace, **run, **more)[0]
            self.content["traffic"][f"{name}, {slack:g}x slots"] = traced
        methods = {
            method: _figures(turns[method], one, rest[method], self.topologies[team_of(method)])
            for method, one in placed.items()
        }
        between = self.arguments.between
        return {
            "case": name,
            "slack": slack,
            "between_mb_s": between,
            "local_mb_s": between * LOCAL,
            "tokens": tokens,
            "rounds": self.arguments.rounds,
            "steps": 1,
            "entropy": entropy(torch.from_numpy(profile.access)),
            "access": profile.access.tolist(),
            "methods": methods,
            "predicted": predictions(found["broker"], tokens, methods),
        }

    def _turn(self, method: str) -> dict[str, Any]:
        """Take a step by a method; returns its seconds and bytes between nodes, and the counters of all."""
        nodes = TEAM_NODES[team_of(method)]
        before = self.network.crossed()
        answers = self.teams[team_of(method)].ask("step", method=method)
        crossed = self.network.crossed().since(before)

        def between_nodes(key: str) -> int:
            return sum(
                size
                for own, answer in zip(nodes, answers, strict=True)
                for node, size in zip(nodes, answer[key], strict=True)
                if node != own
            )

        return {
            "seconds": max(one["end"] for one in answers) - max(one["start"] for one in answers),
            "sent": between_nodes("sent"),
            "routed": between_nodes("routed"),
            "summed": answers[0]["summed"],
            "gradients": _ring_bytes(answers[0]["summed"], nodes),
            "interface_bytes": sum(crossed.bytes.values()),
            "interface_payload": crossed.payload,
        }


def _figures(
    turns: Sequence[Mapping[str, Any]], placed: Placed, rest: Sequence[Mapping[str, Any]], topology: Topology
) -> dict[str, Any]:
    """Summarise a method's turns, over limited links and before that over links without limits."""

    def mean(key: str) -> float:
        return statistics.mean(turn[key] for turn in turns)

    seconds = [turn["seconds"] for turn in turns]
    at_rest = statistics.median(turn["seconds"] for turn in rest)
    summing = gradient_seconds(rest[-1]["summed"], topology)
    return {
        "seconds": seconds,
        "median_s": statistics.median(seconds),
        "bytes": [turn["sent"] for turn in turns],
        "mean_bytes": mean("sent"),
        "gradient_bytes": mean("gradients"),
        "routed_equals_sent": all(turn["sent"] == turn["routed"] for turn in turns),
        "interface_payload": mean("interface_payload"),
        "interface_bytes": mean("interface_bytes"),
        "predicted_bytes": placed.crossing,
        "rest_s": at_rest,
        "summed_bytes": rest[-1]["summed"],
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
