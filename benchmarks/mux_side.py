"""megatron-mux's side of `vs_peft.py` and `gpu_table.py`, and the ceiling of its speed: the frozen backbone alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from workload import LEARNING_RATE, Pair, TaskShape

from megatron_mux.backbone.model import Backbone
from megatron_mux.batch.pack import PackedSequence, pack
from megatron_mux.batch.packed_batch import PackedBatch, activate
from megatron_mux.data.dataset import TaskDataset
from megatron_mux.data.sampler import Sampler
from megatron_mux.engine import Engine, Planning, Task
from megatron_mux.runtime import Parallel
from megatron_mux.tasks import TaskSpec


def spec(
    shape: TaskShape,
    targets: Sequence[str],
    steps: int,
    seed: int,
    dropout: float = 0.0,
    parameters: Sequence[str] = (),
) -> TaskSpec:
    """Make the task's spec, as an entry of tasks.yaml would define it.

    Args:
        shape: Its batches and rank.
        targets: Names of the modules that get an adapter.
        steps: Length of its learning rate schedule.
        seed: Of its order of records.
        dropout: LoRA dropout.
        parameters: Names of fused experts' parameters that get an adapter, too.
    """
    experts = {"target_parameters": list(parameters)} if parameters else {}
    return TaskSpec.model_validate(
        {
            "name": shape.name,
            "adapter": {
                "peft_type": "LORA",
                "r": shape.rank,
                "lora_alpha": 2 * shape.rank,
                "lora_dropout": dropout,
                "target_modules": list(targets),
                **experts,
            },
            "data": {"path": shape.records or "made-up", "max_length": shape.max_length},
            "training": {
                "per_device_train_batch_size": shape.batch,
                "learning_rate": LEARNING_RATE,
                "lr_scheduler_type": "cosine",
                "max_grad_norm": 1.0,
                "max_steps": steps,
                "seed": seed,
            },
        }
    )


def examples(task: TaskSpec, records: TaskDataset, steps: int) -> list[list[Pair]]:
    """Return the records of each step in the order in which the engine samples them, for the other side."""
    sampler = Sampler(len(records), task.sequences_per_step, task.training.seed, task.data.shuffle)
    chosen: list[list[Pair]] = []
    for step in range(steps):
        found = [records[i] for i in sampler.batch(step)]
        chosen.append([(torch.as_tensor(e.tokens).long(), torch.as_tensor(e.labelled).bool()) for e in found])
    return chosen


def make_engine(
    backbone: Backbone,
    parallel: Parallel,
    specs: Sequence[TaskSpec],
    records: Sequence[TaskDataset],
    initial: Sequence[dict[str, Tensor] | None],
    planning: Planning | None = None,
) -> Engine:
    """Make an engine with these tasks, by default all in one hybrid task."""
    engine = Engine(backbone, parallel, planning)
    engine.register_tasks([Task(s, r, initial=i) for s, r, i in zip(specs, records, initial, strict=True)])
    return engine


class Ceiling:
    """The forward pass and input gradients of the frozen backbone, without adapters or optimizer.

    Args:
        backbone: A backbone without adapters.
    """

    def __init__(self, backbone: Backbone) -> None:
        self.backbone = backbone

    def batch(self, pairs_of_tasks: Sequence[Sequence[Pair]]) -> PackedBatch:
        """Pack the sequences of all tasks as the engine packs them."""
        sequences = [
            PackedSequence("backbone", i, tokens, labelled, 1.0)
            for i, (tokens, labelled) in enumerate(pair for pairs in pairs_of_tasks for pair in pairs)
        ]
        return pack(sequences, ("backbone",), {"backbone": 0}).to(self.backbone.device)

    def step(self, batch: PackedBatch) -> Tensor:
        """Run one pass; returns the mean loss, on the device."""
        with activate(batch):
            # It requires a gradient, so that gradients flow through the lowest layer, as with an adapter on it.
            hidden = self.backbone.embed(batch).detach().requires_grad_()
            loss, _ = self.backbone.loss(self.backbone.forward(batch, hidden, labelled_only=True), batch)
            loss.backward()
        return loss.detach() / batch.labels.shape[0]
