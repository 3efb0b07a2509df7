"""Messages of tensor ranks on several GPUs: how many CTAs they need, and what they take from computation.

python benchmarks/communication_gpus.py --output result.json           # one rank a GPU; the tables as result.md
python benchmarks/communication_gpus.py --ranks 4 --layers 8
python benchmarks/communication_gpus.py --dry                          # two processes on a CPU: that the script runs

First a sweep: messages of several sizes over NCCL with 1 to 32 CTAs, and over NVLink SHARP where it is there; their
bandwidth, and how much they slow products beside them. Then a step of two tasks, one after another and in turns: the
share of the time in which a GPU computes, and in which a message is on its way (as in figure 18 of MuxTune).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from processes import add_worker_flag, run_in_processes
from script import add_output, command_line, measured_on, publish, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout
_FLAGS = ("--ranks", "--ctas", "--megabytes", "--backbone-shape", "--layers", "--tokens", "--dry")
_ABOUT = (
    "Bus bandwidth: bytes x 2 (n - 1) / n over seconds, n ranks. Shares are of the time between a step's first and "
    "last kernel; of rank 0, by torch's profiler, for which copies into and out of a slot "
    "compute, too. The JSON has them slice by slice."
)
_DRY = {"ranks": 2, "megabytes": [0.01, 0.1], "backbone_shape": "tiny", "layers": 2, "tokens": 256}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("--ranks", type=int, help="tensor ranks, one a GPU (all GPUs)")
    parser.add_argument("--ctas", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], metavar="N")
    parser.add_argument("--megabytes", type=float, nargs="+", default=[1, 4, 16, 64], help="of a message")
    parser.add_argument("--backbone-shape", default="llama3-8b", help="shape of the random backbone")
    parser.add_argument("--layers", type=int, default=8, help="of the backbone")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens in a step of both tasks, about")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on a CPU: the figures mean nothing")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    add_worker_flag(parser)
    add_output(parser)
    arguments = parser.parse_args(argv)
    if arguments.dry:
        vars(arguments).update(_DRY)
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Measure in one process a rank and publish; returns 2 without GPUs for them."""
    arguments = parse(argv)
    if not arguments.dry and arguments.worker is None:
        import torch

        found = torch.cuda.device_count()
        arguments.ranks = arguments.ranks or found
        if not 2 <= arguments.ranks <= found:
            wanted = max(2, arguments.ranks)
            print(f"{wanted} tensor ranks need {wanted} GPUs, here are {found}: try --dry", file=sys.stderr)
            return 2
    result = run_in_processes(arguments, arguments.ranks, __file__, _FLAGS, _measure)
    if result is not None:
        publish(result, markdown(result), arguments.output, arguments.json)
    return 0


def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    from communication_worker import measure  # it imports torch

    return measure(arguments)


def markdown(result: dict[str, Any]) -> str:
    """Render the tables."""
    lines = [measured_on(result["backbone"], result["dtype"], result["hardware"], result["versions"])]
    lines += [f"{result['ranks']} tensor ranks; {result['line']}.", ""]
    rows: list[Sequence[object]] = [
        (
            one["way"],
            one["ctas"],
            f"{one['bytes'] / 1e6:g}",
            f"{one['message_s'] * 1e6:.0f}",
            f"{one['bus_bytes_per_s'] / 1e9:.1f}",
            f"{one['product_slowdown']:+.1%}",
        )
        for one in result["sweep"]
    ]
    heading = "messages over | CTAs | MB | microseconds | bus bandwidth, GB/s | products beside them"
    lines += [*table(heading, rows), ""]
    rows = [
        (
            one["order"],
            f"{one['seconds']:.4f}",
            *(f"{one[kind]:.0%}" for kind in ("compute", "links", "both")),
        )
        for one in result["steps"]
    ]
    lines += table("a step | seconds | computing | a message on its way | both at once", rows)
    lines += ["", _ABOUT]
    if result["device"] == "cpu":
        lines += ["", "**A dry run on a CPU: the figures mean nothing.**"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
