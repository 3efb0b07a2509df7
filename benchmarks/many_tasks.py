"""What many tasks cost beside one: host time at a BaseOp, and whole steps on a CPU.

    python benchmarks/many_tasks.py --output benchmarks/results/many-tasks-cpu-2-cores.json   # five minutes
    python benchmarks/many_tasks.py --backbone-shape tiny --rounds 1      # to try it out

Host time: a BaseOp of width 64 on real tensors, forward and backward, with kernels that compute nothing; frozen, with
one task and with 64. Steps: 64 sequences of 16 tokens of one task, against one sequence of each of 64 tasks, LoRA r=8
on q and v and on all linear modules. All alternatives take turns in one process; ratios are medians over turns.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from engine_bench import ALL_LINEAR, QV, backbone_of, random_backbone, spec_of
from mux_side import make_engine
from script import (
    add_backbone,
    add_machine,
    add_output,
    command_line,
    environment,
    in_turns,
    measured_on,
    median_ratio,
    publish,
    table,
)

from megatron_mux.adapters import base_op
from megatron_mux.adapters.attach import AdapterSet
from megatron_mux.adapters.host import Host
from megatron_mux.backbone.model import Backbone
from megatron_mux.batch.pack import PackedSequence, pack
from megatron_mux.batch.packed_batch import activate
from megatron_mux.dry_run.stand_ins import LengthsOnlyDataset
from megatron_mux.kernels.low_rank.choice import DryKernels
from megatron_mux.runtime import Parallel, initialize

MANY, SEQUENCES, TOKENS = 64, 64, 16
TARGETS = {"q and v": QV, "all-linear": ALL_LINEAR}


def base_op_turn(directory: Path, parallel: Parallel, tasks: int, repeats: int) -> Callable[[], None]:
    """Forward and backward of linear_qkv with so many tasks of one sequence each."""
    backbone = Backbone.load(directory, parallel, torch.float32)
    adapters = AdapterSet(Host(backbone.base_ops(), parallel, torch.float32, backbone.shape))
    names = [f"task-{i}" for i in range(tasks)]
    for name in names:
        adapters.add(spec_of(name, QV, 1, 8), 1)
    tokens, labels = torch.zeros(8, dtype=torch.int64), torch.ones(8, dtype=torch.bool)
    sequences = [PackedSequence(name, 0, tokens, labels, 1.0) for name in names or ["frozen"]]
    batch = pack(sequences, tuple(names) or ("frozen",), dict.fromkeys(names or ["frozen"], 0)).to()
    (module,) = (info.module for info in backbone.base_ops() if (info.layer, info.name) == (0, "linear_qkv"))
    x = torch.randn(512, 1, 64, requires_grad=True)  # as many rows whatever the number of tasks

    def turn() -> None:
        with activate(batch), mock.patch.object(base_op, "kernels_for", lambda *_: DryKernels):
            for _ in range(repeats):
                y = module(x)[0]
                y.backward(torch.ones_like(y))

    return turn


def step_turn(
    directory: Path, parallel: Parallel, adapter: dict[str, Any], tasks: int
) -> Callable[[], object]:
    """A step of so many tasks, which share the sequences."""
    backbone = Backbone.load(directory, parallel, torch.float32)
    each = SEQUENCES // tasks
    specs = [spec_of(f"task-{i}", adapter, each, TOKENS) for i in range(tasks)]
    records: list[Any] = [LengthsOnlyDataset([TOKENS] * 4 * each, [TOKENS - 1] * 4 * each) for _ in specs]
    return make_engine(backbone, parallel, specs, records, [None] * tasks).step


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = command_line(__doc__)
    add_backbone(parser)
    parser.add_argument("--rounds", type=int, default=9)
    add_machine(parser, device=False)
    add_output(parser)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    parallel = initialize(device="cpu")
    tiny, path = random_backbone("tiny", torch.float32), backbone_of(arguments)
    base_ops = [base_op_turn(tiny, parallel, tasks, 50) for tasks in (0, 1, MANY)]
    frozen, one, many = in_turns(base_ops, 5 * arguments.rounds)
    ratios = {
        "host time of a BaseOp, one task / frozen": median_ratio(one, frozen),
        f"host time of a BaseOp, {MANY} tasks / one": median_ratio(many, one),
    }
    for name, adapter in TARGETS.items():
        steps = [step_turn(path, parallel, adapter, tasks) for tasks in (1, MANY)]
        one, many = in_turns(steps, arguments.rounds)
        ratios[f"step, {name}, {MANY} tasks / one"] = median_ratio(many, one)
    result = {
        **environment(path.name, "float32", arguments.threads),
        "rounds": arguments.rounds,
        "ratios": ratios,
    }
    rows = table("what | ratio", [(what, f"{value:.2f}") for what, value in ratios.items()])
    text = [measured_on(result), f"Medians of {arguments.rounds} turns.", "", *rows]
    publish(result, "\n".join(text), arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
