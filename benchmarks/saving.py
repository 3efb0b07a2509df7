"""How much slower steps are while a save is written in the background.

python benchmarks/saving.py --json                      # SmolLM2 with eight tasks; minutes
python benchmarks/saving.py --backbone-shape tiny       # to try it out: seconds

Eight LoRA tasks on all linear modules train together, a step at a time. Rounds of steps with a save and rounds without
take turns, so that both see the same machine. A round with a save begins with it: its first step waits until the
adapters and the optimizers' moments are copied, and the next ones run while these are written; steps that begin later
are not counted. `slower` compares the median of the steps during a save, and their slowest one, with the median of the
steps of the other rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from script import add_machine, add_output, command_line, publish, table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run by file path, from a checkout

TASKS = 8
WARM_UP_STEPS = 3


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("--backbone", type=Path, default=ROOT / ".quickstart" / "backbone")
    parser.add_argument("--backbone-shape", choices=("tiny", "mid"), help="a random backbone instead")
    parser.add_argument("--sequences", type=int, default=4, help="of each task's step")
    parser.add_argument("--tokens", type=int, default=32, help="of each sequence")
    parser.add_argument("--steps", type=int, default=4, help="of a round")
    parser.add_argument("--rounds", type=int, default=8, help="of each kind")
    parser.add_argument("--rate", default="50MB", help="bytes to write a second, or none")
    parser.add_argument("--json", action="store_true", help="print the JSON instead of the table")
    add_machine(parser, device=False)
    add_output(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and publish."""
    arguments = parse(argv)
    with tempfile.TemporaryDirectory() as directory:
        result = measure(arguments, Path(directory))
    publish(result, markdown(result), arguments.output, arguments.json)
    return 0


def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Train, with saves and without."""
    import torch
    from workload import write_random_backbone

    from megatron_mux.backbone.model import Backbone
    from megatron_mux.engine import Engine
    from megatron_mux.fusion.device import cpu_name
    from megatron_mux.memory.sizes import parse_size
    from megatron_mux.runtime import initialize
    from megatron_mux.training.garbage import freeze_objects
    from megatron_mux.training.saving import Saver

    torch.set_num_threads(arguments.threads)
    path = arguments.backbone
    if arguments.backbone_shape is not None:
        path = directory / arguments.backbone_shape
        write_random_backbone(arguments.backbone_shape, path, torch.float32)
    parallel = initialize(device="cpu")
    backbone = Backbone.load(path, parallel)
    engine = Engine(backbone, parallel)
    engine.register_tasks(_tasks(arguments, backbone.shape.vocab))
    rate = None if arguments.rate == "none" else parse_size(arguments.rate)
    saver = Saver(directory / "save", backbone.info.fingerprint, 1, rate, parallel)
    try:
        for _ in range(WARM_UP_STEPS):
            engine.step()
        _save(engine, saver)  # it makes the buffer that later saves use again
        saver.wait()
        freeze_objects()  # as a run does
        found: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(2 * arguments.rounds):
            with_save = turn % 2 == 0
            found[with_save] += _round(engine, saver, arguments.steps, with_save)
    finally:
        saver.close()
        engine.close()
    usual = statistics.median(found[False])
    size = sum(file.stat().st_size for file in (directory / "save").rglob("*.safetensors"))
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": arguments.threads,
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "backbone": arguments.backbone_shape or "SmolLM2-135M-Instruct",
        "tasks": TASKS,
        "tokens": TASKS * arguments.sequences * arguments.tokens,
        "rate": arguments.rate,
        "megabytes": round(size / 1e6, 1),
        "steps": {"with a save": found[True], "without": found[False]},
        "seconds": usual,
        "slower": {
            "median": statistics.median(found[True]) / usual - 1,
            "worst": max(found[True]) / usual - 1,
        },
        "slowest without a save": max(found[False]) / usual - 1,
    }


def _round(engine: Any, saver: Any, steps: int, with_save: bool) -> list[float]:
    """Seconds of each step; of those that began during the save, if there is one."""
    found: list[float] = []
    start = time.perf_counter()
    if with_save:
        _save(engine, saver)
    for _ in range(steps):
        during = with_save and not saver.is_done
        engine.step()
        now = time.perf_counter()
        if during == with_save:
            found.append(now - start)
        start = now
    saver.wait()
    return found


def _save(engine: Any, saver: Any) -> None:
    """Save all tasks, as a run does."""
    from megatron_mux.checkpoint import SavedTask, TaskToSave, checkpoint_of

    states = []
    for name in engine.tasks:
        step = engine.progress(name)[0]
        entry = SavedTask(name, step, "running", "", checkpoint_of(name, step), {}, "")
        states.append(TaskToSave(entry, config=engine.adapter_config(name)))
    saver.begin(states, engine.copy_states(engine.tasks, saver.memory), engine.plan)


def _tasks(arguments: argparse.Namespace, vocabulary: int) -> list[Any]:
    import torch

    from megatron_mux.engine import Task
    from megatron_mux.tasks import TaskSpec
    from tests.reference.records import Records

    generator = torch.Generator().manual_seed(0)
    tasks = []
    for i in range(TASKS):
        section = {
            "name": f"task-{i}",
            "adapter": {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
            "data": {"path": "made-up", "max_length": arguments.tokens},
            "training": {
                "per_device_train_batch_size": arguments.sequences,
                "learning_rate": 1e-3,
                "max_steps": 1_000_000,
            },
        }
        tokens = torch.randint(
            0, vocabulary, (16 * arguments.sequences, arguments.tokens), generator=generator
        )
        labelled = torch.arange(arguments.tokens) >= arguments.tokens // 2
        records = Records([(row, labelled) for row in tokens])
        tasks.append(Task(TaskSpec.model_validate(section), records.as_dataset()))
    return tasks


def markdown(result: dict[str, Any]) -> str:
    """The table."""
    slower = result["slower"]
    rows = [
        (
            f"{result['seconds']:.2f} s",
            f"{result['megabytes']:.0f} MB",
            f"{slower['median']:+.1%}",
            f"{slower['worst']:+.1%}",
            f"{result['slowest without a save']:+.1%}",
        )
    ]
    what = (
        f"{result['tasks']} LoRA tasks (r=8, all linear modules) on {result['backbone']}, {result['tokens']} tokens a "
        f"step, saves written at {result['rate']} a second at most; {result['cpu']}, {result['cores']} cores, "
        f"{result['threads']} threads, torch {result['torch']}."
    )
    lines = [
        what,
        "",
        *table(
            "step | save | median step during a save | slowest step during a save | slowest without",
            rows,
        ),
        "",
        "Differences are from the median step without a save.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
