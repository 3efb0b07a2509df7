"""Hugging Face PEFT as a careful user would run it: one task at a time, padded to the longest sequence of a batch.

It uses what `transformers` and `peft` offer for speed: SDPA attention, no key-value cache, the fused optimizer,
gradients for the adapter only, and the loss of `transformers`. This module does not import megatron_mux.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, get_scheduler

Pair = tuple[Tensor, Tensor]
"""Token ids `[L]`, and a mask `[L]` of the tokens that are labels."""


def load(path: Path, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Load the backbone as users of PEFT do."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="sdpa", local_files_only=True
    )
    model.config.use_cache = False
    model.to(device)
    model.train()
    moved: nn.Module = model
    return moved


def share_weights(model: nn.Module) -> nn.Module:
    """Copy the modules but share their weight tensors, so that several tasks fit in one process."""
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    memo: dict[int, object] = {id(tensor): tensor for tensor in tensors}
    return copy.deepcopy(model, memo)


def collate(pairs: Sequence[Pair], device: torch.device) -> dict[str, Tensor]:
    """Pad a batch on the right to its longest sequence, as `DataCollatorForSeq2Seq` does; other labels are -100."""
    longest = max(len(tokens) for tokens, _ in pairs)
    ids = torch.zeros(len(pairs), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    labels = torch.full_like(ids, -100)
    for row, (tokens, labelled) in enumerate(pairs):
        ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = 1
        labels[row, : len(tokens)] = torch.where(labelled, tokens, -100)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return {key: value.to(device, non_blocking=True) for key, value in batch.items()}


class PeftTask:
    """A task trained by PEFT.

    Args:
        model: The backbone, to which the task's adapter is added in place.
        rank: LoRA rank; alpha is twice the rank.
        targets: Names of the modules that get an adapter.
        learning_rate: Learning rate of AdamW.
        steps: Length of the learning rate schedule.
        initial: Initial adapter tensors, by their key in a checkpoint.
    """

    def __init__(
        self,
        model: nn.Module,
        rank: int,
        targets: list[str],
        learning_rate: float,
        steps: int,
        initial: dict[str, Tensor] | None = None,
    ) -> None:
        config = LoraConfig(
            task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=list(targets)
        )
        self.model = get_peft_model(model, config)
        if initial is not None:
            set_peft_model_state_dict(self.model, initial)
        self.model.train()
        self.device = next(self.model.parameters()).device
        self.trained = [value for value in self.model.parameters() if value.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=learning_rate, weight_decay=0.0, fused=True)
        self.scheduler = get_scheduler("cosine", self.optimizer, num_warmup_steps=0, num_training_steps=steps)

    def tensors(self) -> dict[str, Tensor]:
        """Return the adapter's tensors, by their key in a checkpoint."""
        return {
            key: value.detach().cpu().clone() for key, value in get_peft_model_state_dict(self.model).items()
        }

    def step(self, pairs: Sequence[Pair]) -> float:
        """Take one optimizer step; returns the loss."""
        labels = sum(int(labelled[1:].sum()) for _, labelled in pairs)
        output = self.model(**collate(pairs, self.device), num_items_in_batch=labels)
        output.loss.backward()
        nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(output.loss.detach())
