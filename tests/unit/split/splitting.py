"""Tasks, tiny backbones and engines that the tests of the split client share."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

from megatron_mux.backbone.registry import read_backbone_info
from megatron_mux.runtime import Parallel
from megatron_mux.split.client.backbone import SplitBackbone, load_ends
from megatron_mux.split.client.engine import SplitEngine
from megatron_mux.split.client.link import ServerConnection
from megatron_mux.split.client.remote import Privacy, RemoteBody
from megatron_mux.split.client.trainer import SplitTrainer
from megatron_mux.split.protocol.agreement import Proposal, WireDtype
from megatron_mux.tasks import TaskSpec
from tests.end_to_end.harness import Case, random_records
from tests.unit.split.fake_server import FakeServer

ALONE = Parallel.alone("cpu")
TRAINING = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 4,
    "learning_rate": 1e-2,
    "max_grad_norm": 0.5,
    "weight_decay": 0.1,
}
"""The last step of a pass over seven records has three sequences in two micro-batches."""


def case(adapter: dict[str, Any], **training: Any) -> Case:
    """A task of seven records."""
    return Case("one", adapter, {**TRAINING, **training}, random_records(7, 96, 4, 12, seed=0))


def proposal(spec: TaskSpec, fingerprint: str, cuts: tuple[int, int], wire: WireDtype) -> Proposal:
    """What a client of such a task asks for."""
    return Proposal(
        task=spec.name,
        fingerprint=fingerprint,
        cut_front=cuts[0],
        cut_back=cuts[1],
        wire=wire,
        adapter=spec.plain()["adapter"],
        training=spec.training,
        total_steps=spec.total_steps(7),
        train_rows=48,
        rows=84,
        sequences=7,
        longest=12,
        run="0" * 16,
        incarnation="0" * 16,
    )


def split_engine(
    server: FakeServer,
    spec: TaskSpec,
    cuts: tuple[int, int],
    wire: WireDtype = "f64",
    privacy: Privacy | None = None,
) -> SplitEngine:
    """An engine whose body is on a server; its link is `engine.backbone.remote.link`."""
    info = read_backbone_info(server.path)
    front, back = load_ends(info, ALONE, *cuts, server.dtype)
    link = ServerConnection(server.connect(), proposal(spec, info.fingerprint, cuts, wire), info.shape)
    link.join()
    layers = link.proposal.body(info.shape)
    trained = any(module.layer in layers for module in spec.adapter.modules(info.shape))
    remote = RemoteBody(link, trained, ALONE.device, privacy)
    return SplitEngine(SplitBackbone(front, back, remote))


def write_data(directory: Path) -> None:
    """`train.jsonl` of 12 records and `eval.jsonl` of 6 with two completions; words of `workplace.write_tokenizer`."""
    chosen = random.Random(0)

    def words(least: int, most: int) -> str:
        return " ".join(f"w{chosen.randrange(90)}" for _ in range(chosen.randint(least, most)))

    pairs = [{"prompt": words(1, 12), "completion": words(1, 5)} for _ in range(12)]
    choices = [{"prompt": words(1, 12), "completion": chosen.choice(["w1 w2", "w3"])} for _ in range(6)]
    for name, records in (("train.jsonl", pairs), ("eval.jsonl", choices)):
        (directory / name).write_text("\n".join(map(json.dumps, records)))


def task_of(directory: Path, name: str = "one", **adapter: Any) -> dict[str, Any]:
    """A task of `write_data`'s files."""
    return {
        "name": name,
        "adapter": {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj", "v_proj"], **adapter},
        "data": {"path": str(directory / "train.jsonl"), "max_length": 32},
        "training": {**TRAINING, "max_steps": 6},
        "eval": {"path": str(directory / "eval.jsonl"), "eval_steps": 3},
    }


def trainer(server: FakeServer, task: dict[str, Any], save: Path | None, **options: Any) -> SplitTrainer:
    """A trainer in fp64 that saves every second step."""
    fixed: dict[str, Any] = {"wire": "f64", "dtype": torch.float64, "progress": False, "save_interval": 2}
    return SplitTrainer(
        server.path, task, "server:1", None, save=save, connect=server.connect, **{**fixed, **options}
    )
