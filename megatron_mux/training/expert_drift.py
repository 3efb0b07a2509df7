"""Trains tasks for some steps and follows how the choice of experts drifts, on a probe of each task's own records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from megatron_mux.batch.pack import PackedSequence, pack
from megatron_mux.batch.packed_batch import PackedBatch, activate
from megatron_mux.engine import Engine, Task
from megatron_mux.errors import UserError
from megatron_mux.moe.drift import larger_reach, layer_drift, observing_logits

PROBE_TOKENS = 2048
"""Tokens of a task's probe, its first records; a last record may exceed them."""

_POINTS = 100
"""Steps between points of a distribution, in per cent."""


class _Probe:
    """A task's probe, and what its steps have shown."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine, self.name = engine, name
        experts = engine.backbone.shape.experts
        assert experts is not None
        self._top_k = experts.routing.top_k
        self._batch = self._pack(engine.task(name))
        self._logits = self._observe()
        self._weights = self._values()
        self._lipschitz: dict[int, float | None] = dict.fromkeys(self._logits)
        self._gradient = 0.0
        self.scores = {layer: self._selected(logits) for layer, logits in self._logits.items()}
        self.access = [self._access()]
        self.steps: list[dict[str, Any]] = []

    def _pack(self, task: Task) -> PackedBatch:
        sequences: list[PackedSequence] = []
        tokens = 0
        while tokens < PROBE_TOKENS and len(sequences) < len(task.data):
            record = task.data[len(sequences)]
            sequences.append(PackedSequence(self.name, len(sequences), record.tokens, record.labelled, 1.0))
            tokens += len(record.tokens)
        steps, offsets = {self.name: 0}, {self.name: task.spec.adapter.virtual_tokens}
        slots = {self.name: self._engine.slots[self.name]}
        packed = pack(sequences, (self.name,), steps, offsets, training=False, slots=slots)
        return packed.to(self._engine.backbone.device)

    def _observe(self) -> dict[int, Tensor]:
        backbone = self._engine.backbone
        self._engine.adapters.prepare()
        with observing_logits(backbone) as found, torch.no_grad(), activate(self._batch):
            backbone.forward(self._batch)
        return dict(found)

    def _values(self) -> Tensor:
        return self._engine.adapters.tasks[self.name].flat_params.values.detach().clone()

    def _selected(self, logits: Tensor) -> Tensor:
        """[T] sums of the scores of the experts that a token selects (the paper's Figure 3(b))."""
        return logits.softmax(dim=1).topk(self._top_k, dim=1).values.sum(dim=1)

    def _access(self) -> list[list[float]]:
        """[L][E] share of the probe's tokens that select each expert."""
        found = []
        for logits in self._logits.values():
            chosen = logits.topk(self._top_k, dim=1).indices.flatten()
            counts = torch.bincount(chosen, minlength=logits.shape[1])
            found.append((counts / len(logits)).tolist())
        return found

    def note(self, step: int, rate: float, gradient: float) -> None:
        """Compare the scores with those before a step.

        Args:
            step: Which one, from 1.
            gradient: Norm of its gradient, before clipping.
        """
        training = self._engine.task(self.name).spec.training
        before, weights = self._logits, self._weights
        self._logits, self._weights = self._observe(), self._values()
        update = float((self._weights - weights).double().norm())
        self._gradient = max(self._gradient, gradient)
        plain = training.optim == "sgd" and not training.weight_decay
        layers = []
        for layer, old in before.items():
            known, new = self._lipschitz[layer], self._logits[layer]
            # The theorem's L bounds both.
            paper = None if known is None or not plain else rate * max(known, self._gradient) ** 2
            reach = None if known is None else known * update
            found = layer_drift(old, new, self._top_k, reach, paper)
            layers.append({"layer": layer, "lipschitz": known, **asdict(found)})
            self._lipschitz[layer] = larger_reach(known, old, new, update)
        self.access.append(self._access())
        self.steps.append(
            {
                "step": step,
                "learning_rate": rate,
                "gradient_norm": gradient,
                "update_norm": update,
                "layers": layers,
            }
        )

    def result(self) -> dict[str, Any]:
        """What was found, as JSON."""
        experts = next(iter(self._logits.values())).shape[1]
        bounded = [
            layer for step in self.steps for layer in step["layers"] if layer["bound_mean"] is not None
        ]
        compared = len(bounded) * self._batch.rows * experts
        points = torch.linspace(0, 1, _POINTS + 1, dtype=torch.float64)
        return {
            "optimizer": self._engine.task(self.name).spec.training.optim,
            "probe_tokens": self._batch.rows,
            "layers": list(self._logits),
            "selected_scores": [
                torch.quantile(scores.double(), points).tolist() for scores in self.scores.values()
            ],
            "access": self.access,
            "steps": self.steps,
            "compared": compared,
            "violations": sum(layer["violations"] for layer in bounded),
            "paper_violations": sum(layer["paper_violations"] for layer in bounded),
            "paper_compared": compared if any(layer["paper_mean"] is not None for layer in bounded) else 0,
        }


def follow_drift(
    engine: Engine, tasks: Sequence[Task], steps: int, done: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Train tasks together and follow the drift of each on its own records, which no other task's adapter changes.

    Args:
        engine: On the whole backbone, in one process.
        steps: Steps to take; a task that is finished before stays at its last.

    Returns:
        By task what was found: see docs/expert-placement.md.

    Raises:
        UserError: The router is another one than the theorem is about.
    """
    experts, family = engine.backbone.shape.experts, engine.backbone.shape.family
    assert experts is not None
    if experts.routing.groups > 1:
        raise UserError(
            f"--drift-steps: the theorem is about choices among all experts, those of a {family} are among groups"
        )
    if experts.routing.score != "softmax":
        raise UserError(
            f"--drift-steps: the theorem is about softmax scores, those of a {family} are {experts.routing.score}"
        )
    engine.register_tasks(tasks)
    probes = [_Probe(engine, task.spec.name) for task in tasks]
    for _ in range(steps):
        results = engine.step() if engine.active else {}
        for probe in probes:
            result = results.get(probe.name)
            if result is not None and result.status != "failed":
                probe.note(result.step, result.learning_rate, result.grad_norm)
        done()
    return {probe.name: probe.result() for probe in probes}
