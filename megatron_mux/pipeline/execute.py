"""Run a template's actions on one real stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatron_mux.pipeline.action import Action, TimedAction, Unit
from megatron_mux.pipeline.communicate import Communicator, Message
from megatron_mux.pipeline.template import Template

Timer = Callable[[TimedAction], None]


class StageCompute(Protocol):
    """What a stage can compute; the engine supplies it."""

    def shape(self, action: Action) -> tuple[int, ...]:
        """Shape of what travels between stages for the action: hidden states, their gradient, or statistics."""
        ...

    def forward(self, action: Action, hidden: Tensor | None) -> Tensor:
        """Hidden states for the next stage, or the scalar loss on the last stage."""
        ...

    def backward(self, action: Action, output: Tensor, gradient: Tensor | None) -> None:
        """Back-propagate `gradient` (None on the last stage) through `output`."""
        ...

    def norm(self, action: Action, others: Tensor | None) -> Tensor:
        """Statistics fp64 of a bucket's step over this stage and, `others`, those after it (None on the last)."""
        ...

    def update(self, action: Action, whole: Tensor | None) -> Tensor:
        """Let the bucket's tasks step here, by the statistics of all stages; on the first stage, None, by its own.

        Returns:
            What the next stage is to step by.
        """
        ...

    def label(self, action: Action) -> str:
        """What to write on the action in a picture."""
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
    """Run one rank's actions in order; tensors are received ahead of their use and sent when they are made.

    The neighbours' actions say what will be received, and in which order: no shape is exchanged.

    Args:
        template: Actions of all ranks; it has passed `check`. Forwards without a backward are evaluation and keep
            nothing.
        rank: Whose actions to run.
        compute: The rank's work.
        communicator: Its transfers.
        dtype: Of hidden states and their gradients.
        timer: Called with each finished action; on a GPU the device is synchronised around each action then.
        stages: Number of stages; as many as ranks by default.
    """
    _Run(template, rank, compute, communicator, dtype, timer, stages or len(template)).run()


class _Run:
    """One execution; the arguments are those of `execute`."""

    def __init__(
        self,
        template: Template,
        rank: int,
        compute: StageCompute,
        communicator: Communicator,
        dtype: torch.dtype,
        timer: Timer | None,
        stages: int,
    ) -> None:
        self.actions = template[rank]
        self.ranks = len(template)
        self.stages = stages
        self.compute = compute
        self.communicator = communicator
        self.dtype = dtype
        self.timer = timer
        self.with_backward = {(action.stage, action.unit) for action in self.actions if action.kind == "B"}
        self.alive: dict[tuple[int, Unit], tuple[Tensor | None, Tensor]] = {}
        self.inboxes = {
            backward: communicator.inbox(self._messages(template[neighbour % self.ranks], backward), backward)
            for backward, neighbour in ((False, rank - 1), (True, rank + 1))
        }

    def run(self) -> None:
        """All actions, then wait for what was sent."""
        for action in self.actions:
            self.communicator.heartbeat.at(action)
            travels = action.before(self.stages, self.ranks) is not None
            received = self.inboxes[action.is_backward].take(action) if travels else None
            start = self._now()
            made = self._compute(action, received)
            stop = self._now()
            if made is not None and action.after(self.stages, self.ranks) is not None:
                self.communicator.send(made, action.is_backward)
            if self.timer is not None:
                self.timer(TimedAction(action, start, stop, self.compute.label(action)))
        self.communicator.finish()
        self.inboxes.clear()  # they know this run: what it holds would wait for the garbage collector

    def _messages(self, theirs: Sequence[Action], backward: bool) -> Iterator[Message]:
        """What a neighbour sends here in one direction, in its order."""
        for action in theirs:
            if action.is_backward == backward and (ours := action.after(self.stages, self.ranks)) is not None:
                dtype = self.dtype if ours.is_pass else torch.float64
                yield Message(ours, self.compute.shape(ours), dtype)

    def _compute(self, action: Action, received: Tensor | None) -> Tensor | None:
        """What the action makes for the neighbour."""
        if action.kind == "F":
            return self._forward(action, received)
        if action.kind == "B":
            return self._backward(action, received)
        if action.kind == "N":
            return self.compute.norm(action, received)
        return self.compute.update(action, received)

    def _forward(self, action: Action, hidden: Tensor | None) -> Tensor:
        kept = (action.stage, action.unit) in self.with_backward
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
        # No adapter between here and the loss, or no memory: the gradient is zero, and the neighbour waits for it. The
        # hidden states have served; their memory is there for sure.
        return hidden.detach().zero_() if hidden.grad is None else hidden.grad

    def _now(self) -> float:
        if self.timer is not None and self.communicator.device.type == "cuda":
            torch.cuda.synchronize(self.communicator.device)
        return time.perf_counter()
