"""Files of the package in which a line runs in a steady step, in the order in which they are entered.

    python benchmarks/step_files.py                       # Python 3.12, half a minute
    python benchmarks/step_files.py --package OLD/megatron_mux   # of another checkout, with its own tests/
    python benchmarks/step_files.py --lines               # and how many lines of each ran

Two LoRA tasks train on a tiny Llama in one process. Counted is a burst, the steps that the engine takes in one call,
and what the training loop does until the next such call: the first burst with the files of the one before it, so what
is done now and then is left out.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from script import add_output, command_line, publish, table

ROOT = Path(__file__).resolve().parents[1]
STEPS = 60


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--package", type=Path, default=ROOT / "megatron_mux", help="of a checkout (this one)"
    )
    parser.add_argument("--lines", action="store_true", help="how many lines of each file ran, too")
    add_output(parser)
    return parser.parse_args(argv)


class Monitor:
    """Counts lines of a package's files, step by step; `sys.monitoring` sees all threads.

    Args:
        package: Its directory.

    Attributes:
        steps: The files of each step with the lines that ran, in the order of their first one.
    """

    def __init__(self, package: Path) -> None:
        self._package = f"{package.resolve()}{os.sep}"
        self.steps: list[Counter[str]] = []
        self._seen: set[tuple[str, int]] = set()
        tool, events = sys.monitoring.PROFILER_ID, sys.monitoring.events
        sys.monitoring.use_tool_id(tool, "step files")
        sys.monitoring.register_callback(tool, events.LINE, self._line)
        sys.monitoring.set_events(tool, events.LINE)

    def begin(self) -> None:
        """A step begins."""
        self.steps.append(Counter())
        self._seen = set()

    def _line(self, code: Any, line: int) -> Any:
        if not code.co_filename.startswith(self._package):
            return sys.monitoring.DISABLE
        if self.steps and (code.co_filename, line) not in self._seen:
            self._seen.add((code.co_filename, line))
            self.steps[-1][code.co_filename.removeprefix(self._package)] += 1
        return None


def watched(directory: Path, package: Path) -> list[Counter[str]]:
    """The files of each step of a run of two tasks."""
    sys.path.insert(0, str(package.resolve().parent))
    from tests import tiny_models

    backbone = tiny_models.words(tiny_models.make(directory / "backbone", "llama"))
    data = directory / "data.jsonl"
    data.write_text('{"text": "a b c d"}\n' * 16)
    tasks = [
        {
            "name": f"task-{number}",
            "adapter": {"peft_type": "LORA", "r": 4, "lora_dropout": 0.1, "target_modules": "all-linear"},
            "data": {"path": str(data), "max_length": 16},
            "training": {"per_device_train_batch_size": 2, "max_steps": STEPS, "learning_rate": 1e-3},
        }
        for number in range(2)
    ]
    api, engine = (importlib.import_module(f"megatron_mux.{name}") for name in ("api", "engine"))
    monitor, run = Monitor(package), engine.Engine.steps

    def steps(*arguments: Any, **more: Any) -> Any:
        monitor.begin()
        return run(*arguments, **more)

    engine.Engine.steps = steps
    api.train(backbone=backbone, tasks=tasks, save=directory / "out")
    return monitor.steps


def main(argv: Sequence[str] | None = None) -> int:
    """Run, count and publish."""
    arguments = parse(argv)
    if sys.version_info < (3, 12):
        print("step_files.py: sys.monitoring came with Python 3.12: run it with that", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as directory:
        steps = watched(Path(directory), arguments.package)
    pairs = zip(steps, steps[1:], strict=False)
    steady = next((own for before, own in pairs if before.keys() == own.keys()), None)
    if steady is None:
        print("step_files.py: no two steps had the same files", file=sys.stderr)
        return 1
    columns = "file | lines" if arguments.lines else "file"
    rows = [(name, lines)[: 1 + arguments.lines] for name, lines in steady.items()]
    text = "\n".join(
        [
            f"{len(steady)} files, {steady.total()} lines in a steady burst of steps.",
            "",
            *table(columns, rows),
        ]
    )
    publish({"files": dict(steady), "count": len(steady)}, text, arguments.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
