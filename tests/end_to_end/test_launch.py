"""The launch scripts as users start them: a tiny backbone, two processes on CPUs, stand-ins for Slurm's commands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.forked import Server
from tests.end_to_end.ranks import free_port
from tests.end_to_end.workplace import TASKS, Workplace

pytestmark = pytest.mark.versions

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "examples" / "launch"
LONG = 3000  # steps: such a run is told to stop long before

# What Slurm's commands do as far as the job relies on it. Every "node" is this machine; LOG gets each command line.
STAND_INS = {
    "scontrol": """
        [ "$1 $2" != "show hostnames" ] || printf '127.0.0.1\\n%.0s' $(seq "$SLURM_JOB_NUM_NODES")
    """,
    # Its own TERM kills the tasks, as srun's does.
    "srun": """
        while [[ "$1" == --* ]]; do shift; done
        for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do
            SLURM_NODEID=$node "$@" &
            tasks+=($!)
        done
        echo "${tasks[@]}" > "$TASK_IDS"
        trap 'kill -KILL "${tasks[@]}"' TERM
        status=0
        for task in "${tasks[@]}"; do wait "$task" || status=$?; done
        exit "$status"
    """,
    "scancel": """
        [ "$*" = "--signal=TERM $SLURM_JOB_ID" ] || exit 1
        kill -TERM $(cat "$TASK_IDS")
    """,
}


def environment_of(
    server: Server, workplace: Workplace, save: Path, tasks: Path, **more: str | int
) -> dict[str, str]:
    """What a user sets, and CPUs only, one thread each."""
    own = {
        "BACKBONE": workplace.backbone,
        "TASKS": tasks,
        "SAVE": save,
        "PYTHON_BIN": server.python,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        **more,
    }
    return {**os.environ, **{name: str(value) for name, value in own.items()}}


def start(script: str, environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a script away from the repository, as it may be; `log` gets what it prints."""
    command = ["bash", str(LAUNCH / script), "--mux-policy", "spatial", "--mux-no-progress"]
    with open(log, "w") as output:
        return subprocess.Popen(command, cwd=log.parent, env=environment, stdout=output, stderr=output)


def lora(steps: int) -> dict[str, dict[str, Any]]:
    """One task, not evaluated."""
    task = {key: value for key, value in TASKS["lora"].items() if key != "eval"}
    return {"lora": {**task, "training": {**task["training"], "max_steps": steps}}}


def steps_of(save: Path) -> list[int]:
    """The steps that metrics tell of, in their order."""
    path = save / "lora" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("\n")]


def newest_save(save: Path) -> tuple[int, int]:
    """Its number, and the step of the task in it."""
    manifest = json.loads(max((save / "manifests").iterdir()).read_text())
    (task,) = manifest["tasks"]
    assert (save / task["checkpoint"] / "adapter_model.safetensors").is_file()
    return manifest["number"], task["step"]


def test_one_node_trains_and_started_again_finds_everything_done(
    workplace: Workplace, server: Server
) -> None:
    save, log = workplace.root / "one-node", workplace.root / "one-node.log"
    tasks = workplace.write_tasks("two-steps.yaml", lora(2))
    environment = environment_of(server, workplace, save, tasks, GPUS_PER_NODE=2, PP=2)
    assert start("single_node.sh", environment, log).wait(timeout=120) == 0, log.read_text()
    assert "no checkpoint there yet, starting anew" in log.read_text()
    assert (newest_save(save)[1], steps_of(save)) == (2, [1, 2])
    assert start("single_node.sh", environment, log).wait(timeout=120) == 0, log.read_text()
    assert "lora is finished already in the run that is continued" in log.read_text()
    assert steps_of(save) == [1, 2]


def test_two_nodes_train_together(workplace: Workplace, server: Server) -> None:
    save = workplace.root / "two-nodes"
    tasks = workplace.write_tasks("two-steps.yaml", lora(2))
    shared = environment_of(
        server,
        workplace,
        save,
        tasks,
        GPUS_PER_NODE=1,
        PP=2,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=free_port(),
    )
    logs = [workplace.root / f"node-{rank}.log" for rank in (0, 1)]
    nodes = [start("two_nodes.sh", {**shared, "NODE_RANK": str(rank)}, log) for rank, log in enumerate(logs)]
    statuses = [node.wait(timeout=120) for node in nodes]
    assert statuses == [0, 0], "".join(log.read_text() for log in logs)
    assert (newest_save(save)[1], steps_of(save)) == (2, [1, 2])


def slurm_environment(server: Server, workplace: Workplace, save: Path) -> dict[str, str]:
    """What a job of two nodes finds: Slurm's variables, and commands that only look like Slurm's."""
    commands, log = workplace.root / "bin", workplace.root / "slurm-commands.log"
    commands.mkdir()
    for name, body in STAND_INS.items():
        script = f'#!/usr/bin/env bash\necho "{name} $*" >> "{log}"\n{body}'
        (commands / name).write_text(script)
        (commands / name).chmod(0o755)
    slurm: dict[str, str | int] = {
        "SLURM_JOB_ID": 4711,
        "SLURM_JOB_NUM_NODES": 2,
        "SLURM_JOB_NODELIST": "node-[1-2]",
        "SLURM_CPUS_PER_TASK": 1,
        "SLURM_GPUS_ON_NODE": 1,
        "SLURM_SUBMIT_DIR": str(ROOT),
        "MASTER_PORT": free_port(),
        "TASK_IDS": str(workplace.root / "task-ids"),
        "PATH": f"{commands}:{os.environ['PATH']}",
    }
    return environment_of(server, workplace, save, workplace.write_tasks("long.yaml", lora(LONG)), **slurm)


def signalled(
    number: signal.Signals, moment: Callable[[], bool], environment: Mapping[str, str], log: Path
) -> int:
    """Status of a job whose script gets a signal at a moment of its run."""
    job = start("slurm.sbatch", environment, log)
    try:
        limit = time.monotonic() + 120
        while not moment():
            assert job.poll() is None and time.monotonic() < limit, log.read_text()
            time.sleep(0.02)
        job.send_signal(number)
        return job.wait(timeout=60)
    finally:
        job.kill()  # of no effect on one that has ended


def test_a_slurm_job_out_of_time_saves_and_is_queued_again_and_one_cancelled_only_saves(
    workplace: Workplace,
    server: Server,
) -> None:
    save, log = workplace.root / "slurm", workplace.root / "slurm.log"
    environment = slurm_environment(server, workplace, save)
    commands = workplace.root / "slurm-commands.log"

    status = signalled(signal.SIGUSR1, lambda: len(steps_of(save)) >= 5, environment, log)
    assert status == 0, log.read_text()
    said = commands.read_text().splitlines()
    assert said[0] == "scontrol show hostnames node-[1-2]" and said[1].startswith("srun ")
    assert said[2:] == ["scancel --signal=TERM 4711", "scontrol requeue 4711"]
    number, reached = newest_save(save)
    assert number == 1 and reached >= 5
    assert steps_of(save) == list(range(1, reached + 1))

    commands.unlink()
    status = signalled(signal.SIGTERM, lambda: len(steps_of(save)) >= reached + 5, environment, log)
    assert status != 0, "Slurm would take the job for done"
    assert f"continuing from {save} (save 1)" in log.read_text()
    assert commands.read_text().splitlines()[2:] == ["scancel --signal=TERM 4711"], "nobody wants it back"
    number, later = newest_save(save)
    assert number == 2 and later >= reached + 5
    assert steps_of(save) == list(range(1, later + 1)), "each step once, none left out"
