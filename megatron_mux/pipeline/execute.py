"""Run a template's actions on one real stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from megatron_mux.pipeline.action import Action, TimedAction, Unit
from megatron_mux.pipeline.communicate import Communicator, Message
from megatron_mux.pipeline.template import Template

Timer = Callable[[TimedAction], None]


class StageCompute(Protocol):
    """Callbacks that compute a stage's actions; the engine implements them."""

    def shape(self, action: Action) -> tuple[int, ...]:
        """Shape of the tensor sent between stages for the action: hidden states, their gradient, or statistics."""
        ...

    def forward(self, action: Action, hidden: Tensor | None) -> Tensor:
        """Return hidden states for the next stage, or the scalar loss on the last stage."""
        ...

    def backward(self, action: Action, output: Tensor, gradient: Tensor | None) -> None:
        """Back-propagate `gradient` (None on the last stage) through `output`."""
        ...

    def norm(self, action: Action, others: Tensor | None) -> Tensor:
        """Return fp64 statistics of a bucket's step over this stage and the later ones (`others`; None on the last)."""
        ...

    def update(self, action: Action, whole: Tensor | None) -> Tensor:
        """Step the optimizers of the bucket's tasks on this stage.

        Args:
            action: The `U` action.
            whole: Statistics over all stages; None on the first stage, which has them from `norm`.

        Returns:
            The statistics, for the next stage.
        """
        ...

    def label(self, action: Action) -> str:
        """Text shown on the action in pictures."""
        ...


def execute(
    template: Template,
    rank: int,
    compute: StageCompute,
    communicator: Communicator,
    dtype: torch.dtype,
    timer: Timer | None = None,
    stages: int | None = None,
) -> None:
    """Run one rank's actions in order. Receives are posted ahead of their use, sends are asynchronous.

    The neighbours' actions tell what will be received, and in which order, so no shape is exchanged.

    Args:
        template: Actions of all ranks, validated by `check`. Forwards without a backward (evaluation) keep nothing.
        rank: This rank.
        compute: Computes the actions.
        communicator: Sends and receives.
        dtype: Dtype of hidden states and their gradients.
        timer: Called with each finished action. On a GPU this synchronises the device around each action.
        stages: Number of stages; by default one per rank.
    """
    _Run(template, rank, compute, communicator, dtype, timer, stages or len(template)).run()


@dataclass(frozen=True)
class _Run:
    """One call of `execute`, its arguments, and the units whose backward pass is still to come."""

    template: Template
    rank: int
    compute: StageCompute
    communicator: Communicator
    dtype: torch.dtype
    timer: Timer | None
    stages: int
    alive: dict[tuple[int, Unit], tuple[Tensor | None, Tensor]] = field(default_factory=dict)

    def run(self) -> None:
        """Run all actions, then wait for outstanding sends."""
        actions, ranks = self.template[self.rank], len(self.template)
        inboxes = {
            backward: self.communicator.inbox(self._messages(neighbour % ranks, backward), backward)
            for backward, neighbour in ((False, self.rank - 1), (True, self.rank + 1))
        }
        with_backward = {(action.stage, action.unit) for action in actions if action.kind == "B"}
        for action in actions:
            self.communicator.heartbeat.at(action)
            travels = action.before(self.stages, ranks) is not None
            received = inboxes[action.is_backward].take(action) if travels else None
            start = self._now()
            made = self._compute(action, received, (action.stage, action.unit) in with_backward)
            stop = self._now()
            if made is not None and action.after(self.stages, ranks) is not None:
                self.communicator.send(made, action.is_backward)
            if self.timer is not None:
                self.timer(TimedAction(action, start, stop, self.compute.label(action)))
        self.communicator.finish()

    def _messages(self, neighbour: int, backward: bool) -> Iterator[Message]:
        """The messages that a neighbour sends to this rank in one direction, in its order."""
        ranks = len(self.template)
        for action in self.template[neighbour]:
            if action.is_backward == backward and (ours := action.after(self.stages, ranks)) is not None:
                dtype = self.dtype if ours.is_pass else torch.float64
                yield Message(ours, self.compute.shape(ours), dtype)

    def _compute(self, action: Action, received: Tensor | None, kept: bool) -> Tensor | None:
        """Compute the action; returns the tensor for the neighbour, if any.

        Args:
            action: The action.
            received: What it needs of a neighbour.
            kept: Whether a backward pass of the same unit follows.
        """
        if action.kind == "F":
            return self._forward(action, received, kept)
        if action.kind == "B":
            return self._backward(action, received)
        if action.kind == "N":
            return self.compute.norm(action, received)
        return self.compute.update(action, received)

    def _forward(self, action: Action, hidden: Tensor | None, kept: bool) -> Tensor:
        if hidden is not None and kept:
            hidden.requires_grad_(True)
        output = self.compute.forward(action, hidden)
        if kept:
            self.alive[action.stage, action.unit] = (hidden, output)
        return output

    def _backward(self, action: Action, gradient: Tensor | None) -> Tensor | None:
        hidden, output = self.alive.pop((action.stage, action.unit))
        self.compute.backward(action, output, gradient)
        if hidden is None:
            return None
        # Without an adapter between here and the loss, or without memory, the gradient is zero, but the neighbour still
        # waits for it. The hidden states are no longer needed, so their memory can hold it.
        return hidden.detach().zero_() if hidden.grad is None else hidden.grad

    def _now(self) -> float:
        if self.timer is not None and self.communicator.device.type == "cuda":
            torch.cuda.synchronize(self.communicator.device)
        return time.perf_counter()
