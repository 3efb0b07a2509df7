"""Greedy generation with `transformers` and `peft` alone, one prompt at a time, and how sure each token was."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Greedy:
    """What follows a prompt.

    Attributes:
        tokens: Without the one that stopped it.
        margins: For each step, the stopping one included, by how much the best logit exceeds the next.
    """

    tokens: tuple[int, ...]
    margins: tuple[float, ...]


@torch.no_grad()
def generate(model: nn.Module, prompt: Tensor, most: int, stop: Collection[int]) -> Greedy:
    """Continue a prompt as `generate(do_sample=False)` does: the logits of every step are its own."""
    made = model.generate(  # type: ignore[operator]
        input_ids=prompt.unsqueeze(0),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=most,
        do_sample=False,
        eos_token_id=list(stop) or None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = made.sequences[0, len(prompt) :].tolist()
    best = [logits[0].topk(2).values for logits in made.logits]
    margins = tuple(float(first - second) for first, second in best)
    if tokens and tokens[-1] in stop:
        tokens = tokens[:-1]
    return Greedy(tuple(tokens), margins)


@torch.no_grad()
def generate_by_forward(model: nn.Module, prompt: Tensor, most: int, stop: Collection[int]) -> Greedy:
    """The same by whole forward passes without a cache.

    For prefix tuning: peft 0.21's `generate`, with transformers 5, numbers positions otherwise than its `forward`,
    with which the prefix has been trained.
    """
    tokens, margins = prompt, []
    for _ in range(most):
        mask = torch.ones(1, len(tokens), dtype=torch.int64)
        logits = model(input_ids=tokens.unsqueeze(0), attention_mask=mask, use_cache=False).logits[0, -1]
        best = logits.topk(2)
        margins.append(float(best.values[0] - best.values[1]))
        if int(best.indices[0]) in stop:
            break
        tokens = torch.cat([tokens, best.indices[:1]])
    return Greedy(tuple(tokens[len(prompt) :].tolist()), tuple(margins))


def differences(
    found: Sequence[Sequence[int]], wanted: Sequence[Greedy], tie: float = 1e-5
) -> tuple[list[str], int]:
    """Compare completions token by token, each up to the first step in which two logits tie.

    Returns:
        What differs, and the number of completions with a tie.
    """
    problems, ties = [], 0
    for number, (own, reference) in enumerate(zip(found, wanted, strict=True)):
        tied = [step for step, margin in enumerate(reference.margins) if margin <= tie]
        upto = tied[0] if tied else len(reference.margins)
        ties += bool(tied)
        if list(own[:upto]) != list(reference.tokens[:upto]) or (
            not tied and len(own) != len(reference.tokens)
        ):
            problems.append(f"prompt {number}: {list(own)} for {list(reference.tokens)}")
    return problems, ties
