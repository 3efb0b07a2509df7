"""Preference tasks over a tiny backbone, and what they learn from."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_mux.data.dataset import DataFiles
from megatron_mux.data.tokenizer import load_tokenizer
from megatron_mux.engine import Engine, StepResult, Task
from megatron_mux.tasks import TaskSpec
from tests.end_to_end.workplace import Workplace

LENGTH = 14  # some records are cut
RECORDS = 24
LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "o_proj"]}
TRAINING = {"per_device_train_batch_size": 4, "learning_rate": 5e-3, "lr_scheduler_type": "constant"}


def write_preferences(place: Workplace) -> dict[str, list[dict[str, Any]]]:
    """Write `pairs-of.jsonl` and `judged.jsonl`; the records by loss."""
    chosen = random.Random(3)

    def words(least: int, most: int) -> str:
        return " ".join(f"w{chosen.randrange(90)}" for _ in range(chosen.randint(least, most)))

    pairs = [
        {"prompt": words(2, 9), "chosen": f" {words(1, 7)}", "rejected": f" {words(1, 7)}"}
        for _ in range(RECORDS)
    ]
    judged = [
        {"prompt": words(2, 9), "completion": f" {words(1, 7)}", "label": chosen.random() < 0.5}
        for _ in range(RECORDS)
    ]
    place.write_records("pairs-of.jsonl", pairs)
    place.write_records("judged.jsonl", judged)
    return {"dpo": pairs, "orpo": pairs, "kto": judged}


def section(place: Workplace, loss: str, steps: int, **more: Any) -> dict[str, Any]:
    """A task of the task file, without its name."""
    path = str(place.root / ("judged.jsonl" if loss == "kto" else "pairs-of.jsonl"))
    return {
        "adapter": LORA,
        "data": {"path": path, "max_length": LENGTH, "shuffle": False},
        "training": {"loss": loss, "max_steps": steps, **TRAINING, **more},
        "eval": {"path": path},
    }


@dataclass
class Preferences:
    """Makes preference tasks of a workplace's files."""

    place: Workplace

    def __post_init__(self) -> None:
        self._files = DataFiles(load_tokenizer(self.place.backbone), print, self.place.root / "cache")

    def task(
        self, name: str, loss: str, steps: int, initial: Mapping[str, Tensor] | None = None, **more: Any
    ) -> Task:
        """A task for the engine."""
        spec = TaskSpec.model_validate({"name": name, **section(self.place, loss, steps, **more)})
        data = self._files.open(spec.data.sources, LENGTH, loss=loss)
        given = None if initial is None else {key: value.clone() for key, value in initial.items()}
        return Task(spec, data, data, given)


def steps_of(engine: Engine, count: int) -> dict[str, list[StepResult]]:
    """Results of each task, step by step."""
    found: dict[str, list[StepResult]] = {name: [] for name in engine.tasks}
    for _ in range(count):
        for name, result in engine.step().items():
            found[name].append(result)
    return found


def losses(results: Sequence[StepResult]) -> list[float]:
    """Of each step."""
    return [result.loss for result in results]


def furnished(root: Path) -> tuple[Workplace, dict[str, list[dict[str, Any]]]]:
    """A workplace with preference files."""
    from tests.end_to_end.workplace import furnish

    place = furnish(root)
    return place, write_preferences(place)
