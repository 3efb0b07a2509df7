"""What many tasks cost beside one: host time at a BaseOp, and whole steps on a CPU.

    python benchmarks/many_tasks.py [--backbone DIR] [--rounds N] [--output FILE.json]

Host time: a BaseOp of width 64 on real tensors, forward and backward, with kernels that compute nothing; frozen, with
one task and with 64. Steps: 64 sequences of 16 tokens of one task, against one sequence of each of 64 tasks, LoRA r=8
on q and v and on all linear modules. All alternatives take turns in one process; ratios are medians over turns.
"""

from __future__ import annotations

import platform
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from mux_side import make_engine
from script import add_machine, add_output, command_line, publish, table
from workload import write_random_backbone

from megatron_mux.adapters import base_op
from megatron_mux.adapters.attach import AdapterSet
from megatron_mux.adapters.host import Host
from megatron_mux.backbone.model import Backbone
from megatron_mux.batch.micro_batch import activate
from megatron_mux.batch.pack import PackedSequence, pack
from megatron_mux.dry_run.stand_ins import LengthsOnlyDataset
from megatron_mux.kernels.low_rank.choice import DryKernels
from megatron_mux.runtime import Parallel, initialize
from megatron_mux.tasks import TaskSpec

MANY, SEQUENCES, TOKENS = 64, 64, 16
TARGETS: dict[str, Any] = {"q and v": ["q_proj", "v_proj"], "all-linear": "all-linear"}


def task(name: str, targets: Any, sequences: int, steps: int) -> TaskSpec:
    """A LoRA task."""
    adapter = {"peft_type": "LORA", "r": 8, "target_modules": targets}
    training = {"per_device_train_batch_size": sequences, "max_steps": steps, "learning_rate": 1e-4}
    return TaskSpec.model_validate(
        {"name": name, "adapter": adapter, "data": {"path": "made-up"}, "training": training}
    )


def alternating(turns: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Seconds of each, turn by turn, after one turn that does not count."""
    found: list[list[float]] = [[] for _ in turns]
    for number in range(rounds + 1):
        for seconds, turn in zip(found, turns, strict=True):
            start = time.perf_counter()
            turn()
            if number:
                seconds.append(time.perf_counter() - start)
    return found


def ratio(seconds: Sequence[float], base: Sequence[float]) -> float:
    """The median over turns."""
    return statistics.median(a / b for a, b in zip(seconds, base, strict=True))


def base_op_turn(directory: Path, parallel: Parallel, tasks: int, repeats: int) -> Callable[[], None]:
    """Forward and backward of linear_qkv with so many tasks of one sequence each."""
    backbone = Backbone.load(directory, parallel, torch.float32)
    adapters = AdapterSet(Host(backbone.base_ops(), parallel, torch.float32, backbone.shape))
    names = [f"task-{i}" for i in range(tasks)]
    for name in names:
        adapters.add(task(name, TARGETS["q and v"], 1, 1), 1)
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
    directory: Path, parallel: Parallel, targets: Any, tasks: int, rounds: int
) -> Callable[[], object]:
    """A step of so many tasks, which share the sequences."""
    backbone = Backbone.load(directory, parallel, torch.float32)
    each = SEQUENCES // tasks
    specs = [task(f"task-{i}", targets, each, rounds + 2) for i in range(tasks)]
    records: list[Any] = [LengthsOnlyDataset([TOKENS] * 4 * each, [TOKENS - 1] * 4 * each) for _ in specs]
    engine = make_engine(backbone, parallel, specs, records, [None] * tasks)
    return engine.step


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = command_line(__doc__)
    parser.add_argument("--backbone", type=Path, default=Path(".quickstart/backbone"))
    parser.add_argument("--rounds", type=int, default=9)
    add_machine(parser, device=False)
    add_output(parser)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    parallel = initialize(device="cpu")
    cases: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        write_random_backbone("tiny", Path(directory), torch.float32)
        turns = [base_op_turn(Path(directory), parallel, tasks, 50) for tasks in (0, 1, MANY)]
        frozen, one, many = alternating(turns, 5 * args.rounds)
    cases["host time of a BaseOp, one task / frozen"] = ratio(one, frozen)
    cases[f"host time of a BaseOp, {MANY} tasks / one"] = ratio(many, one)
    for name, targets in TARGETS.items():
        turns = [step_turn(args.backbone, parallel, targets, tasks, args.rounds) for tasks in (1, MANY)]
        one, many = alternating(turns, args.rounds)
        cases[f"step, {name}, {MANY} tasks / one"] = ratio(many, one)
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    hardware = f"{cpu[1] if cpu else platform.machine()}, {args.threads} threads, torch {torch.__version__}"
    result = {"hardware": hardware, "rounds": args.rounds, "ratios": cases}
    rows = table("what | ratio", [(what, f"{value:.2f}") for what, value in cases.items()])
    markdown = "\n".join([f"Medians of {args.rounds} turns on {hardware}.", "", *rows])
    publish(result, markdown, args.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
