"""The frozen runs: what each trains, with flags that fix its plan, and how a commit makes them all."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from frozen.checkouts import environment_of, free_port

SPATIAL = ("--mux-policy", "spatial", "--mux-micro-batches", "2")

_RUN_ALL = """\
import json, os, sys
from pretrain_mux import main
for port, words in json.loads(sys.argv[1]):  # one import for all runs
    os.environ["MASTER_PORT"] = str(port)
    print("run:", " ".join(words), file=sys.stderr, flush=True)
    if main(words):
        sys.exit(1)
"""


@dataclass(frozen=True)
class Run:
    """A run of `pretrain_mux.py`.

    Attributes:
        backbone, tasks: Names of inputs.
        flags: They fix the plan.
        ranks: Processes.
        resumed: Whether the run ends after three steps and another one goes on.
    """

    backbone: str
    tasks: str
    flags: tuple[str, ...]
    ranks: int = 1
    resumed: bool = False

    def commands(self, inputs: Path, save: Path) -> list[list[str]]:
        """Command lines, to be run one after the other."""
        usual = [
            "--backbone", str(inputs / self.backbone), "--mux-tasks", str(inputs / f"{self.tasks}.yaml"),
            "--save", str(save), "--save-interval", "2", "--mux-no-progress", *self.flags,
        ]  # fmt: skip
        if not self.resumed:
            return [usual]
        return [[*usual, "--exit-interval", "3"], [*usual, "--load", str(save)]]


RUNS: Mapping[str, Run] = {
    "spatial": Run("llama", "llama", ("--mux-policy", "spatial", "--mux-micro-batches", "1")),
    "micro-batches": Run("llama", "llama", ("--mux-policy", "spatial", "--mux-micro-batches", "3")),
    "chunks": Run("llama", "llama", ("--mux-policy", "temporal", "--mux-chunk-size", "8")),
    "recomputed": Run("llama", "llama", ("--mux-policy", "temporal", "--recompute-granularity", "full")),
    "serial-padded": Run("llama", "llama", ("--mux-policy", "serial", "--mux-align", "max-length")),
    "gpt2": Run("gpt2", "gpt2", SPATIAL),
    "bf16": Run("llama", "llama", (*SPATIAL, "--bf16")),
    "more-kinds": Run("llama", "more", SPATIAL),
    "experts": Run("experts", "experts", SPATIAL),
    "nf4": Run("wide", "quantised", (*SPATIAL, "--mux-backbone-dtype", "nf4")),
    "preferences": Run("llama", "preferences", SPATIAL),
    "resumed": Run("llama", "llama", SPATIAL, resumed=True),
    "tensor": Run("llama", "llama", (*SPATIAL, "--tensor-model-parallel-size", "2"), 2),
    "sequence": Run(
        "llama", "more", (*SPATIAL, "--tensor-model-parallel-size", "2", "--sequence-parallel"), 2
    ),
    "stages": Run("llama", "llama", (*SPATIAL, "--pipeline-model-parallel-size", "2"), 2),
    "stages-resumed": Run(
        "llama", "more", (*SPATIAL, "--pipeline-model-parallel-size", "2"), 2, resumed=True
    ),
    "data": Run("llama", "llama", SPATIAL, 2),
    "sharded": Run("llama", "llama", (*SPATIAL, "--mux-backbone-weights", "sharded"), 2),
    "expert-ranks": Run("experts", "experts", (*SPATIAL, "--expert-model-parallel-size", "2"), 2),
}


def train(code: Path, inputs: Path, results: Path, names: Sequence[str]) -> str:
    """Make runs with the code in `code`; returns the end of the output if one fails, else an empty string."""
    for ranks in sorted({RUNS[name].ranks for name in names}):
        commands = [
            words
            for name in names
            if RUNS[name].ranks == ranks
            for words in RUNS[name].commands(inputs, results / name)
        ]
        listed = json.dumps([(free_port(), words) for words in commands])
        with open(results / f"output-{ranks}.log", "w+") as output:
            world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost"} if ranks > 1 else {}
            processes = [
                subprocess.Popen(
                    [sys.executable, "-c", _RUN_ALL, listed],
                    cwd=code,
                    env={**environment_of(code, results), **world, **_place(rank, ranks)},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
                for rank in range(ranks)
            ]
            statuses = [process.wait() for process in processes]
            output.seek(0)
            if any(statuses):
                return output.read()[-6000:]
    return ""


def _place(rank: int, ranks: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}


def train_split(code: Path, inputs: Path, results: Path) -> str:
    """Train a task through a split server of the same code; returns the end of the output if that fails."""
    call = [sys.executable, "-m"]
    tls, save = results / "tls", results / "split"
    usual = {"cwd": code, "env": environment_of(code, results), "text": True}
    made = subprocess.run(
        [*call, "megatron_mux.split.certificates", str(tls), "--server", "localhost", "--client", "alice"],
        check=False, capture_output=True, **usual,
    )  # fmt: skip
    if made.returncode:
        return str(made.stderr)[-2000:]
    server = subprocess.Popen(
        [
            *call, "megatron_mux.split.server", "--backbone", str(inputs / "llama"), "--listen", "localhost:0",
            "--tls-dir", str(tls), "--log-format", "json", "--save", str(results / "server"), "--no-co-batching",
        ],
        stderr=subprocess.PIPE, **usual,
    )  # fmt: skip
    try:
        assert server.stderr is not None
        lines = []
        for line in server.stderr:
            lines.append(line)
            if line.startswith("{") and (said := json.loads(line))["event"] == "serving":
                port = said["listen"].rpartition(":")[2]
                break
        else:
            return "".join(lines)[-2000:]
        client = subprocess.run(
            [
                *call, "megatron_mux.split.client", "--backbone", str(inputs / "llama"), "--tasks",
                str(inputs / "split.yaml"), "--task", "private", "--server", f"localhost:{port}",
                "--tls-dir", str(tls), "--client", "alice", "--cut-front", "1", "--cut-back", "1", "--save", str(save),
                "--no-progress",
            ],
            check=False, capture_output=True, timeout=300, **usual,
        )  # fmt: skip
        return "" if client.returncode == 0 else f"{client.stdout}{client.stderr}"[-4000:]
    finally:
        server.kill()
        server.wait()
