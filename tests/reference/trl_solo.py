"""A preference task trained alone with TRL's trainer of its loss, and nothing of ours."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from .peft_solo import export, load_model, wrap

_OURS = ("loss", "seed")


@dataclass
class TrlResult:
    """What a trainer found.

    Attributes:
        losses: Of each step.
        logs: What the trainer logged at each step.
        tensors: The adapter at the end, by saved key.
        evaluation: What the trainer says of all records at the end, as one batch.
    """

    losses: list[float] = field(default_factory=list)
    logs: list[dict[str, float]] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    evaluation: dict[str, float] = field(default_factory=dict)


def train_trl(
    path: Path,
    adapter: Mapping[str, Any],
    training: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    initial: Mapping[str, Tensor],
    max_length: int,
    directory: Path,
) -> TrlResult:
    """Train from `initial` on the records in their order.

    Args:
        path: Hugging Face directory with a tokenizer.
        adapter, training: Sections of a task; `training` in spellings that are TRL's too.
        records: With TRL's columns.
        initial: The adapter to start from, which is the reference, too.
        max_length: Tokens a sequence is cut to.
        directory: Where the trainer may write.
    """
    from datasets import Dataset
    from transformers import AutoTokenizer

    config, trainer_of = _classes(str(training["loss"]))
    result = TrlResult()

    class Recording(trainer_of):  # type: ignore[misc, valid-type]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            if self.model.training:
                result.losses.append(float(loss))
            return loss

        def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            super().log(logs, *args, **kwargs)
            if "loss" in logs:
                result.logs.append(dict(logs))

    arguments = config(
        output_dir=str(directory),
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        per_device_eval_batch_size=len(records),
        disable_tqdm=True,
        max_length=max_length,
        train_sampling_strategy="sequential",
        dataloader_pin_memory=False,
        **{key: value for key, value in training.items() if key not in _OURS},
    )
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = wrap(load_model(path), adapter, initial)
        model.train()
        data = Dataset.from_list([dict(record) for record in records])
        trainer = Recording(
            model=model,
            args=arguments,
            train_dataset=data,
            eval_dataset=data,
            processing_class=tokenizer,
        )
        trainer.train()
        result.evaluation = trainer.evaluate()
    logging.disable(logging.NOTSET)
    result.tensors = export(trainer.model)
    return result


def _classes(loss: str) -> tuple[type[Any], type[Any]]:
    if loss == "orpo":
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        return ORPOConfig, ORPOTrainer
    if loss == "kto":
        from trl.trainer.kto_config import KTOConfig
        from trl.trainer.kto_trainer import KTOTrainer

        return KTOConfig, KTOTrainer
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

    return DPOConfig, DPOTrainer
