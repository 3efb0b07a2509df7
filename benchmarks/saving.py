"""How much slower steps are while a save is written in the background.

    python benchmarks/saving.py                             # SmolLM2 with eight tasks: a quarter of an hour
    python benchmarks/saving.py --rate 20MB --steps 12 --rounds 4 --sequences 2 --tokens 16    # two minutes
    python benchmarks/saving.py --backbone-shape tiny       # to try it out: seconds

Eight LoRA tasks on all linear modules train together, a step at a time. Rounds of steps with a save and rounds without
take turns, so that both see the same machine. A round with a save begins with it: its first step waits until the
adapters and the optimizers' moments are copied, and the next ones run while these are written; steps that begin later
are not counted. `slower` compares the median of the steps during a save, and their slowest one, with the median of the
steps of the other rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from script import (
    add_backbone,
    add_machine,
    add_output,
    command_line,
    environment,
    measured_on,
    publish,
    table,
)

TASKS = 8
WARM_UP_STEPS = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and publish."""
    parser = command_line(__doc__)
    add_backbone(parser)
    parser.add_argument("--sequences", type=int, default=4, help="of each task's step")
    parser.add_argument("--tokens", type=int, default=32, help="of each sequence")
    parser.add_argument("--steps", type=int, default=4, help="of a round")
    parser.add_argument("--rounds", type=int, default=8, help="of each kind")
    parser.add_argument("--rate", default="50MB", help="bytes to write a second, or none")
    add_machine(parser, device=False)
    add_output(parser)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as directory:
        result = measure(arguments, Path(directory))
    publish(result, markdown(result), arguments.output)
    return 0


def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Train, with saves and without."""
    import torch
    from engine_bench import ALL_LINEAR, backbone_of, spec_of

    from megatron_mux.backbone.model import Backbone
    from megatron_mux.engine import Engine, Task
    from megatron_mux.memory.sizes import parse_size
    from megatron_mux.runtime import initialize
    from megatron_mux.training.garbage import freeze_objects
    from megatron_mux.training.saving import Saver
    from tests.reference.records import Records

    torch.set_num_threads(arguments.threads)
    path, parallel = backbone_of(arguments), initialize(device="cpu")
    backbone = Backbone.load(path, parallel)
    engine = Engine(backbone, parallel)
    generator = torch.Generator().manual_seed(0)
    labelled = torch.arange(arguments.tokens) >= arguments.tokens // 2
    for i in range(TASKS):
        size = (16 * arguments.sequences, arguments.tokens)
        tokens = torch.randint(0, backbone.shape.vocab, size, generator=generator)
        records = Records([(row, labelled) for row in tokens]).as_dataset()
        spec = spec_of(f"task-{i}", ALL_LINEAR, arguments.sequences, arguments.tokens)
        engine.register_tasks([Task(spec, records)])
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
    size_of_save = sum(file.stat().st_size for file in (directory / "save").rglob("*.safetensors"))
    return {
        **environment(path.name, "float32", arguments.threads),
        "tokens": TASKS * arguments.sequences * arguments.tokens,
        "rate": arguments.rate,
        "megabytes": round(size_of_save / 1e6, 1),
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


def markdown(result: dict[str, Any]) -> str:
    """The table."""
    slower = result["slower"]
    row = (
        f"{result['seconds']:.2f} s",
        f"{result['megabytes']:.0f} MB",
        f"{slower['median']:+.1%}",
        f"{slower['worst']:+.1%}",
        f"{result['slowest without a save']:+.1%}",
    )
    what = (
        f"{TASKS} LoRA tasks (r=8, all linear modules), {result['tokens']} tokens a step, saves written at "
        f"{result['rate']} a second at most; differences are from the median step without a save."
    )
    headings = "step | save | median step during a save | slowest step during a save | slowest without"
    return "\n".join([measured_on(result), what, "", *table(headings, [row])])


if __name__ == "__main__":
    sys.exit(main())
