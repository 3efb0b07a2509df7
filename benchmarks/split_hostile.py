"""Thousands of cases of hostile clients against a server of split fine-tuning, beside a client whose results must stay.

python benchmarks/split_hostile.py --cases 10000 --output benchmarks/results/split-hostile.json

The server and all clients are threads of this process; most cases come without TLS, and one in eight over mTLS or
with a certificate that is refused. A tenth of the cases meet a server that computes requests together. The status is
1 if the server failed in a case, another client's results changed, or memory grew beyond its bound.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from script import add_output, command_line, publish, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

_MIB = 1 << 20
_TOGETHER = 4096
_TOLERANCE = 1e-5


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    add_output(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases and publish what became of them."""
    arguments = parse(argv)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # it reports each refused handshake
    logging.disable(logging.WARNING)
    alone, together = arguments.cases - arguments.cases // 10, arguments.cases // 10
    result: dict[str, Any] = {"cases": arguments.cases, "seed": arguments.seed}
    with tempfile.TemporaryDirectory() as folder:
        result["alone"] = fight(Path(folder) / "alone", alone, arguments.seed, 0)
        result["co-batched"] = fight(Path(folder) / "together", together, arguments.seed + 1, _TOGETHER)
    publish(result, "\n".join(markdown(result)), arguments.output)
    fights = (result["alone"], result["co-batched"])
    return int(any(one["failures"] or one["changed"] or one["growth"] > one["bound"] for one in fights))


def fight(folder: Path, cases: int, seed: int, together: int) -> dict[str, Any]:
    """Run cases against a new server.

    Args:
        folder: For its files.
        cases: How many.
        seed: Of all of them.
        together: Rows that it computes together.
    """
    import torch

    from megatron_mux import runtime
    from megatron_mux.backbone.model import Backbone
    from tests import tiny_models
    from tests.unit.split.hostile import MOST_GROWTH, Battle
    from tests.unit.split.running_server import running_server

    torch.set_num_threads(1)
    folder.mkdir()
    path = tiny_models.make(folder, "llama", num_hidden_layers=3)
    parallel = runtime.initialize(device="cpu")
    backbone = Backbone.load(path, parallel, torch.float32, split=(1, 2, 0), stage=1, ends=False)
    tolerance = _TOLERANCE if together else 0.0
    with running_server(backbone, parallel, folder / "store", idle_s=2.0, together=together) as server:
        report = Battle(server, folder / "tls", tolerance).fight(cases, seed)
    return {**vars(report), "bound": MOST_GROWTH}


def markdown(result: dict[str, Any]) -> list[str]:
    """The tables."""
    lines = []
    for name in ("alone", "co-batched"):
        own = result[name]
        total = sum(sum(counts.values()) for counts in own["outcomes"].values())
        summary = (
            f"**Requests computed {name}**: {total} cases, {len(own['failures'])} that the server failed in; a client "
            f"trained {own['rounds']} times meanwhile, {own['changed']} times with other results than undisturbed. "
            f"The process, attackers included, grew by {own['growth'] / _MIB:.0f} MiB at most (bound: "
            f"{own['bound'] / _MIB:.0f}); {own['seconds']:.0f} s."
        )
        rows = [(kind, sum(each.values()), _told(each)) for kind, each in sorted(own["outcomes"].items())]
        lines += [summary, "", *table("class | cases | outcomes", rows), "", *own["failures"]]
    return lines


def _told(counts: dict[str, int]) -> str:
    return ", ".join(f"{outcome} {count}" for outcome, count in Counter(counts).most_common())


if __name__ == "__main__":
    sys.exit(main())
