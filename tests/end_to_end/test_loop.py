"""Real runs of the loop: tasks join within a step and leave, mistakes stop nobody, STOP ends it; all are evaluated."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.end_to_end.forked import Server
from tests.end_to_end.workplace import TASKS, Workplace, furnish

pytestmark = pytest.mark.versions

ROOT = Path(__file__).resolve().parents[2]

# Runs `pretrain_mux.py` and, between steps, does what a person at the directory would do at that moment: task files
# appear at one, and at another `joins.yaml` leaves and STOP is there.
DRIVER = """
import gc, pathlib, shutil, sys
from megatron_mux.data.background import BackgroundTokenising
from megatron_mux.engine import Engine
import pretrain_mux

gc.unfreeze()  # objects that the process this one was forked from had frozen
watched, staged = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
real, steps = Engine.steps, 0
poll = BackgroundTokenising.poll

def wait(self):
    # Makes the step before which a task joins a certain one.
    self._process.wait()
    return poll(self)

def step(self, *arguments, **more):
    global steps
    steps += 1
    print("step", steps, "tasks", ",".join(sorted(self.active)), "frozen", gc.get_freeze_count())
    if steps == 2:
        for file in staged.glob("*.yaml"):
            shutil.copy(file, watched)
    if steps == 5:
        (watched / "joins.yaml").unlink(missing_ok=True)
        (watched / "STOP").touch()
    return real(self, *arguments, **more)

