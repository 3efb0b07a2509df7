"""A user's directory: a tiny backbone with a tokenizer, data files, a task file."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import tiny_models

WORDS = 90
TASKS: dict[str, dict[str, Any]] = {
    "lora": {
        "adapter": {
            "peft_type": "LORA",
            "r": 4,
            "lora_alpha": 8,
            "lora_dropout": 0.2,
            "target_modules": ["q_proj", "v_proj"],
        },
        "data": {"path": "pairs.jsonl", "max_length": 24},
        "training": {
            "per_device_train_batch_size": 4,
            "learning_rate": 0.003,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 2,
            "max_steps": 14,
            "seed": 1,
        },
        "eval": {"path": "held-out.jsonl", "eval_steps": 5},
    },
    "diff": {
        "adapter": {"peft_type": "DIFF_PRUNING", "sparsity": 0.8, "target_modules": ["o_proj"]},
        "data": {"path": "texts.jsonl", "max_length": 16},
        "training": {
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 0.002,
            "max_steps": 12,
            "seed": 2,
        },
    },
    "prefix": {
        "adapter": {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 3},
        "data": {"path": "pairs.jsonl", "max_length": 24, "shuffle": False},
        "training": {
            "per_device_train_batch_size": 3,
            "optim": "sgd",
            "learning_rate": 0.1,
            "lr_scheduler_type": "constant",
            "max_steps": 7,
            "seed": 3,
        },
    },
}


@dataclass(frozen=True)
class Workplace:
    """Where a user keeps things.

    Attributes:
        root: Everything lies below it.
    """

    root: Path

    @property
    def backbone(self) -> Path:
        """A Llama directory with tokenizer."""
        return self.root / "backbone"

    @property
    def tasks(self) -> Path:
        """The task file."""
        return self.root / "tasks.yaml"

    def arguments(
        self, *more: str | Path, tasks: Path | None = None, backbone: Path | None = None
    ) -> list[str]:
        """Command line of `pretrain_mux.py`."""
        usual = [
            "--backbone",
            backbone or self.backbone,
            "--mux-tasks",
            tasks or self.tasks,
            "--mux-no-progress",
        ]
        return [str(part) for part in [*usual, *more]]

    def write_tasks(self, name: str, tasks: Mapping[str, Mapping[str, Any]]) -> Path:
        """Another task file."""
        path = self.root / name
        # JSON is YAML.
        path.write_text(
            json.dumps({"tasks": [{"name": key, **value} for key, value in tasks.items()]}, indent=1)
        )
        return path

    def write_records(self, name: str, records: Sequence[Mapping[str, Any] | str]) -> Path:
        """Another data file; texts are written as they are, broken as they may be."""
        path = self.root / name
        path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
        return path


def furnish(root: Path, model: str = "llama") -> Workplace:
    """Make a workplace in `root` with the tiny model of that name."""
    workplace = Workplace(root)
    made = tiny_models.make(root, model)
    made.rename(workplace.backbone)
    write_tokenizer(workplace.backbone)
    chosen = random.Random(5)

    def words(least: int, most: int) -> str:
        return " ".join(f"w{chosen.randrange(WORDS)}" for _ in range(chosen.randint(least, most)))

    pairs = [{"prompt": words(1, 12), "completion": words(1, 5)} for _ in range(22)]
    workplace.write_records("pairs.jsonl", pairs)
    workplace.write_records("texts.jsonl", [{"text": words(2, 20)} for _ in range(9)])
    held_out = [{"prompt": words(1, 12), "completion": chosen.choice(["w1 w2", "w3"])} for _ in range(6)]
    workplace.write_records("held-out.jsonl", held_out)
    workplace.write_tasks("tasks.yaml", TASKS)
    return workplace


def write_tokenizer(directory: Path) -> None:
    """A tokenizer of whole words: `w0` to `w89`, and what a model needs besides."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(WORDS))]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    fast.save_pretrained(directory)
