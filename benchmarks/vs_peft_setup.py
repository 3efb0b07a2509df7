"""Backbone, records and task specs of `vs_peft.py`, the same in each of its processes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import mux_side
import peft_side
import torch
from torch import Tensor
from workload import LEARNING_RATE, Pair, TaskShape, mix_of, random_records

from megatron_mux.backbone.model import Backbone
from megatron_mux.data.dataset import TaskDataset
from megatron_mux.data.tokenizer import load_tokenizer
from megatron_mux.runtime import Parallel, initialize
from megatron_mux.tasks import TaskSpec
from tests.reference.records import Records


class Setup:
    """Backbone, records and task specs of one measurement.

    Args:
        arguments: The script's flags.
        steps: Length of each task's learning rate schedule.
    """

    def __init__(self, arguments: argparse.Namespace, steps: int) -> None:
        torch.set_num_threads(arguments.threads)
        self.arguments = arguments
        self.device = torch.device(arguments.device)
        self.dtype = getattr(torch, arguments.dtype)
        self.steps = steps
        self.mix = mix_of(arguments.backbone_shape, arguments.device, arguments.sequences)
        self.specs = [mux_side.spec(shape, arguments.targets, steps, i) for i, shape in enumerate(self.mix)]
        self.records = [self._records(i, shape) for i, shape in enumerate(self.mix)]

    def _records(self, i: int, shape: TaskShape) -> TaskDataset:
        if self.arguments.data is not None and shape.records:
            tokenizer = load_tokenizer(self.arguments.backbone)
            return TaskDataset(self.arguments.data / shape.records, tokenizer, shape.max_length)
        vocab = _vocabulary(self.arguments.backbone)
        return Records(random_records(shape, shape.batch * self.steps, vocab, seed=i)).as_dataset()

    def parallel(self) -> Parallel:
        """Initialize a world of this process alone."""
        return initialize(device=self.device)

    def backbone(self, parallel: Parallel) -> Backbone:
        """Load the backbone into megatron-mux."""
        return Backbone.load(self.arguments.backbone, parallel, self.dtype)

    def examples(self, i: int) -> list[list[Pair]]:
        """Return the records of task `i` for each step."""
        return mux_side.examples(self.specs[i], self.records[i], self.steps)

    def zero_padded(self, members: Sequence[int]) -> tuple[list[TaskSpec], list[TaskDataset]]:
        """Return specs and records of the same steps, all sequences padded to the longest one of their step."""
        specs = [self.specs[i] for i in members]
        return mux_side.zero_padded(specs, [self.examples(i) for i in members])

    def peft_task(
        self, model: torch.nn.Module, i: int, rival: str, initial: dict[str, Tensor] | None = None
    ) -> peft_side.PeftTask:
        """Set up task `i` to be trained by PEFT."""
        targets, rank = self.arguments.targets, self.mix[i].rank
        head = self.arguments.head
        return peft_side.PeftTask(model, rank, targets, LEARNING_RATE, self.steps, initial, rival, head)

    def synchronize(self) -> None:
        """Wait until the GPU, if there is one, has finished."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _vocabulary(backbone: Path) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(backbone, local_files_only=True).vocab_size)
