"""Hugging Face PEFT as careful users run it, one task at a time: the rivals of `vs_peft.py` and `gpu_table.py`.

`padded`: a batch is padded to its longest sequence. `packed`: its sequences lie end to end in one row, with position
ids that restart and no attention mask, as in `DataCollatorWithFlattening` and TRL's `padding_free`; `transformers` then
lets no sequence see another (on a GPU by variable-length attention). On a GPU both use Liger's kernels for norms, gated
MLPs and rotary embeddings where they are importable.

The loss has one of two heads: `whole` makes logits of all tokens, `labelled` selects the labelled rows first.

All use what `transformers` and `peft` offer for speed: SDPA attention, no key-value cache, the fused optimizer,
gradients for the adapter only, and, in bf16, autocast, so that products of the fp32 LoRA weights run in bf16. The loss
stays on the device. This module does not import megatron_mux.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AutoModelForCausalLM, get_scheduler
from transformers.integrations.liger import apply_liger_kernel
from transformers.utils import is_liger_kernel_available

Pair = tuple[Tensor, Tensor]
"""Token ids `[L]`, and a mask `[L]` of the tokens that are labels."""

RIVALS = ("padded", "packed")
HEADS = ("whole", "labelled")


def load(path: Path, dtype: torch.dtype) -> nn.Module:
    """Load the backbone on a CPU, as users of PEFT do."""
    return prepared(
        AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation="sdpa", local_files_only=True
        )
    )


def prepared(model: Any) -> nn.Module:
    """Prepare a model of `transformers` for training: no key-value cache."""
    model.config.use_cache = False
    model.train()
    made: nn.Module = model
    return made


def uses_liger(device: torch.device) -> bool:
    """Whether the rivals use Liger's kernels: on a GPU where they are importable."""
    return device.type == "cuda" and bool(is_liger_kernel_available())


def attention_of(rival: str, dtype: torch.dtype, device: torch.device) -> str:
    """The attention implementation: for packed sequences on a GPU flash-attn where installed, else torch's own."""
    if rival == "padded" or device.type != "cuda" or dtype == torch.float32:
        return "sdpa"
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
    more: dict[str, Any] = {"scale": options["scaling"], "window_size": (-1, 0)}
    group = query.shape[1] // key.shape[1]
    if group > 1 and _serves_groups():
        more["enable_gqa"] = True
    elif group > 1:
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    out = varlen_attn(query, key, value, bounds, bounds, longest, longest, **more)
    return out.unsqueeze(0), None


