"""The memory of split sessions as the server predicts it before they join, against that of real passes.

python benchmarks/split_prediction.py [--backbone DIR] [--rows 256 512 1024 2048] [--output FILE]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from script import add_output, command_line, publish, table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run by file path, from a checkout

ADAPTERS: dict[str, dict[str, Any]] = {
    "LoRA r=8, q and v": {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj", "v_proj"]},
    "LoRA r=8, all linear": {"peft_type": "LORA", "r": 8, "target_modules": "all-linear"},
    "prefix of 16": {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 16},
    "bottleneck of 32": {"peft_type": "BOTTLENECK", "bottleneck_size": 32},
    "diff pruning, q and v": {"peft_type": "DIFF_PRUNING", "target_modules": ["q_proj", "v_proj"]},
}
_FIGURES = ("forward", "graph", "backward", "lasting")
_LONGEST, _MEAN = 1024, 64
"""Tokens of a sequence, at most and on average."""


def compare(backbone: Path, rows: Sequence[int], cuts: tuple[int, int]) -> list[dict[str, Any]]:
    """Predict and measure sessions of every adapter and size on one body.

    Args:
        backbone: Hugging Face directory.
        rows: Of the largest request.
        cuts: Layers of the clients, at the front and at the back.
    """
    import torch

    from megatron_mux import runtime
    from megatron_mux.backbone.model import Backbone
    from megatron_mux.backbone.registry import read_shape
    from megatron_mux.dry_run.process import prepare
    from megatron_mux.split.protocol.agreement import Proposal
    from megatron_mux.split.server.body import Body
    from megatron_mux.split.server.session_memory import profile
    from megatron_mux.split.server.session_prediction import BodyPlace, predict, prediction_worker
    from megatron_mux.tasks import TrainingSpec
    from tests.unit.split.counted import meter

    shape, parallel, (front, back) = read_shape(backbone), runtime.initialize(device="cpu"), cuts
    split = (front, shape.layers - front - back, back)
    body = Body(Backbone.load(backbone, parallel, torch.float32, split=split, stage=1, ends=False), parallel)
    place = BodyPlace.of(body, range(front, shape.layers - back))
    prepare(prediction_worker()).result()
    found = []
    for name, adapter in ADAPTERS.items():
        for count in rows:
            asked = Proposal(
                task="task",
                fingerprint="",
                cut_front=front,
                cut_back=back,
                wire="f32",
                adapter=adapter,
                training=TrainingSpec(max_steps=1),
                total_steps=9,
                train_rows=count,
                rows=count,
                sequences=-(-count // _MEAN),
                longest=min(count, _LONGEST),
                run="0" * 16,
                incarnation="0" * 16,
            )
            layers = asked.body(shape)
            body.add("task", asked.adapter_spec(), asked.training, layers, asked.total_steps)
            began = time.perf_counter()
            predicted = prediction_worker().submit(predict, place, asked).result()
            seconds = time.perf_counter() - began
            measured = profile(body, "task", asked, layers, meter(parallel.device))
            body.remove("task")
            figures = {one: (getattr(predicted, one), getattr(measured, one)) for one in _FIGURES}
            found.append({"adapter": name, "rows": count, "seconds": round(seconds, 2), **figures})
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and publish."""
    parser = command_line(__doc__)
    parser.add_argument("--backbone", type=Path, default=ROOT / ".quickstart/backbone", metavar="DIR")
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 512, 1024, 2048], metavar="N")
    parser.add_argument("--cuts", type=int, nargs=2, default=[1, 1], metavar="N", help="front and back (1 1)")
    add_output(parser)
    arguments = parser.parse_args(argv)
    found = compare(arguments.backbone, arguments.rows, tuple(arguments.cuts))
    rows = []
    for one in found:
        both = [one[name] for name in _FIGURES]
        errors = [f"{got / 2**20:.1f} ({100 * (said / got - 1):+.1f}%)" for said, got in both]
        rows.append((one["adapter"], str(one["rows"]), *errors, f"{one['seconds']:.1f}"))
    head = "Measured MiB, and how far the prediction is off: M_f, what a graph keeps, M_b, A + O. fp32, on a CPU."
    lines = table("adapter | rows | M_f | graph | M_b | A + O | seconds", rows)
    publish({"sessions": found}, "\n".join([head, "", *lines]), arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
