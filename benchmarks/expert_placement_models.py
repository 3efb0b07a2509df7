"""Random Mixtrals whose experts are selected as often as Zipf's law says."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LAYERS, EXPERTS, TOP_K, HIDDEN, VOCAB = 8, 12, 2, 256, 1024

_STEPS = 400
_SHARED = 2.0
"""Size of what all tokens have in common beside what each has of its own: it carries the popularity of experts."""


def zipf(skew: float) -> Tensor:
    """[E] probability that a token selects each expert, the most popular first; they sum to the experts of a token."""
    weights = torch.arange(1, EXPERTS + 1, dtype=torch.float64) ** -skew
    return TOP_K * weights / weights.sum()


def entropy(access: Tensor) -> float:
    """Entropy of how often experts are selected, over its largest value ln E: 1 if all are selected equally often."""
    shares = access / access.sum(-1, keepdim=True)
    return float(torch.special.entr(shares).sum(-1).mean() / math.log(access.shape[-1]))


def write_random_mixtral(directory: Path, skew: float, seed: int = 0) -> None:
    """Write a Hugging Face directory; which experts are popular differs from layer to layer.

    The embeddings of all tokens have a direction in common, along which a router's weights raise an expert's scores for
    every token. They are fitted, layer after layer, until experts are selected as often as `zipf` says.

    Args:
        directory: To write.
        skew: Exponent of Zipf's law.
        seed: Of weights and tokens.
    """
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
    )
    config._experts_implementation = "eager"
    torch.manual_seed(seed)
    model = MixtralForCausalLM(config)
    tokens = torch.randint(3, VOCAB, (64, 64))
    with torch.no_grad():
        common = torch.randn(HIDDEN)
        embeddings = torch.randn(VOCAB, HIDDEN) + _SHARED * common
        model.model.embed_tokens.weight.copy_(embeddings)
        for layer in model.model.layers:
            wanted = zipf(skew)[torch.randperm(EXPERTS)]
            _fit_router(layer.mlp.gate.weight, _inputs_of(model, layer.mlp.gate, tokens), wanted)
    model.to(torch.bfloat16).save_pretrained(directory)


def _inputs_of(model: Any, module: Any, tokens: Tensor) -> Tensor:
    """[tokens, H] what a module is given."""
    seen: list[Tensor] = []
    handle = module.register_forward_pre_hook(
        lambda module, inputs: seen.append(inputs[0].reshape(-1, HIDDEN))
    )
    model(input_ids=tokens, use_cache=False)
    handle.remove()
    return seen[0]


def _fit_router(weight: Tensor, x: Tensor, wanted: Tensor) -> None:
    """Set a router's weights `[E, H]` so that rows x select each expert with the wanted probability."""
    mean = x.mean(0)
    direction = mean / mean.dot(mean)
    drawn = torch.randn(weight.shape) / math.sqrt(HIDDEN)
    drawn -= (drawn @ mean).unsqueeze(1) * direction  # by itself it prefers no expert
    raised = torch.zeros(len(weight))
    rate: Callable[[int], float] = lambda step: 0.5 / (1 + 4 * step / _STEPS)
    for step in range(_STEPS):
        weight.copy_((drawn + raised.unsqueeze(1) * direction).to(torch.bfloat16))
        chosen = (x @ weight.T).topk(TOP_K, dim=1).indices
        found = torch.bincount(chosen.flatten(), minlength=len(weight)) / len(x)
        raised += rate(step) * ((wanted + 1e-3).log() - (found + 1e-3).log()).float()


def random_records(file: Path, rows: int = 480, length: int = 48, seed: int = 1) -> None:
    """Write `[rows, length]` int64 random tokens."""
    generator = torch.Generator().manual_seed(seed)
    torch.save(torch.randint(3, VOCAB, (rows, length), generator=generator), file)


def text_records(tokenizer: Path, text: Path, file: Path, rows: int = 480, length: int = 32) -> None:
    """Write `[rows, length]` int64 tokens of a data set of the quickstart, records end to end."""
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(tokenizer)
    tokens: list[int] = []
    with text.open(encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            said = record.get("text") or record["prompt"] + record["completion"]
            tokens += [*encode(said).input_ids, encode.eos_token_id]
            if len(tokens) >= rows * length:
                break
    torch.save(torch.tensor(tokens[: rows * length]).view(rows, length), file)
