"""Measure the links between the processes of a run, for the placement of experts.

    megatron-mux measure-topology --gpus 4 --capacity 43 --output topology.json
    megatron-mux measure-topology --gpus 7 --master --capacity 43 --output topology.json
    torchrun --nnodes 2 --nproc-per-node 4 ... -m megatron_mux.cli measure-topology --capacity 43,43,43,43,20,20,20,20

Bandwidth and latency of each pair of processes alone, then of all that leaves and enters each node at once, which
processes of a node may share. megatron-mux place-experts reads the file. With --master, the first process holds no
experts: it sends tokens to all others.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_mux.arguments.flag import COUNT, FILE
from megatron_mux.arguments.parser import Parser
from megatron_mux.arguments.values import counts
from megatron_mux.cli.launch import add_process_flags, run_command
from megatron_mux.errors import SharedError

if TYPE_CHECKING:
    from megatron_mux.moe.measure_links import MeasuredLinks
    from megatron_mux.runtime import Parallel

PROGRAM = "megatron-mux measure-topology"


def build_parser(program: str = PROGRAM) -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = Parser(prog=program, description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add(
        "--capacity",
        type=counts,
        required=True,
        metavar="N[,N...]",
        help="experts over all layers that each worker can hold: one number for all, or one for each",
    )
    add("--output", **FILE, help="write the topology, for megatron-mux place-experts")
    add("--master", action="store_true", help="the first process is the master of an expert broker")
    add(
        "--nodes",
        metavar="A,B,...",
        help="node of each process, in the order of ranks (default: their host names)",
    )
    add(
        "--pairs",
        choices=("all", "nodes"),
        default="all",
        help="measure all pairs of processes (default), or one pair for each two nodes, which stands for the others",
    )
    add("--milliseconds", **COUNT, default=200, help="of a transfer, at least (200)")
    add("--json", action="store_true", help="print the topology instead of a table")
    add_process_flags(parser, "1")
    return parser


def main(argv: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Measure, write and print; returns 2 if the input is wrong."""
    words = list(sys.argv[1:] if argv is None else argv)
    return run_command("measure-topology", words, build_parser(program), run, program)


def run(arguments: argparse.Namespace) -> None:
    """Measure, write and print, with a parsed command line."""
    from megatron_mux.files import write_output
    from megatron_mux.moe.measure_links import LinkMeter, measure_links
    from megatron_mux.moe.topology import Topology
    from megatron_mux.runtime import initialize

    capacities = _check(arguments, int(os.environ.get("WORLD_SIZE", "1")))
    parallel = initialize()
    nodes = arguments.nodes.split(",") if arguments.nodes else _host_names(parallel)
    shown = parallel.rank == 0 and sys.stderr.isatty()

    def progress(done: int, total: int) -> None:
        if shown:
            print(
                f"\r{done} of {total} measured", end="" if done < total else "\n", file=sys.stderr, flush=True
            )

    meter = LinkMeter(parallel, arguments.milliseconds / 1e3)
    links = measure_links(meter, nodes, arguments.pairs == "all", progress)
    if parallel.rank != 0:
        return
    topology = Topology.model_validate(describe(links, nodes, capacities, arguments.master))
    content = topology.model_dump_json(indent=1, exclude_none=True)
    if arguments.output is not None:
        write_output("--output", arguments.output, content + "\n")
    if arguments.json:
        print(content)
    else:
        _print(links, nodes, arguments)


def _check(arguments: argparse.Namespace, processes: int) -> list[int]:
    """Check the command line before anything is measured; returns the capacity of each worker."""
    first = 1 if arguments.master else 0
    workers = processes - first
    if processes < 2:
        raise SharedError("one process has no links: add --gpus N or --processes N, N at least 2")
    if arguments.nodes is not None:
        named = arguments.nodes.split(",")
        if len(named) != processes or not all(name.strip() for name in named):
            raise SharedError(f"--nodes {arguments.nodes}: must name {processes} nodes, one for each process")
    if len(arguments.capacity) not in (1, workers):
        raise SharedError(
            f"--capacity: has {len(arguments.capacity)} numbers, but there are {workers} workers: give one, or one each"
        )
    if arguments.output is not None and not arguments.output.resolve().parent.is_dir():
        raise SharedError(
            f"--output {arguments.output}: there is no directory {arguments.output.parent}: create it first"
        )
    return list(arguments.capacity) * (workers if len(arguments.capacity) == 1 else 1)


def _host_names(parallel: Parallel) -> list[str]:
    import torch.distributed as dist

    names: list[Any] = [None] * parallel.world_size
    dist.all_gather_object(names, platform.node() or "localhost")
    return names


def describe(
    links: MeasuredLinks, nodes: Sequence[str], capacities: Sequence[int], master: bool
) -> dict[str, Any]:
    """Return a topology's content.

    Args:
        links: Between all processes.
        nodes: Of all processes.
        capacities: Of the workers: all processes, but for the master.
        master: Whether the first process is the master.
    """
    import numpy as np

    first = 1 if master else 0
    content: dict[str, Any] = {
        "workers": [
            {"node": node, "capacity": capacity}
            for node, capacity in zip(nodes[first:], capacities, strict=True)
        ],
        "bandwidth": links.bandwidth[first:, first:].tolist(),
        "latency_s": links.latency[first:, first:].tolist(),
        "uplinks": {node: {"up": links.up[node], "down": links.down[node]} for node in links.up},
    }
    if master:
        content["master_node"] = nodes[0]
        content["master_bandwidth"] = np.minimum(links.bandwidth[0, 1:], links.bandwidth[1:, 0]).tolist()
    return content


def _print(links: MeasuredLinks, nodes: Sequence[str], arguments: argparse.Namespace) -> None:
    """Print bandwidths in MB per second: of pairs alone, then of what leaves and enters nodes."""
    from rich.table import Table

    from megatron_mux.console import make_console

    table = Table(title="MB/s (latency in ms) from process to process, alone")
    for column in ("from", "node", *(f"to {i}" for i in range(len(nodes)))):
        table.add_column(column, justify="left" if column == "node" else "right")
    for i, node in enumerate(nodes):
        cells = [
            "-" if i == j else f"{links.bandwidth[i, j] / 1e6:.4g} ({links.latency[i, j] * 1e3:.2f})"
            for j in range(len(nodes))
        ]
        name = f"{i} (master)" if arguments.master and i == 0 else str(i)
        table.add_row(name, node, *cells)
    console = make_console()
    console.print(table)
    lines = [
        f"node {node}: {links.up[node] / 1e6:.4g} MB/s leave it at once, {links.down[node] / 1e6:.4g} MB/s enter it"
        for node in links.up
    ]
    if arguments.output is not None:
        lines.append(f"written to {arguments.output}")
    console.print("\n".join(lines), soft_wrap=True, highlight=False)
