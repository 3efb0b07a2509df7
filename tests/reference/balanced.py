"""The balancing loss of a Hugging Face model with experts: Megatron-Core's formula on the routers' own products."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import (
    compute_routing_scores_for_aux_loss,
    switch_load_balancing_loss_func,
)
from torch import Tensor, nn

from .loop import Example


def balancing_loss(logits: Tensor, top_k: int, score: str) -> Tensor:
    """Megatron-Core's loss of one sequence in one layer; `logits` `[T, E]`."""
    tokens, experts = logits.shape
    chosen, scores = compute_routing_scores_for_aux_loss(logits, top_k, score)
    counts = chosen.sum(dim=0)
    loss: Tensor = switch_load_balancing_loss_func(scores, counts, tokens, top_k, experts, 1.0)
    return loss


class Balancing:
    """Adds a task's balancing loss to the gradients of its step: what `loop.train` takes as `penalty`.

    Args:
        model: Routes tokens.
        steps: The examples of each step.
        coefficient: Of the loss.

    Attributes:
        losses: Of each step, before the coefficient.
    """

    def __init__(self, model: nn.Module, steps: Sequence[Sequence[Example]], coefficient: float) -> None:
        self.model, self.steps, self.coefficient = model, steps, coefficient
        self.losses: list[float] = []
        config: Any = model.config
        self.top_k = config.num_experts_per_tok
        self.score = "sigmoid" if config.model_type == "deepseek_v3" else "softmax"

    def __call__(self, step: int) -> None:
        """Add the gradient of a step, sequence by sequence."""
        total = 0.0
        for tokens, _ in self.steps[step]:
            with _router_logits(self.model) as logits:
                self.model(input_ids=tokens.unsqueeze(0), use_cache=False)
            assert logits
            loss = torch.stack([balancing_loss(own, self.top_k, self.score) for own in logits]).sum()
            loss = loss / len(self.steps[step])
            (self.coefficient * loss).backward()
            total += loss.item()
        self.losses.append(total)


@contextmanager
def _router_logits(model: nn.Module) -> Iterator[list[Tensor]]:
    """The products of each router, layer by layer, in the forward passes within."""
    found: list[Tensor] = []
    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    hooks = [
        router.register_forward_hook(lambda module, inputs, output: found.append(output[0]))
        for router in routers
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
