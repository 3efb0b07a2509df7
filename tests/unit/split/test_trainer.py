"""A client saves, is continued, and goes back with its server: nothing is lost, and nothing is done twice."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_mux import checkpoint
from megatron_mux.backbone.model import Backbone
from megatron_mux.backbone.registry import read_backbone_info
from megatron_mux.data.dataset import DataFiles
from megatron_mux.data.tokenizer import load_tokenizer
from megatron_mux.engine import Engine
from megatron_mux.errors import UserError
from megatron_mux.split.protocol.messages import Message, WithPrevious
from megatron_mux.split.protocol.wire import Kind, RefusedError
from megatron_mux.tasks import TaskSpec
from megatron_mux.training.task_setup import open_tasks
from tests.end_to_end.harness import adapter, assert_close
from tests.unit.split.fake_server import FakeServer
from tests.unit.split.running_server import RunningServer, running_server
from tests.unit.split.splitting import ALONE, task_of, trainer
from tests.unit.split.toy_server import Files


def adapter_of(save: Path, step: int = 6, name: str = "one") -> Mapping[str, Tensor]:
    from safetensors.torch import load_file

    loaded: Mapping[str, Tensor] = load_file(save / name / f"checkpoint-{step}" / "adapter_model.safetensors")
    return loaded


def metrics_of(save: Path, name: str = "one") -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (save / name / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "wall_s"} for line in lines]


def tells(message: Message) -> bool:
    """Whether a request tells what became of the step before."""
    return isinstance(message.fields, WithPrevious) and message.fields.previous is not None


@pytest.fixture(scope="module")
def undisturbed(
    whole_backbone: Path, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, FakeServer]:
    """Where a run has saved, and its server."""
    save, server = tmp_path_factory.mktemp("undisturbed"), FakeServer(whole_backbone)
    history = trainer(server, task_of(data), save).train()
    assert (history.status, history.step) == ("finished", 6)
    return save, server


def same(save: Path, other: Path) -> None:
    found, wanted = adapter_of(save), adapter_of(other)
    assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert metrics_of(save) == metrics_of(other)


def test_a_run_leaves_the_whole_adapter_and_its_own_files(
    undisturbed: tuple[Path, FakeServer], whole_backbone: Path, data: Path
) -> None:
    save, server = undisturbed
    assert {file.name for file in save.iterdir()} == {"one"}
    assert {file.name for file in (save / "one").iterdir()} >= {"manifests", "plan.json", "schedule.svg"}
    spec = trainer(server, task_of(data), None).task
    assert len(adapter_of(save)) == 4 * 2 * 2 and isinstance(spec, dict)
    evaluated = [line["step"] for line in metrics_of(save) if "eval_loss" in line]
    assert evaluated == [0, 3, 6] and len(metrics_of(save)) == 9
    assert server.left == [True] and sorted(server.saved) == [2, 4, 6]


def test_without_a_directory_the_server_is_told_that_the_task_is_done(
    whole_backbone: Path, data: Path
) -> None:
    server = FakeServer(whole_backbone)
    trainer(server, task_of(data), None).train()
    assert server.left == [True]


def test_tasks_share_a_directory(
    undisturbed: tuple[Path, FakeServer], whole_backbone: Path, data: Path, tmp_path: Path
) -> None:
    trainer(FakeServer(whole_backbone), task_of(data, "other", r=2), tmp_path).train()
    before = metrics_of(tmp_path, "other")
    trainer(FakeServer(whole_backbone), task_of(data), tmp_path).train()
    same(tmp_path, undisturbed[0])
    assert metrics_of(tmp_path, "other") == before
    with pytest.raises(UserError, match="holds checkpoints of one already"):
        trainer(FakeServer(whole_backbone), task_of(data), tmp_path).train()
    history = trainer(FakeServer(whole_backbone), task_of(data), tmp_path, load=tmp_path).train()
    assert history.status == "finished" and metrics_of(tmp_path, "other") == before


def test_a_directory_is_of_one_client(
    undisturbed: tuple[Path, FakeServer], whole_backbone: Path, data: Path, tmp_path: Path, files: Files
) -> None:
    def train(client: str, save: Path, load: Path | None) -> None:
        one = trainer(FakeServer(whole_backbone), task_of(data), save, load=load)
        one.tls = files.client(client)
        one.train()

    def content() -> dict[Path, bytes]:
        return {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}

    save = tmp_path / "save"
    train("alice", save, None)
    before = content()
    for flag, own, load in (("save", save, None), ("save", save, save), ("load", tmp_path / "new", save)):
        with pytest.raises(
            UserError, match=f"--{flag} {save}: .* is of the client alice, and this client is bob"
        ):
            train("bob", own, load)
    assert content() == before
    train("alice", save, save)


def test_a_run_that_nobody_told_how_often_to_save_can_be_continued(
    whole_backbone: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("megatron_mux.split.client.run._SAVE_INTERVALS", (1, 50))
    task, server = task_of(data), FakeServer(whole_backbone)
    trainer(server, task, tmp_path, save_interval=None).train()
    assert f"saving to {tmp_path} every 1 steps; --load {tmp_path} goes on" in capsys.readouterr().out
    assert sorted(server.saved) == [3, 4, 5, 6]
    assert {file.name for file in (tmp_path / "one").glob("checkpoint-*")} >= {"checkpoint-5", "checkpoint-6"}
    assert not (tmp_path / "one/checkpoint-2").exists()
    task["training"] = {**task["training"], "save_strategy": "no"}
    server = FakeServer(whole_backbone)
    trainer(server, task, tmp_path / "other", save_interval=None).train()
    assert sorted(server.saved) == [6]


def test_a_server_that_dies_loses_no_exactness(
    undisturbed: tuple[Path, FakeServer],
    whole_backbone: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fatal = [(Kind.BACKWARD, 1), (Kind.BACKWARD, 3), (Kind.STATE, 4), (Kind.FORWARD, 5), (Kind.FORWARD, 5)]

    def dies(message: Message) -> bool:
        """At the next of these; the first micro-batch of a step has been computed before each forward pass."""
        later = not tells(message) and message.flags
        if (
            not fatal
            or (message.kind, message.step) != fatal[0]
            or (message.kind is Kind.FORWARD and not later)
        ):
            return False
        del fatal[0]
        return True

    server = FakeServer(whole_backbone, dies=dies)
    trainer(server, task_of(data), tmp_path).train()
    same(tmp_path, undisturbed[0])
    said = capsys.readouterr().out
    assert not fatal and [said.count(f"one: going back to step {step}, since") for step in (0, 2, 4)] == [
        1,
        2,
        2,
    ]


def test_a_restart_between_steps_costs_nothing(
    undisturbed: tuple[Path, FakeServer],
    whole_backbone: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: set[tuple[int, Kind]] = set()

    def dies(message: Message) -> bool:
        """Before each step's first forward pass and before the last save, once each."""
        begins = tells(message) and message.kind in (Kind.FORWARD, Kind.STATE)
        if not begins or (message.step, message.kind) in asked:
            return False
        asked.add((message.step, message.kind))
        server._apply_decision(message)
        server.saved[server.step] = server.body.state("one")  # as a server does that is told to stop
        return True

    server = FakeServer(whole_backbone)
    server.dies = dies
    trainer(server, task_of(data), tmp_path).train()
    same(tmp_path, undisturbed[0])
    assert len(asked) == 6 and "going back" not in capsys.readouterr().out


