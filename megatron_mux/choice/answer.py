"""The answer to what a user asks of all methods."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megatron_mux.choice.ranking import Ranking, rank
from megatron_mux.choice.recipes import TaskFile, gpu
from megatron_mux.memory.forms.methods import impossible
from megatron_mux.memory.forms.recipe import Recipe
from megatron_mux.memory.forms.skeleton import read_architecture
from megatron_mux.memory.question import Question
from megatron_mux.memory.step_profile import StepProfiles


@dataclass(frozen=True)
class Choice:
    """A ranking, and what is not in it.

    Attributes:
        ranking: The methods.
        impossible: Methods that the model's sizes exclude, and why.
        device: The GPU that speeds are of.
        file: The tasks that are trained; None: every parameter is.
    """

    ranking: Ranking
    impossible: Mapping[str, str]
    device: str
    file: TaskFile | None = None

    @classmethod
    def of(cls, question: Question, how: Namespace, file: TaskFile | None = None) -> Choice:
        """Rank all methods.

        Args:
            question: The model, the GPUs, the length and the batch.
            how: `precision`, `optimizer`, `master_weights`, `attention`, `device`, as the tool has them.
            file: The tasks that train a frozen backbone; None: every parameter is trained.

        Raises:
            UserError: A name is not as it must be, or the model is not understood.
        """
        device = gpu(how.device)
        architecture = read_architecture(question.skeleton) if file is None else file.architecture
        adapters = file.adapters if file is not None else ()
        recipe = Recipe(
            question.length, how.precision, how.optimizer, how.master_weights, how.attention, adapters
        )
        step = file.step if file is not None else None
        profiles = StepProfiles(question, recipe.autocast) if file is None else None
        ranking = rank(
            architecture,
            recipe,
            question.gpus,
            question.gpu_memory,
            device,
            question.batch,
            step,
            profiles=profiles,
        )
        return cls(ranking, impossible(question.gpus, architecture), device.name, file)

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
            "tasks": [asdict(task) for task in self.file.step.tasks] if self.file else [],
            "methods": [entry.to_json() for entry in self.ranking.entries],
        }
