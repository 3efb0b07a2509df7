"""What routers of a Mixtral have learned: entropies against chance and random routers, and experts by kind of text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from texts import Kind
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """How a model routes held-out text. L: layers, E: experts, K: kinds of text.

    Attributes:
        loss: Nats per token, mean over kinds.
        scores: [L] mean entropy of a token's scores, over ln E: 1 if all experts score alike (chance).
        use: [L] entropy of how often experts are selected, over ln E: 1 if all are equally often.
        by_kind: [L] nats that the selected expert tells about the kind of text (mutual information).
        access: [L, K, E] probability that a token of the kind selects the expert.
    """

    loss: float
    scores: Tensor
    use: Tensor
    by_kind: Tensor
    access: Tensor


@torch.no_grad()
def routing_of(model: Any, batches: Mapping[str, Tensor]) -> Routing:
    """Pass held-out text through a model.

    Args:
        model: A MixtralForCausalLM.
        batches: Of each kind `[rows, length]` int64.
    """
    layers, experts, top_k = (
        model.config.num_hidden_layers,
        model.config.num_local_experts,
        model.config.num_experts_per_tok,
    )
    access = torch.zeros(layers, len(batches), experts, dtype=torch.float64)
    entropy, losses = torch.zeros(layers, dtype=torch.float64), []
    model.eval()
    for kind, x in enumerate(batches.values()):
        with ExitStack() as hooks:
            seen: list[Tensor] = []
            for layer in model.model.layers:
                hooks.callback(layer.mlp.gate.register_forward_pre_hook(_scoring(seen)).remove)
            losses.append(float(model(input_ids=x, labels=x, use_cache=False).loss))
        for index, logits in enumerate(seen):
            scores = logits.double().softmax(-1)
            entropy[index] += torch.special.entr(scores).sum(-1).mean() / math.log(experts) / len(batches)
            selected = scores.topk(top_k).indices.flatten()
            access[index, kind] = torch.bincount(selected, minlength=experts) / len(logits)
    chosen = access / top_k  # of each kind, a distribution over experts; kinds count alike
    mean = chosen.mean(1)
    use = torch.special.entr(mean).sum(-1)
    by_kind = use - torch.special.entr(chosen).sum(-1).mean(-1)
    return Routing(sum(losses) / len(losses), entropy, use / math.log(experts), by_kind, access)


def _scoring(seen: list[Tensor]) -> Callable[[Any, tuple[Tensor, ...]], None]:
    def hook(gate: Any, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0].reshape(-1, inputs[0].shape[-1]) @ gate.weight.T)

    return hook


@torch.no_grad()
def with_random_routers(model: Any, batches: Mapping[str, Tensor], seed: int) -> Routing:
    """Routing with routers of random directions, as long as the learned ones."""
    generator = torch.Generator().manual_seed(seed)
    gates = [layer.mlp.gate.weight for layer in model.model.layers]
    learned = [gate.clone() for gate in gates]
    for gate in gates:
        drawn = torch.randn(gate.shape, generator=generator)
        gate.copy_(drawn * (gate.float().norm(dim=1) / drawn.norm(dim=1)).unsqueeze(1))
    try:
        return routing_of(model, batches)
    finally:
        for gate, old in zip(gates, learned, strict=True):
            gate.copy_(old)


def held_out(kinds: list[Kind], rows: int, length: int) -> dict[str, Tensor]:
    """The first rows of each kind's held-out text, at most so many."""
    found = {}
    for kind in kinds:
        count = min(rows, len(kind.held_out) // length)
        found[kind.name] = kind.held_out[: count * length].view(count, length)
    return found


def report(learned: Routing, by_chance: Routing, kinds: list[str]) -> tuple[dict[str, Any], str]:
    """Return both routings as JSON, and as a table to print."""
    columns = (
        "layer | entropy of scores (random; chance 1) | entropy of use (random; chance 1) | nats about the kind of "
        "text (random; chance 0)"
    )
    lines = [
        f"loss on held-out text: {learned.loss:.3f}; with random routers {by_chance.loss:.3f}",
        columns,
    ]
    for layer in range(len(learned.scores)):
        cells = [
            f"{float(mine[layer]):.3f} ({float(theirs[layer]):.3f})"
            for mine, theirs in (
                (learned.scores, by_chance.scores),
                (learned.use, by_chance.use),
                (learned.by_kind, by_chance.by_kind),
            )
        ]
        lines.append(" | ".join([str(layer), *cells]))
    lines.append("kind of text | its two most frequent experts in the last layer")
    for name, row in zip(kinds, learned.access[-1], strict=True):
        top = row.topk(min(2, len(row)))
        lines.append(
            f"{name} | " + ", ".join(f"{e} ({p:.0%})" for p, e in zip(*map(Tensor.tolist, top), strict=True))
        )
    content = {
        name: {
            "loss": one.loss,
            "score_entropy": one.scores.tolist(),
            "use_entropy": one.use.tolist(),
            "nats_about_kind": one.by_kind.tolist(),
            "access_by_kind": {kind: one.access[:, i].tolist() for i, kind in enumerate(kinds)},
        }
        for name, one in (("learned", learned), ("random_routers", by_chance))
    }
    return content, "\n".join(lines)
