"""A task that joins with a large file: the others train while it is tokenised, and it does as soon as that is done."""

from __future__ import annotations

import json
from pathlib import Path

from tests.end_to_end.forked import Server
from tests.end_to_end.test_loop import python
from tests.end_to_end.workplace import TASKS, Workplace, furnish


def test_the_benchmark_of_a_joining_file(server: Server, workplace: Workplace) -> None:
    flags = ["--backbone", str(workplace.backbone), "--records", "3000", "--batch", "2"]
    run = python(server, "benchmarks/joining.py", *flags, "--json")
    assert run.returncode == 0, run.stderr + run.stdout
    found = json.loads(run.stdout)
    assert found["steps"]["at work"] > 3, "the others do not wait"
    assert found["first_step_after_s"] > 0 and found["tokenised_s"] > 0
    # In steps, not in seconds: the machine may be busy. A burst takes two seconds, or one step.
    assert found["bursts_after_exit"] <= 1, "it joins before the next burst but one"


# Two runs of `pretrain_mux.py`. In the first, tokenising never ends: the task file is taken out and put back, and a
# signal comes; a file named STOP is there. The second continues it, and its tokenising is waited for.
DRIVER = """
import os, pathlib, shutil, signal, sys
from megatron_mux.data.background import BackgroundTokenising
from megatron_mux.engine import Engine
import pretrain_mux

watched, joins = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
real, begin, poll, steps = Engine.steps, BackgroundTokenising.__init__, BackgroundTokenising.poll, 0
first = sys.argv[3] == "first"

def begin_and_halt(self, *arguments):
    begin(self, *arguments)
    os.kill(self._process.pid, signal.SIGSTOP)  # long before it has imported what it needs
    print("child", self._process.pid)

def wait(self):
    self._process.wait()
    return poll(self)

def step(self, *arguments, **more):
    global steps
    steps += 1
    if first and steps in (2, 6):
        shutil.copy(joins, watched / "joins.yaml")
        (watched / "STOP").touch()
    if first and steps == 4:
        (watched / "joins.yaml").unlink()
    if first and steps == 8:
        os.kill(os.getpid(), signal.SIGTERM)
    return real(self, *arguments, **more)

Engine.steps = step
if first:
    BackgroundTokenising.__init__ = begin_and_halt
else:
    BackgroundTokenising.poll = wait
sys.exit(pretrain_mux.main(sys.argv[4:]))
"""


def test_a_run_that_ends_while_data_are_tokenised_is_continued(server: Server, tmp_path: Path) -> None:
    workplace = furnish(tmp_path)
    watched, joins = tmp_path / "watched", tmp_path / "joins.yaml"
    watched.mkdir()
    # Not in the cache of tokens, whatever other tests have read.
    workplace.write_records("texts.jsonl", [{"text": f"w1 w2 {tmp_path.name} w{i}"} for i in range(9)])
    task = {
        **TASKS["diff"],
        "name": "joins",
        "data": {"path": str(tmp_path / "texts.jsonl"), "max_length": 16},
    }
    joins.write_text(json.dumps({"tasks": [task]}))
    tasks = workplace.write_tasks("one.yaml", {"lora": TASKS["lora"]})
    flags = ["--no-mux-rolling", "--mux-watch", str(watched), "--save", str(tmp_path / "run")]

    def run(which: str, *more: str) -> str:
        words: list[str | Path] = [watched, joins, which, *workplace.arguments(*flags, *more, tasks=tasks)]
        ran = python(server, "-c", DRIVER, *words)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    said = run("first")
    assert "joins.yaml left before its data were tokenised" in said and "stopped by a signal" in said
    children = {int(line.split()[1]) for line in said.splitlines() if line.startswith("child ")}
    assert len(children) == 2 and not any(Path(f"/proc/{child}").exists() for child in children)
    said = run("second", "--load", str(tmp_path / "run"))
    assert "joins joined from joins.yaml" in said
    final = sorted((tmp_path / "run" / "manifests").iterdir())[-1]
    left = {task["name"]: (task["status"], task["step"]) for task in json.loads(final.read_text())["tasks"]}
    assert left == {"lora": ("finished", 14), "joins": ("finished", 12)}, (
        "STOP waits for who was there before"
    )
