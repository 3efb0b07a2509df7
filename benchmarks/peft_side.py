"""Hugging Face PEFT as careful users run it, one task at a time: the rivals of `vs_peft.py`.

`padded`: a batch is padded to its longest sequence. `packed`: its sequences lie end to end in one row, with position
ids that restart and no attention mask, as in `DataCollatorWithFlattening` and TRL's `padding_free`; `transformers` then
lets no sequence see another (on a GPU by variable-length attention). On a GPU both use Liger's kernels where they are
importable, its fused linear cross entropy among them.

Both use what `transformers` and `peft` offer for speed: SDPA attention, no key-value cache, the fused optimizer,
gradients for the adapter only, and the loss of `transformers`. This module does not import megatron_mux.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, get_scheduler
from transformers.integrations.liger import apply_liger_kernel
from transformers.utils import is_liger_kernel_available

Pair = tuple[Tensor, Tensor]
"""Token ids `[L]`, and a mask `[L]` of the tokens that are labels."""

RIVALS = ("padded", "packed")


def load(path: Path, dtype: torch.dtype, device: torch.device, rival: str = "padded") -> nn.Module:
    """Load the backbone as users of PEFT do."""
    varies = rival == "packed" and device.type == "cuda" and dtype != torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=dtype,
        attn_implementation=_variable_length_attention() if varies else "sdpa",
        local_files_only=True,
    )
    model.config.use_cache = False
    model.to(device)
    model.train()
    moved: nn.Module = model
    return moved


def uses_liger(device: torch.device) -> bool:
    """Whether the rivals use Liger's kernels: on a GPU where they are importable."""
    return device.type == "cuda" and bool(is_liger_kernel_available())


def _variable_length_attention() -> str:
    """The implementation for packed sequences on a GPU: flash-attn where installed, else torch's own."""
    if importlib.util.find_spec("flash_attn") is not None:
        return "flash_attention_2"
    AttentionInterface.register("varlen", _varlen)
    return "varlen"


def _varlen(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **options: Any
) -> tuple[Tensor, None]:
    """torch's variable-length attention of `[1, h, T, D]` on `[1, g, T, D]`, as `transformers` calls it."""
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    bounds, longest = options["cu_seq_lens_q"], options["max_length_q"]
    more = {"scale": options["scaling"], "window_size": (-1, 0), "enable_gqa": True}
    out = varlen_attn(query, key, value, bounds, bounds, longest, longest, **more)
    return out.unsqueeze(0), None


def share_weights(model: nn.Module) -> nn.Module:
    """Copy the modules but share their weight tensors, so that several tasks fit in one process."""
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    memo: dict[int, object] = {id(tensor): tensor for tensor in tensors}
    return copy.deepcopy(model, memo)


def pad(pairs: Sequence[Pair], device: torch.device) -> dict[str, Any]:
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


def flatten(pairs: Sequence[Pair], device: torch.device) -> dict[str, Any]:
    """Lay a batch end to end in one row, as `DataCollatorWithFlattening` does; other labels are -100.

    The first token of a sequence is no label, because the row before it belongs to another sequence.
    """
    labels = [torch.where(labelled, tokens, -100) for tokens, labelled in pairs]
    for own in labels:
        own[0] = -100
    batch: dict[str, Any] = {
        "input_ids": torch.cat([tokens for tokens, _ in pairs]).unsqueeze(0),
        "position_ids": torch.cat([torch.arange(len(tokens)) for tokens, _ in pairs]).unsqueeze(0),
        "labels": torch.cat(labels).unsqueeze(0),
    }
    if device.type == "cpu":
        return batch
    # Without these, flash attention would find the bounds again in each layer and wait for the device each time.
    lengths = [len(tokens) for tokens, _ in pairs]
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    batch |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    moved = {key: value.to(device, non_blocking=True) for key, value in batch.items()}
    return moved | {"max_length_q": max(lengths), "max_length_k": max(lengths)}


class PeftTask:
    """A task trained by PEFT.

    Args:
        model: The backbone, to which the task's adapter is added in place.
        rank: LoRA rank; alpha is twice the rank.
        targets: Names of the modules that get an adapter.
        learning_rate: Learning rate of AdamW.
        steps: Length of the learning rate schedule.
        initial: Initial adapter tensors, by their key in a checkpoint.
        rival: `padded` or `packed`.
    """

    def __init__(
        self,
        model: nn.Module,
        rank: int,
        targets: list[str],
        learning_rate: float,
        steps: int,
        initial: dict[str, Tensor] | None = None,
        rival: str = "padded",
    ) -> None:
        self.collate = {"padded": pad, "packed": flatten}[rival]
        if uses_liger(next(model.parameters()).device):
            apply_liger_kernel(model, None)
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
        output = self.model(**self.collate(pairs, self.device), num_items_in_batch=labels)
        output.loss.backward()
        nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(output.loss.detach())