Engine.steps, BackgroundTokenising.poll = step, wait
sys.exit(pretrain_mux.main(sys.argv[3:]))
"""


def python(server: Server, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Python at the repository's root, in a process of its own."""
    return subprocess.run(
        [server.python, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def _run(server: Server, workplace: Workplace) -> subprocess.CompletedProcess[str]:
    watched, staged = workplace.root / "watched", workplace.root / "staged"
    watched.mkdir()
    staged.mkdir()
    for name in ("joins", "wrong"):
        task = {**TASKS["diff"], "name": f"{name}-task"}
        task["data"] = {**task["data"], "path": str(workplace.root / "texts.jsonl")}
        if name == "wrong":
            task["adapter"] = {**task["adapter"], "target_modules": ["no_such_module"]}
        (staged / f"{name}.yaml").write_text(json.dumps({"tasks": [task]}))
    tasks = workplace.write_tasks("one.yaml", {"lora": TASKS["lora"]})
    # Bursts of one step each: else a task joins after those that are under way.
    flags: list[str | Path] = ["--no-mux-rolling", "--mux-watch", watched, "--save", workplace.root / "run"]
    arguments = workplace.arguments(*flags, tasks=tasks)
    return python(server, "-c", DRIVER, watched, staged, *arguments)


def test_tasks_join_and_leave_a_running_run(tmp_path: Path, server: Server) -> None:
    workplace = furnish(tmp_path)
    run = _run(server, workplace)
    assert run.returncode == 0, run.stderr
    lines = [line.split() for line in run.stdout.splitlines() if line.startswith("step ")]
    together = [int(words[1]) for words in lines if words[3] == "joins-task,lora"]
    frozen = [int(words[5]) for words in lines]
    assert frozen[0] == 0 and min(frozen[1:]) > 1000, (
        "from the second step on, collections leave out old objects"
    )
    assert together == [4, 5], "it joins for the step after its data were tokenised, and leaves likewise"
    assert "wrong.yaml refused" in run.stdout and "no_such_module" in run.stdout
    assert "Traceback" not in run.stderr
    left = workplace.root / "run" / "joins-task" / "checkpoint-2" / "adapter_model.safetensors"
    assert left.is_file(), "what it had learned is kept when it leaves"
    final = sorted((workplace.root / "run" / "manifests").iterdir())[-1]
    statuses = {task["name"]: task["status"] for task in json.loads(final.read_text())["tasks"]}
    assert statuses == {"lora": "finished", "joins-task": "removed"}
    metrics = (workplace.root / "run" / "lora" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in metrics if '"loss"' in line] == list(range(1, 15))


def test_tasks_that_end_together_are_all_evaluated(tmp_path: Path, server: Server) -> None:
    workplace = furnish(tmp_path)
    same = {
        name: {**TASKS["lora"], "training": {**TASKS["lora"]["training"], "max_steps": 3}} for name in "abc"
    }
    tasks = workplace.write_tasks("same.yaml", same)
    run = python(
        server, "pretrain_mux.py", *workplace.arguments("--save", workplace.root / "run", tasks=tasks)
    )
    assert run.returncode == 0, run.stderr
    for name in same:
        lines = (workplace.root / "run" / name / "metrics.jsonl").read_text().splitlines()
        evaluated = [json.loads(line)["step"] for line in lines if "eval_loss" in line]
        assert evaluated == [0, 3], f"{name} was evaluated after steps {evaluated}"


DIVERGING = """
import math, pathlib, sys, time
from megatron_mux import checkpoint
from megatron_mux.engine.bucket_finalizer import BucketFinalizer
from megatron_mux.report import Reporter
import pretrain_mux

real, steps = BucketFinalizer.norm, 0
save, say = checkpoint.save, Reporter.say

def slowly(*args, **named):
    time.sleep(0.3)
    return save(*args, **named)

def say_what_is_there(self, text, **style):
    assert " kept" not in text or pathlib.Path(text.rpartition(": ")[2]).is_dir(), text
    say(self, text, **style)

checkpoint.save, Reporter.say = slowly, say_what_is_there

def norm(self, action, losses, *rest):
    global steps
    if "lora" in self.burst.bucket(action.bucket).tasks:
        steps += 1
        if steps > 4:
            losses[list(self.burst.tasks).index("lora")] = 60.0 if steps < 10 else math.nan
    return real(self, action, losses, *rest)

BucketFinalizer.norm = norm
sys.exit(pretrain_mux.main(sys.argv[1:]))
"""


def test_of_a_task_that_diverges_the_last_good_checkpoint_is_kept(tmp_path: Path, server: Server) -> None:
    """Its loss explodes at step 5, it is saved at 6 and 8 all the same, and the loss is not a number at step 10.

    The loss of step 5 is that of checkpoint-4, of step 3 that of checkpoint-2: the latter is the last good one.
    """
    workplace = furnish(tmp_path)
    directory = workplace.root / "run"
    tasks = workplace.write_tasks("two.yaml", {name: TASKS[name] for name in ("lora", "diff")})
    flags: list[str | Path] = ["--save", directory, "--save-interval", "2", "--mux-keep-checkpoints", "1"]
    run = python(server, "-c", DIVERGING, *workplace.arguments(*flags, tasks=tasks))
    assert run.returncode == 0, run.stderr
    assert "lora stopped: its loss was nan at step 10" in run.stdout
    kept = directory / "lora" / "checkpoint-2"
    assert f"its last good adapter is kept: {kept}" in run.stdout
    assert [path.name for path in (directory / "lora").glob("checkpoint-*")] == [kept.name]
    assert (kept / "adapter_model.safetensors").is_file()
    (final,) = (directory / "manifests").iterdir()
    left = {task["name"]: task for task in json.loads(final.read_text())["tasks"]}
    assert (left["lora"]["status"], left["lora"]["step"]) == ("failed", 2)
    assert left["lora"]["checkpoint"] == left["lora"]["good"] == "lora/checkpoint-2"
    assert (left["diff"]["status"], left["diff"]["step"]) == ("finished", 12)
    # No step came after its last one to tell what that left.
    assert (left["diff"]["checkpoint"], left["diff"]["good"]) == ("diff/checkpoint-12", "diff/checkpoint-10")
    saved = sorted(path.name for path in (directory / "diff").glob("checkpoint-*"))
    assert saved == ["checkpoint-10", "checkpoint-12"]


def test_a_checkpoint_that_holds_an_exploded_adapter_is_not_called_good(
    tmp_path: Path, server: Server
) -> None:
    """An ordinary loss and gradient, and a learning rate with which that very step ruins the adapter."""
    workplace = furnish(tmp_path)
    directory = workplace.root / "run"
    task = {key: value for key, value in TASKS["lora"].items() if key != "eval"}
    training = {**task["training"], "learning_rate": 1e37, "lr_scheduler_type": "constant", "max_steps": 6}
    adapter = {**task["adapter"], "lora_alpha": 1e6}
    task = {**task, "adapter": adapter, "training": {**training, "warmup_steps": 0}}
    tasks = workplace.write_tasks("one.yaml", {"lora": task})
    run = python(
        server,
        "pretrain_mux.py",
        *workplace.arguments("--save", directory, "--save-interval", "1", tasks=tasks),
    )
    assert run.returncode == 0, run.stderr
    kept = directory / "lora" / "checkpoint-1"
    weights = load_file(kept / "adapter_model.safetensors")
    assert max(float(tensor.abs().max()) for tensor in weights.values()) > 1e20, "the step was not ruinous"
    assert "at step 2" in run.stdout, run.stdout
    assert "good adapter is kept" not in run.stdout
    said = "its adapter before the failing step is kept (no earlier save is known to be good)"
    assert f"lora: {said}: {kept}" in run.stdout
    for path in (directory / "manifests").iterdir():
        (saved,) = json.loads(path.read_text())["tasks"]
        assert (saved["checkpoint"], saved["good"]) == ("lora/checkpoint-1", "")
