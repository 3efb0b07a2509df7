"""A server of split fine-tuning and its clients as processes, and tasks for them."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from tests import tiny_models
from tests.end_to_end.forked import ROOT, Server
from tests.end_to_end.workplace import Workplace, furnish, write_tokenizer

SECONDS = 120
STEPS = 8
TRAINING = {"per_device_train_batch_size": 4, "learning_rate": 0.01, "max_steps": STEPS, "seed": 3}
CLIENTS: dict[str, tuple[tuple[int, int], dict[str, Any], str]] = {
    "paper": ((1, 0), {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj", "v_proj"]}, "pairs.jsonl"),
    "wide": ((1, 1), {"peft_type": "LORA", "target_modules": "all-linear", "lora_dropout": 0.1}, "texts.jsonl"),
    "twin": ((1, 1), {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"], "use_dora": True,
                      "rank_pattern": {".*[24].*": 3}, "layers_to_transform": list(range(7))}, "pairs.jsonl"),
    "prefix": ((2, 1), {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 3}, "pairs.jsonl"),
    "bottleneck": ((4, 2), {"peft_type": "BOTTLENECK", "bottleneck_size": 8}, "texts.jsonl"),
}  # fmt: skip


def tasks(names: list[str] | None = None, **training: Any) -> dict[str, dict[str, Any]]:
    found = {}
    for name, (_, adapter, data) in CLIENTS.items():
        if names is None or name in names:
            found[name] = {
                "adapter": adapter,
                "data": {"path": data, "max_length": 24},
                "training": {**TRAINING, **training},
            }
    found.get("paper", {})["eval"] = {"path": "held-out.jsonl", "eval_steps": 4}
    return found


def furnish_split(root: Path, **training: Any) -> Workplace:
    """A workplace whose backbone has eight layers, with certificates of alice and bob, and of mallory by another CA.

    Args:
        root: Where to make it.
        training: Changes to the `training` sections of all tasks.
    """
    made = furnish(root)
    deep = tiny_models.make(root / "deep", "llama", num_hidden_layers=8)
    write_tokenizer(deep)
    made.backbone.rename(root / "shallow")
    deep.rename(made.backbone)
    made.write_tasks("tasks.yaml", tasks(**training))
    for folder, names in (("tls", ["alice", "bob"]), ("other", ["mallory"])):
        words = [folder, "--server", "localhost", "--client", *names]
        command = [sys.executable, "-m", "megatron_mux.split.certificates", *words]
        subprocess.run(command, cwd=root, check=True, env={"PYTHONPATH": str(ROOT)}, capture_output=True)
    return made


class Deployment:
    """Processes of a server and its clients."""

    def __init__(self, place: Workplace, python: str, *flags: str) -> None:
        self.place, self.python, self.flags = place, python, flags
        self.port = 0
        self.running: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start the server, at the same port as before."""
        command = [
            self.python, "-m", "megatron_mux.split.server", "--backbone", str(self.place.backbone), "--listen",
            f"localhost:{self.port}", "--tls-dir", "tls", "--log-format", "json", *self.flags,
        ]  # fmt: skip
        self.running = subprocess.Popen(command, cwd=self.place.root, text=True, stderr=subprocess.PIPE)
        assert self.running.stderr is not None
        for line in self.running.stderr:
            if line.startswith("{") and (said := json.loads(line))["event"] == "serving":
                self.port = int(said["listen"].rpartition(":")[2])
                return
        raise AssertionError("the server did not start")

    def kill(self, number: int = signal.SIGKILL) -> int:
        assert self.running is not None and self.running.stderr is not None
        self.running.send_signal(number)
        self.running.stderr.close()
        return self.running.wait(SECONDS)

    def client(self, task: str, save: Path, *more: str, identity: str = "alice") -> subprocess.Popen[str]:
        (front, back), _, _ = CLIENTS[task]
        folder = "tls" if identity != "mallory" else "other"
        command = [
            self.python, "-m", "megatron_mux.split.client", "--backbone", str(self.place.backbone), "--tasks",
            "tasks.yaml", "--task", task, "--server", f"localhost:{self.port}", "--tls-dir", folder, "--client",
            identity, "--tls-ca", "tls/ca.pem", "--cut-front", str(front), "--cut-back", str(back), "--save",
            str(save), "--no-progress", *more,
        ]  # fmt: skip
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, cwd=self.place.root, text=True, **streams)

    def train(self, names: list[str], save: Path, *more: str) -> None:
        """Train tasks at once."""
        running = {name: self.client(name, save, *more) for name in names}
        for name, process in running.items():
            output, _ = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, f"{name}: {output}"


@contextmanager
def deployed(place: Workplace, server: Server, *flags: str) -> Iterator[Deployment]:
    own = Deployment(place, server.python, *flags)
    own.start()
    try:
        yield own
    finally:
        own.kill()


def train_under_fire(
    own: Deployment, names: list[str], save: Path, kills: int, seed: int, most_seconds: float = 4.0
) -> list[str]:
    """Train tasks at once while the server and clients are killed at random moments, and started again as a user would.

    Args:
        own: A running server.
        names: Of the tasks.
        save: Where the clients save.
        kills: How many.
        seed: Of who is killed and when.
        most_seconds: Between kills.

    Returns:
        Whom each kill hit: `server`, or a task that was not done. There are fewer if all tasks were done before.
    """
    chosen, hit = random.Random(seed), list[str]()
    more = ("--load", str(save), "--save-interval", "2", "--log-interval", "1")
    running = {name: own.client(name, save, *more, identity="bob") for name in names}
    for _ in range(kills):
        time.sleep(chosen.uniform(0.2, most_seconds))
        busy = [name for name in names if running[name].poll() is None]
        if not busy:
            break
        hit.append(victim := chosen.choice(["server", *busy]))
        if victim == "server":
            own.kill()
            own.start()
        else:
            running[victim].kill()
            running[victim].communicate()
            running[victim] = own.client(victim, save, *more, identity="bob")
    for name, process in running.items():
        output, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, f"{name}: {output}"
    return hit


def losses(directory: Path, task: str) -> list[float]:
    lines = map(json.loads, (directory / task / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def adapter(directory: Path, task: str, steps: int = STEPS) -> dict[str, Tensor]:
    return load_file(directory / task / f"checkpoint-{steps}" / "adapter_model.safetensors")
