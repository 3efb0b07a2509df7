"""Real clients and a real server: results are those of a run on one machine, whoever is killed meanwhile."""

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

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tests import tiny_models
from tests.end_to_end.forked import ROOT, Server
from tests.end_to_end.harness import assert_close, assert_same
from tests.end_to_end.workplace import Workplace, furnish, write_tokenizer

SECONDS = 120
STEPS = 8
TRAINING = {"per_device_train_batch_size": 4, "learning_rate": 0.01, "max_steps": STEPS, "seed": 3}
CLIENTS: dict[str, tuple[tuple[int, int], dict[str, Any], str]] = {
    "paper": ((1, 0), {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj", "v_proj"]}, "pairs.jsonl"),
    "wide": ((1, 1), {"peft_type": "LORA", "target_modules": "all-linear", "lora_dropout": 0.1}, "texts.jsonl"),
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


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A workplace whose backbone has eight layers, and certificates of alice and bob."""
    root = tmp_path_factory.mktemp("split")
    made = furnish(root)
    deep = tiny_models.make(root / "deep", "llama", num_hidden_layers=8)
    write_tokenizer(deep)
    made.backbone.rename(root / "shallow")
    deep.rename(made.backbone)
    made.write_tasks("tasks.yaml", tasks())
    for folder, names in (("tls", ["alice", "bob"]), ("other", ["mallory"])):
        words = [folder, "--server", "localhost", "--client", *names]
        command = [sys.executable, "-m", "megatron_mux.split.certificates", *words]
        subprocess.run(command, cwd=root, check=True, env={"PYTHONPATH": str(ROOT)}, capture_output=True)
    return made


@pytest.fixture(scope="module")
def local(place: Workplace, server: Server) -> Path:
    """The same tasks on one machine."""
    run = server.run(place.arguments("--mux-policy", "spatial", "--save", place.root / "local"))
    assert run.status == 0, run.errors
    return place.root / "local"


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
            f"localhost:{self.port}", "--tls-cert", "tls/server.pem", "--tls-key", "tls/server.key", "--client-ca",
            "tls/ca.pem", "--log-format", "json", *self.flags,
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
            "tasks.yaml", "--task", task, "--server", f"localhost:{self.port}", "--tls-ca", "tls/ca.pem",
            "--tls-cert", f"{folder}/{identity}.pem", "--tls-key", f"{folder}/{identity}.key", "--cut-front",
            str(front), "--cut-back", str(back), "--save", str(save), "--no-progress", *more,
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


def losses(directory: Path, task: str) -> list[float]:
    lines = map(json.loads, (directory / task / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def adapter(directory: Path, task: str) -> dict[str, Tensor]:
    return load_file(directory / task / f"checkpoint-{STEPS}" / "adapter_model.safetensors")


def test_clients_learn_what_a_run_on_one_machine_learns(
    place: Workplace, server: Server, local: Path
) -> None:
    with deployed(place, server, "--save", "server-1") as own:
        own.train(list(CLIENTS), place.root / "clients")
        assert own.kill(signal.SIGTERM) == 0
    for name in CLIENTS:
        assert losses(place.root / "clients", name) == pytest.approx(losses(local, name), rel=1e-4)
        assert_close(adapter(place.root / "clients", name), adapter(local, name), 2e-3, name)
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(place.backbone)
    PeftModel.from_pretrained(model, str(place.root / f"clients/wide/checkpoint-{STEPS}"))
    kept = sorted(path.parent.name for path in (place.root / "server-1/alice").glob("*/final-1.safetensors"))
    assert kept == sorted(CLIENTS)


def test_half_precision_on_the_wire_changes_little(place: Workplace, server: Server, local: Path) -> None:
    with deployed(place, server, "--save", "server-2", "--no-co-batching") as own:
        own.train(["paper"], place.root / "bf16", "--wire", "bf16")
    assert losses(place.root / "bf16", "paper")[-1] == pytest.approx(losses(local, "paper")[-1], rel=0.01)


def test_noise_is_told_and_its_secret_stays_with_the_client(place: Workplace, server: Server) -> None:
    noise = (
        "--clip-activations",
        "30",
        "--clip-gradients",
        "1",
        "--noise-multiplier",
        "0.1",
        "--delta",
        "1e-3",
    )
    with deployed(place, server, "--save", "server-5", "--no-co-batching") as own:
        process = own.client("paper", place.root / "noisy", *noise)
        output, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == 0 and "epsilon" in output, output
        secret = place.root / "noisy/paper/noise.secret"
        assert secret.stat().st_size == 32 and secret.stat().st_mode & 0o077 == 0


def test_kills_leave_no_trace(place: Workplace, server: Server) -> None:
    """Server and client are killed at random moments; the adapter comes out the same to the bit."""
    chosen, save = random.Random(1), place.root / "killed"
    more = ("--save-interval", "2", "--log-interval", "1")
    with deployed(place, server, "--save", "server-3", "--no-co-batching") as own:
        own.train(["wide"], place.root / "undisturbed", *more)
        process = own.client("wide", save, *more, identity="bob")
        for turn in range(6):
            time.sleep(chosen.uniform(0.3, 1.5))
            if turn % 2:
                own.kill()
                own.start()
            else:
                process.kill()
                process.wait()
                again = () if not (save / "wide").exists() else ("--load", str(save))
                process = own.client("wide", save, *more, *again, identity="bob")
        output, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, output
    assert losses(save, "wide") == losses(place.root / "undisturbed", "wide")
    assert_same(adapter(save, "wide"), adapter(place.root / "undisturbed", "wide"), "wide")


@pytest.mark.parametrize(
    ("more", "identity", "said"),
    [
        ((), "mallory", "certificate"),
        (("--cut-front", "0"), "alice", "--cut-front 0"),
        (("--cut-front", "5", "--cut-back", "3"), "alice", "leave no layer"),
        (("--task", "nobody"), "alice", "--task nobody"),
        (("--tls-ca", "other/ca.pem"), "alice", "certificate"),
        (("--backbone", "shallow"), "alice", "backbone"),
        (("--clip-activations", "1", "--delta", "1e-5"), "alice", "--clip-gradients"),
    ],
)
def test_mistakes_are_told_in_a_line(
    place: Workplace, server: Server, refusing: Deployment, more: tuple[str, ...], identity: str, said: str
) -> None:
    process = refusing.client("paper", place.root / "refused", *more, identity=identity)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 2, output
    assert said in output and "Traceback" not in output
    assert not (place.root / "refused" / "paper" / "metrics.jsonl").exists()


@pytest.fixture(scope="module")
def refusing(place: Workplace, server: Server) -> Iterator[Deployment]:
    with deployed(place, server, "--save", "server-4", "--no-co-batching") as own:
        yield own
