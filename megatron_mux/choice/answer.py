"""The answer to what a user asks of all methods."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_mux.choice.ranking import Ranking, rank
from megatron_mux.choice.recipes import gpu, task_adapters
from megatron_mux.memory.estimators import Question
from megatron_mux.memory.forms.architecture import Architecture
from megatron_mux.memory.forms.methods import Recipe, impossible


@dataclass(frozen=True)
class Choice:
    """A ranking, and what is not in it.

    Attributes:
        ranking: The methods.
        impossible: Methods that the model's sizes exclude, and why.
        device: The GPU that speeds are of.
    """

    ranking: Ranking
    impossible: Mapping[str, str]
    device: str

    @classmethod
    def of(cls, question: Question, how: Namespace) -> Choice:
        """Rank all methods.

        Args:
            question: The model, the GPUs, the length and the batch.
            how: `tasks`, `precision`, `optimizer`, `master_weights`, `attention`, `device`, as the tool has them.

        Raises:
            UserError: A name or a file is not as it must be, or the model is not understood.
        """
        device = gpu(how.device)
        architecture = Architecture.of(question.skeleton)
        adapters = task_adapters(question.skeleton.path, how.tasks) if how.tasks is not None else ()
        recipe = Recipe(
            question.length, how.precision, how.optimizer, how.master_weights, how.attention, adapters
        )
        ranking = rank(architecture, recipe, question.gpus, question.gpu_memory, device, question.batch)
        return cls(ranking, impossible(question.gpus, architecture), device.name)

    def to_json(self) -> dict[str, Any]:
        """As programs read it."""
        best = self.ranking.chosen
        return {
            "selected": self.ranking.selected,
            "selected_kind": best.method.details if best else None,
            "batch_size": best.batch if best else 0,
            "flags": list(best.flags) if best else [],
            "device": self.device,
            "impossible": dict(self.impossible),
            "methods": [entry.to_json() for entry in self.ranking.entries],
        }
