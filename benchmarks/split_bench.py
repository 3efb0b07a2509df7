"""The parts of `split.py`; the output is written after each case, and what it has is not measured again."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from split_cases import measure_case
from split_memory import measure_memory
from split_model import ROWS, measure_sizes, memory_limit, write_certificates, write_model
from split_network import Star, star
from split_processes import cast
from split_together import measure_together

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

from megatron_mux.fusion.device import cpu_name
from tests import warm


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Do the parts that are asked for, as far as the output does not have them."""
    began = time.monotonic()
    bench = Bench(arguments)
    with ExitStack() as cleanup:
        if {"steps", "ranks", "together"} & set(arguments.parts):
            bench.open(cleanup)
        for part in arguments.parts:
            getattr(bench, part)()
    bench.result["minutes"] += (time.monotonic() - began) / 60
    bench.write()
    return bench.result


class OtherSetup(Exception):
    """The output was measured under other conditions."""


class Bench:
    """The measurement.

    Args:
        arguments: The command line.

    Attributes:
        result: What has been measured.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.result: dict[str, Any] = {"hardware": f"{cpu_name()}, 2 cores", "minutes": 0.0, "cases": []}
        if arguments.output is not None and arguments.output.is_file():
            self.result = json.loads(arguments.output.read_text())
        self._runs = 0

    def write(self) -> None:
        """Write the output."""
        file = self.arguments.output
        if file is not None:
            partial = file.with_suffix(".partial")
            partial.write_text(json.dumps(self.result, indent=1) + "\n")
            partial.replace(file)

    def open(self, cleanup: ExitStack) -> None:
        """Make the namespaces, the model, the certificates and the warm process."""
        most = max(self.arguments.clients)
        self.star: Star = cleanup.enter_context(star(max(most, self.arguments.requesters)))
        self.warm = cleanup.enter_context(warm.Server())
        self.folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="split-")))
        self.model = (self.arguments.work or self.folder) / "model"
        if not (self.model / "records.jsonl").is_file():
            write_model(self.model, self.arguments.hidden, self.arguments.layers)
        write_certificates(self.folder / "tls", len(self.star.clients))

    def _new_folder(self) -> Path:
        self._runs += 1
        return self.folder / f"run-{self._runs}"

    # -- parts

    def steps(self) -> None:
        """Time of a step, by policy and number of clients."""
        arguments = self.arguments
        sizes = measure_sizes(self.model)
        limit, reason = memory_limit(sizes, max(arguments.clients))
        say(f"--memory-limit of all policies: {reason}")
        bandwidth = 1e6 * arguments.bandwidth
        self.star.limit(bandwidth)
        setup = {
            "bandwidth": bandwidth,
            "rows": ROWS,
            "hidden": arguments.hidden,
            "layers": arguments.layers,
            "limit": limit,
            "reason": reason,
            "weights": sizes.weights,
            "steps": arguments.steps,
            "most_s": arguments.most_seconds,
        }
        if any(self.result.get("setup", setup).get(key) != value for key, value in setup.items()):
            if not arguments.again:
                raise OtherSetup(
                    f"{arguments.output} has cases of another setup: give another --output, or --again"
                )
            self.result["cases"] = []
        self.result["setup"] = {**self.result.get("setup", {}), **setup}
        wanted = [(policy, count) for policy in arguments.policies for count in arguments.clients]
        for policy, count in wanted:
            if self._case(policy, count) is None or arguments.again:
                self._measure(policy, count, limit)

    def _case(self, policy: str, count: int) -> dict[str, Any] | None:
        found = [own for own in self.result["cases"] if (own["policy"], own["clients"]) == (policy, count)]
        return found[0] if found else None

    def _measure(self, policy: str, count: int, limit: int) -> None:
        arguments = self.arguments
        flags = ["--memory-limit", str(limit), "--no-co-batching"]
        paths = self.model, self.folder / "tls"
        with cast(self.warm, self.star, self._new_folder()) as processes:
            case = measure_case(
                processes, policy, count, arguments.steps, arguments.most_seconds, paths, flags
            )
        others = [own for own in self.result["cases"] if (own["policy"], own["clients"]) != (policy, count)]
        self.result["cases"] = [*others, case]
        self.write()
        parts = ", ".join(f"{key[:-2]} {case[key]:.3f}" for key in _PARTS)
        say(f"{policy}, {count}: step {case['step_s']:.3f} s ({parts}), {case['seconds']:.0f} s")

    def ranks(self) -> None:
        """Time of a step with the body on one rank and on several (Figure 10)."""
        if "ranks" in self.result and not self.arguments.again:
            return
        self.star.limit(1e6 * self.arguments.bandwidth)
        found = []
        for ranks in (1, 2):
            for count in (own for own in self.arguments.clients if own <= 4):
                with cast(self.warm, self.star, self._new_folder()) as processes:
                    case = measure_case(
                        processes,
                        "on-demand",
                        count,
                        self.arguments.steps,
                        self.arguments.most_seconds,
                        (self.model, self.folder / "tls"),
                        ["--no-co-batching"],
                        ranks,
                    )
                found.append(case)
                say(f"on-demand, {count} on {ranks} ranks: step {case['step_s']:.3f} s")
        self.result["ranks"] = found
        self.write()

    def together(self) -> None:
        """Throughput with and without co-batching."""
        if "together" in self.result and not self.arguments.again:
            return
        arguments = self.arguments
        self.star.limit(None)
        backbone = self.model if arguments.random else arguments.backbone
        with cast(self.warm, self.star, self._new_folder()) as processes:
            found = measure_together(
                processes,
                arguments.requesters,
                arguments.sizes,
                arguments.rounds,
                arguments.turn_seconds,
                (backbone, self.folder / "tls"),
            )
        self.result["together"] = {**found, "backbone": "random" if arguments.random else backbone.name}
        self.write()
        for own in found["sizes"]:
            say(f"{own['rows']} rows: x{own['speed_up']:.2f} with co-batching")

    def memory(self) -> None:
        """Persistent memory, and equation 3."""
        if "memory" in self.result and not self.arguments.again:
            return
        self.result["memory"] = measure_memory(self.arguments.backbone, self.arguments.sessions, 64, 32)
        self.write()


_PARTS = ("communication_s", "computation_s", "scheduling_s", "client_s")


def say(line: str) -> None:
    """Print progress."""
    print(line, file=sys.stderr, flush=True)