@lru_cache(maxsize=1)
def _serves_groups() -> bool:
    """Whether torch's variable-length attention lets query heads share keys (torch 2.12 and newer)."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def share_weights(model: nn.Module) -> nn.Module:
    """Copy the modules but share their weight tensors, so that several tasks fit in one process."""
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    memo: dict[int, object] = {id(tensor): tensor for tensor in tensors}
    return copy.deepcopy(model, memo)


def pad(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Pad a batch on the right to its longest sequence, as `DataCollatorForSeq2Seq` does.

    Returns:
        As `flatten`.
    """
    longest = max(len(tokens) for tokens, _ in pairs)
    ids = torch.zeros(len(pairs), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, (tokens, _) in enumerate(pairs):
        ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = 1
    starts = [row * longest for row in range(len(pairs))]
    return _pinned({"input_ids": ids, "attention_mask": mask, **_targets(pairs, starts)})


def flatten(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Lay a batch end to end in one row, as `DataCollatorWithFlattening` does.

    Returns:
        Arguments of the model; `rows` `[N]`, the rows before a labelled token of the same sequence, and `targets`
        `[N]`, these tokens.
    """
    lengths = [len(tokens) for tokens, _ in pairs]
    bounds = [0, *accumulate(lengths)]
    # Without the bounds, flash attention would find them again in each layer and wait for the device each time.
    ends = torch.tensor(bounds, dtype=torch.int32)
    batch = {
        "input_ids": torch.cat([tokens for tokens, _ in pairs]).unsqueeze(0),
        "position_ids": torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0),
        **_targets(pairs, bounds[:-1]),
        **({"cu_seq_lens_q": ends, "cu_seq_lens_k": ends} if torch.cuda.is_available() else {}),
    }
    longest = {"max_length_q": max(lengths), "max_length_k": max(lengths)} if "cu_seq_lens_q" in batch else {}
    return _pinned(batch) | longest


def _targets(pairs: Sequence[Pair], starts: Sequence[int]) -> dict[str, Tensor]:
    """Rows that predict a labelled token, and these tokens, of sequences that start at these rows."""
    at = [
        start + labelled[1:].nonzero().flatten() for start, (_, labelled) in zip(starts, pairs, strict=True)
    ]
    return {
        "rows": torch.cat(at),
        "targets": torch.cat([tokens[1:][labelled[1:]] for tokens, labelled in pairs]),
    }


def _pinned(batch: dict[str, Tensor]) -> dict[str, Any]:
    """Pin host memory where there is a GPU, as a `DataLoader` does, so that copies do not wait."""
    return {key: value.pin_memory() if torch.cuda.is_available() else value for key, value in batch.items()}


def _on(value: Any, device: torch.device) -> Any:
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value


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
        head: Of `HEADS`.
        dropout: LoRA dropout.
        parameters: Names of fused experts' parameters that get an adapter, too.
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
        head: str = "whole",
        dropout: float = 0.0,
        parameters: Sequence[str] = (),
    ) -> None:
        self.collate: Callable[[Sequence[Pair]], dict[str, Any]] = {"padded": pad, "packed": flatten}[rival]
        self.dtype, self.device = next(
            (p.dtype, p.device) for p in model.parameters() if p.is_floating_point()
        )
        self.head = head
        if uses_liger(self.device):
            # The head is ours, experts are grouped products of `transformers`, the other kernels are Liger's.
            ours = {"fused_linear_cross_entropy": False, "cross_entropy": False}
            apply_liger_kernel(model, {**ours, "swiglu": not parameters})
        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=rank,
            lora_alpha=2 * rank,
            lora_dropout=dropout,
            target_modules=list(targets),
            target_parameters=list(parameters) or None,
        )
        self.model = get_peft_model(model, config)
        if initial is not None:
            set_peft_model_state_dict(self.model, initial)
        self.model.train()
        for module in self.model.modules():
            if self.dtype != torch.float32 and hasattr(module, "cast_input_dtype_enabled"):
                module.cast_input_dtype_enabled = False  # autocast casts weights; inputs are bf16 already
        self.trained = [value for value in self.model.parameters() if value.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=learning_rate, weight_decay=0.0, fused=True)
        self.scheduler = get_scheduler("cosine", self.optimizer, num_warmup_steps=0, num_training_steps=steps)

    def tensors(self) -> dict[str, Tensor]:
        """Return the adapter's tensors, by their key in a checkpoint."""
        return {
            key: value.detach().cpu().clone() for key, value in get_peft_model_state_dict(self.model).items()
        }

    def step(self, pairs: Sequence[Pair]) -> Tensor:
        """Take one optimizer step on a batch of pairs; returns the loss, on the device."""
        return self.step_on(self.collate(pairs))

    def step_on(self, batch: Mapping[str, Any]) -> Tensor:
        """Take one optimizer step on a batch that `collate` made; returns the loss, on the device."""
        batch = {key: _on(value, self.device) for key, value in batch.items()}
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            loss = self._loss(batch, batch.pop("rows"), batch.pop("targets"))
        loss.backward()
        nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _loss(self, batch: dict[str, Any], rows: Tensor, targets: Tensor) -> Tensor:
        """Mean loss over the labelled tokens.

        Args:
            batch: Arguments of the model.
            rows: `[N]` int64, the rows that predict a labelled token, among all rows of the batch.
            targets: `[N]` int64, the tokens that they predict.
        """
        base: Any = self.model.get_base_model()
        hidden = base.model(**batch).last_hidden_state.flatten(0, 1)  # [T, H]
        head = base.get_output_embeddings()
        if self.head == "labelled":
            return _cross_entropy(head(hidden.index_select(0, rows)), targets)
        labels = torch.full((hidden.shape[0],), -100, dtype=torch.int64, device=self.device)
        labels = labels.index_copy(0, rows, targets)
        return _cross_entropy(head(hidden), labels, len(targets))


def _cross_entropy(logits: Tensor, labels: Tensor, count: int | None = None) -> Tensor:
    """Mean cross entropy over `count` labels, all of them by default; by Liger's kernel where the rivals use it."""
    kernel: Any = functional.cross_entropy
    if uses_liger(logits.device):
        from liger_kernel.transformers.functional import liger_cross_entropy as kernel  # in fp32 by itself
    else:
        logits = logits.float()
    total: Tensor = kernel(logits, labels, reduction="sum")
    return total / (count or len(labels))