class Restarting:
    """Lets everything pass, and restarts a server once."""

    def __init__(self, server: RunningServer) -> None:
        self.restart: Callable[[], None] | None = server.restart

    def activations(self, hidden: Tensor, lengths: Sequence[int], step: int, operation: int) -> Tensor:
        return hidden

    def gradients(self, gradient: Tensor, lengths: Sequence[int], step: int, operation: int) -> Tensor:
        if step == 3 and self.restart is not None:
            self.restart()
            self.restart = None
        return gradient


def test_a_real_server_that_is_restarted(
    undisturbed: tuple[Path, FakeServer],
    whole_backbone: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    body = Backbone.load(whole_backbone, ALONE, torch.float64, split=(1, 3, 0), stage=1, ends=False)
    fingerprint = read_backbone_info(whole_backbone).fingerprint
    save, store = tmp_path / "run", tmp_path / "store"
    with running_server(body, ALONE, store, fingerprint=fingerprint) as server:
        one = trainer(undisturbed[1], task_of(data), save)
        one.server, one.connect, one.privacy = server.address, None, Restarting(server)
        one.train()
    same(save, undisturbed[0])
    assert "one: going back to step 2, since" in capsys.readouterr().out
    assert one.totals.requests > 30 and 0 < one.totals.computed_s < one.totals.seconds


def test_an_error_that_ends_a_run_says_what_is_saved(
    whole_backbone: Path, data: Path, tmp_path: Path
) -> None:
    def revokes(message: Message) -> bool:
        if message.step == 5:
            raise RefusedError("revoked", "the certificate was revoked.")
        return False

    said = r"^the certificate was revoked\. Step [1-4] is saved: --load .* goes on from there\.$"
    with pytest.raises(RefusedError, match=said):
        trainer(FakeServer(whole_backbone, dies=revokes), task_of(data), tmp_path).train()


def test_a_server_that_loses_everything_again_and_again_ends_the_run(
    whole_backbone: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_mux.split.client.trainer._MOST_LOSSES", 2)
    server = FakeServer(
        whole_backbone, dies=lambda message: message.kind is Kind.BACKWARD and message.step == 2
    )
    with pytest.raises(UserError, match=r"the server has lost steps 3 times after step 0"):
        trainer(server, task_of(data), None).train()


def test_a_client_is_continued(
    undisturbed: tuple[Path, FakeServer],
    whole_backbone: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class KilledError(Exception):
        """Ends a client at once."""

    def kill(message: Message) -> bool:
        if message.step == 5:
            raise KilledError
        return False

    server = FakeServer(whole_backbone, dies=kill)
    with pytest.raises(KilledError):
        trainer(server, task_of(data), tmp_path).train()
    server.dies = lambda message: False
    with pytest.raises(UserError, match=r"training.learning_rate"):
        changed = task_of(data)
        changed["training"] = {**changed["training"], "learning_rate": 1.0}
        trainer(server, changed, tmp_path, load=tmp_path).train()
    with pytest.raises(UserError, match=r"max_steps: 7, not 6: with a split server a task keeps its number"):
        changed = task_of(data)
        changed["training"] = {**changed["training"], "max_steps": 7}
        trainer(server, changed, tmp_path, load=tmp_path).train()
    saved = dict(server.saved)
    server.saved.clear()
    with pytest.raises(UserError, match="begin anew with another --save"):
        trainer(server, task_of(data), tmp_path, load=tmp_path).train()
    server.saved.update(saved)
    del server.saved[4]  # a save that the client could go on with, and the server has lost
    trainer(server, task_of(data), tmp_path, load=tmp_path).train()
    same(tmp_path, undisturbed[0])
    assert "one: the server has nothing of step 4: going back to step 2" in capsys.readouterr().out


def test_a_body_that_stays_on_the_server(
    undisturbed: tuple[Path, FakeServer],
    whole_backbone: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = FakeServer(whole_backbone, returns_body=False)
    server.dies = lambda message: message.step == 3 and message.kind is Kind.BACKWARD and len(server.saved) == 1 and (
        server.number == 1
    )  # fmt: skip
    trainer(server, task_of(data), tmp_path).train()
    found, wanted = adapter_of(tmp_path), adapter_of(undisturbed[0])
    assert len(found) == 2 * 2 * 2 and all(torch.equal(found[key], wanted[key]) for key in found)
    said = capsys.readouterr().out
    assert (
        "going back to step 2" in said
        and "the body's part of the adapter stays on the server server:1" in said
    )


@pytest.mark.parametrize(
    "kind", [{}, {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 2}], ids=["lora", "prefix"]
)
def test_an_adapter_to_start_from(
    whole_backbone: Path, data: Path, tmp_path: Path, kind: dict[str, Any]
) -> None:
    task = task_of(data)
    task["adapter"] = {**kind} if kind else task["adapter"]
    trainer(FakeServer(whole_backbone), task, tmp_path / "first").train()
    task["adapter"] = {**task["adapter"], "adapter_name_or_path": str(tmp_path / "first/one/checkpoint-6")}
    server = FakeServer(whole_backbone)
    save = tmp_path / "second"
    fatal = iter([False] * 20 + [True])
    server.dies = lambda message: next(fatal, False)
    task["training"] = {**task["training"], "max_steps": 2}
    trainer(server, task, save, save_interval=None).train()
    (upload,) = [message for message in server.messages if message.kind is Kind.UPLOAD][:1]
    sent = sum(piece.tensor.numel() for piece in upload.pieces)
    assert sent * 2 == sum(
        tensor.numel() for tensor in adapter_of(tmp_path / "first").values()
    )  # two layers of four
    wanted = Engine(Backbone.load(whole_backbone, ALONE, torch.float64), ALONE)
    files = DataFiles(load_tokenizer(whole_backbone), print)
    wanted.register_tasks(open_tasks([TaskSpec.model_validate(task)], wanted.backbone.info, files, print))
    for _ in range(2):
        wanted.step()
    tensors = adapter(wanted, "one")
    assert_close(adapter_of(save, 2), tensors, 1e-10, "continued")


def test_a_diverging_task_fails_as_everywhere(whole_backbone: Path, data: Path, tmp_path: Path) -> None:
    task = task_of(data)
    task["training"] = {**task["training"], "learning_rate": 1e300, "max_grad_norm": 0}
    server = FakeServer(whole_backbone)
    history = trainer(server, task, tmp_path).train()
    assert history.status == "failed" and "was" in history.reason
    assert all(torch.isfinite(m.tensor).all() for m in server.messages if m.tensor is not None)
    manifest = checkpoint.load(tmp_path, read_backbone_info(whole_backbone).fingerprint, owner="one")
    assert manifest is not None and manifest.tasks[0].status == "failed"


_COLD = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name == "megatron" or name.startswith("megatron."):
            raise ImportError(f"{name} must not be needed")
sys.meta_path.insert(0, Blocker())
from pathlib import Path
import torch.distributed as dist
from tests.unit.split.fake_server import FakeServer
from tests.unit.split.splitting import task_of, trainer
from megatron_mux.split.client.transport import Transport
backbone, data, save = map(Path, sys.argv[1:])
assert trainer(FakeServer(backbone), task_of(data), save).train().status == "finished"
assert not dist.is_initialized() and "megatron.core" not in sys.modules
"""


def test_a_client_needs_no_megatron_core(
    undisturbed: tuple[Path, FakeServer], whole_backbone: Path, data: Path, tmp_path: Path
) -> None:
    words = [sys.executable, "-c", _COLD, str(whole_backbone), str(data), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    # Not to the bit: tests before this one may have left this process another number of threads.
    assert_close(adapter_of(tmp_path), adapter_of(undisturbed[0]), 1e-10, "without Megatron-Core")
