"""Trainings through a server, with SIGKILLs, cut connections and faulty frames, against undisturbed ones.

python benchmarks/split_faults.py --kills 20 --output benchmarks/results/split-faults.json

kills: two clients train at once (LoRA on all linear modules with dropout; prefix), over mTLS, while the server and
clients are killed at random moments and started again as a user would; once with --no-co-batching, where the adapters
must be the same to the bit, and once with co-batching. cuts and frames: connections cut anywhere by a proxy, and frames
that are doubled, reordered and late, on a port without TLS. The status is 1 if a result differs.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from script import add_output, command_line, publish, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

NAMES = ["wide", "twin", "prefix"]
"""Of the first two the server computes requests together, since they are cut alike."""

STEPS = 60
KILLED_STEPS = 500
"""So many that all kills come before the end."""

LOSSES, ADAPTERS = 1e-5, 2e-3
"""Largest relative distances with co-batching."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("--kills", type=int, default=20, help="in each training (20)")
    parser.add_argument("--cuts", type=int, default=30, help="connections to cut (30)")
    parser.add_argument("--faults", type=int, default=30, help="faulty frames (30)")
    parser.add_argument("--seed", type=int, default=1)
    add_output(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Train under all kinds of faults and publish how far results are from undisturbed ones."""
    arguments = parse(argv)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        rows = [*kills(Path(folder) / "kills", arguments), *connections(Path(folder) / "cuts", arguments)]
    headings = "fault | number | losses apart | adapters apart | allowed | seconds"
    cells = [
        (row["fault"], row["number"], f"{row['losses']:.1e}", f"{row['adapters']:.1e}", row["allowed"],
         f"{row['seconds']:.0f}")
        for row in rows
    ]  # fmt: skip
    publish({"seed": arguments.seed, "rows": rows}, "\n".join(table(headings, cells)), arguments.output)
    return int(not all(row["passed"] for row in rows))


def kills(folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Trainings whose processes are killed, without and with co-batching."""
    from tests import warm
    from tests.end_to_end import split_deployment as split

    place = split.furnish_split(folder, max_steps=KILLED_STEPS)
    rows = []
    with warm.Server() as server:
        for flag, exact in (("--no-co-batching", True), ("--co-batching", False)):
            save, wanted, began = folder / f"killed{flag}", folder / f"undisturbed{flag}", time.monotonic()
            with split.deployed(place, server, "--save", f"server-undisturbed{flag}", flag) as own:
                own.train(NAMES, wanted)
            with split.deployed(place, server, "--save", f"server-killed{flag}", flag) as own:
                hit = split.train_under_fire(own, NAMES, save, arguments.kills, arguments.seed)
            read = [
                ({name: split.losses(each, name) for name in NAMES},
                 {name: split.adapter(each, name, KILLED_STEPS) for name in NAMES})
                for each in (save, wanted)
            ]  # fmt: skip
            what = f"SIGKILL, {flag.strip('-').replace('-', ' ')} ({hit.count('server')} of the server)"
            row = compared(what, len(hit), read, exact, time.monotonic() - began)
            row["passed"] &= len(hit) == arguments.kills
            rows.append(row)
    return rows


def connections(folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Trainings over connections that break, one task in fp64."""
    import torch

    from megatron_mux import runtime
    from megatron_mux.backbone.model import Backbone
    from megatron_mux.backbone.registry import read_backbone_info
    from megatron_mux.split.client import transport
    from megatron_mux.split.client.stream import ClientStream
    from megatron_mux.split.protocol import framing
    from tests import tiny_models
    from tests.end_to_end.workplace import write_tokenizer
    from tests.unit.split.faulty_connections import CuttingProxy, faulty_stream
    from tests.unit.split.running_server import running_server
    from tests.unit.split.splitting import write_data

    folder.mkdir()
    path = tiny_models.make(folder / "backbone", "llama")
    write_tokenizer(path)
    write_data(folder)
    backbone = Backbone.load(
        path, runtime.initialize(device="cpu"), torch.float64, split=(1, 3, 0), stage=1, ends=False
    )
    rows = []
    fingerprint = read_backbone_info(path).fingerprint
    framing.FRAME_BYTES = 2048  # so that messages have several frames
    with running_server(
        backbone, runtime.initialize(device="cpu"), folder / "store", fingerprint=fingerprint
    ) as server:
        wanted = trained(path, folder, server.address, "undisturbed")
        began = time.monotonic()
        proxy = CuttingProxy(server.port, arguments.seed, arguments.cuts, most=40_000)
        found = trained(path, folder, proxy.address, "cut")
        proxy.close()
        done = arguments.cuts - proxy.cuts
        rows.append(
            compared("connection cut anywhere", done, [found, wanted], True, time.monotonic() - began)
        )
        began = time.monotonic()
        faults = [("double", "swap", "late")[i % 3] for i in range(arguments.faults)]
        transport.ClientStream = faulty_stream(arguments.seed, faults)  # type: ignore[misc]
        found = trained(path, folder, server.address, "faulty")
        transport.ClientStream = ClientStream  # type: ignore[misc]
        done = arguments.faults - len(faults)
        what = "frame doubled, reordered or late"
        rows.append(compared(what, done, [found, wanted], True, time.monotonic() - began))
    return rows


def trained(path: Path, data: Path, address: str, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train `splitting.task_of`'s task for `STEPS` steps; returns losses and the adapter."""
    import torch
    from safetensors.torch import load_file

    from megatron_mux.split.client.trainer import SplitTrainer
    from tests.unit.split.splitting import task_of

    task, save = task_of(data), data / name
    task["training"]["max_steps"] = STEPS
    trainer = SplitTrainer(
        path, task, address, None, save=save, wire="f64", dtype=torch.float64, progress=False
    )
    with redirect_stdout(StringIO()):
        trainer.train()
    lines = map(json.loads, (save / "one/metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if "loss" in line]
    return {"one": losses}, {"one": load_file(save / f"one/checkpoint-{STEPS}/adapter_model.safetensors")}


def compared(what: str, number: int, read: Sequence[Any], exact: bool, seconds: float) -> dict[str, Any]:
    """How far the losses and adapters of a training are from those of an undisturbed one."""
    from tests.end_to_end.harness import relative

    (losses, adapters), (wanted_losses, wanted_adapters) = read
    apart = max(
        abs(a - b) / abs(b)
        for name in wanted_losses
        for a, b in zip(losses[name], wanted_losses[name], strict=True)
    )
    far = max(
        relative(adapters[name][key], value)
        for name, tensors in wanted_adapters.items()
        for key, value in tensors.items()
    )
    passed = apart == far == 0 if exact else apart <= LOSSES and far <= ADAPTERS
    allowed = "0" if exact else f"{LOSSES:g}, {ADAPTERS:g}"
    return {
        "fault": what, "number": number, "losses": apart, "adapters": far, "allowed": allowed, "passed": passed,
        "seconds": seconds,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
