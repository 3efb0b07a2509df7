"""Flags for optimizers that Megatron-LM does not have, by the parser of `transformers.TrainingArguments`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import HfArgumentParser, TrainingArguments

from megatron_mux.choice.flags import TRAINER, trainer_flags
from megatron_mux.choice.ranking import rank
from megatron_mux.fusion.device import device_of
from megatron_mux.memory.forms.method import ParallelConfig, methods
from megatron_mux.memory.forms.recipe import Precision, Recipe
from megatron_mux.memory.optimizers import OPTIMIZERS
from megatron_mux.memory.sizes import GIB
from tests.unit.memory.architectures import llama
from tests.unit.memory.profiles import by_hand

OTHERS = [name for name, one in OPTIMIZERS.items() if one.megatron is None]


def parsed(words: list[str], directory: Path) -> Any:
    """The arguments as transformers has them; here without a GPU."""
    usual = ["--output_dir", str(directory), "--use_cpu", "--report_to", "none"]
    parser = HfArgumentParser(TrainingArguments)  # type: ignore[arg-type]
    (found,) = parser.parse_args_into_dataclasses([*usual, *words])
    return found


@pytest.mark.filterwarnings("ignore::FutureWarning")  # older names, which all versions have
@pytest.mark.parametrize(
    ("precision", "master"), [("bf16", True), ("bf16", False), ("fp16", True), ("fp32", True)]
)
@pytest.mark.parametrize("optimizer", OTHERS)
def test_printed_flags_are_taken(optimizer: str, precision: Precision, master: bool, tmp_path: Path) -> None:
    recipe = Recipe(128, precision, optimizer, master)
    for method in methods(4, llama(8), recipe):
        for parts in (1, 5):
            run = ParallelConfig(4, zero=method.zero, recompute=method.recompute, parts=parts)
            found = parsed(trainer_flags(run, recipe, 3), tmp_path)
            assert found.optim == optimizer
            assert (found.per_device_train_batch_size, found.gradient_accumulation_steps) == (3, parts)
            assert found.bf16 == (precision == "bf16" and master) and found.fp16 == (precision == "fp16")
            assert bool(found.gradient_checkpointing) == (method.recompute == "full")
            assert bool(found.fsdp) == (method.zero > 0)
            if method.zero:
                # Weights are given back after a forward pass, or kept for the backward pass.
                assert found.fsdp_config["reshard_after_forward"] == (method.zero == 3)
                more = found.accelerator_config.gradient_accumulation_kwargs or {}
                assert more.get("sync_each_batch", False) == (parts > 1), "else whole gradients are kept"


@pytest.mark.parametrize("optimizer", ["adafactor", "sgd", "adamw_torch"])
def test_flags_say_whose_they_are(optimizer: str) -> None:
    recipe, model = Recipe(128, optimizer=optimizer), llama(8)
    found = rank(model, recipe, 2, 80 * GIB, device_of("cuda", "A100", 0), profiles=by_hand(model)).entries
    for entry in found:
        assert entry.command.program == (TRAINER if optimizer == "adafactor" else "Megatron-LM")
        assert ("--optim" in entry.command.flags) == (optimizer == "adafactor") and entry.command.flags
