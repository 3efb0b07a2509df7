"""Run a template's actions on one real stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from megatron_mux.clock import Clock, Mark
from megatron_mux.pipeline.action import Action, ChunkId, TimedAction
from megatron_mux.pipeline.communicate import Communicator, PendingReceive
from megatron_mux.pipeline.template import Template
from megatron_mux.pipeline.transfers import Transfer, issue_order

Timer = Callable[[TimedAction], None]


class StageCompute(Protocol):
    """Callbacks that compute a stage's actions; the engine implements them."""

    def shape(self, action: Action) -> tuple[int, ...]:
        """Shape of the tensor sent between stages for the action: hidden states, their gradient, or statistics.

        A gradient that no stage needs has no elements, and is not sent.
        """
        ...

    def needs_gradient(self, action: Action) -> bool:
        """Whether a stage before the forward pass needs the gradient of the hidden states that the pass receives."""
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
    given: Iterable[Transfer] = (),
) -> None:
    """Run one rank's actions in order. Receives are issued ahead of their use, sends are asynchronous.

    The neighbours' actions tell what is received, and when (`issue_order`), so no shape is exchanged and no rank waits
    for another in a circle.

    Args:
        template: Actions of all ranks, validated by `check`. Forwards without a backward (evaluation) keep nothing.
        compute: Computes the actions.
        communicator: Sends and receives.
        dtype: Dtype of hidden states and their gradients.
        timer: Called with each action once all have been issued. On a GPU this waits until they are done.
        given: See `issue_order`.
    """
    stages = stages or len(template)
    # With several stages to a rank, pipelines that sum gradients have equal templates (`fusion.step.must_keep_step`).
    # A trial has this rank's actions alone.
    in_turn = communicator.parallel.dp_size > 1 and stages == len(template) > 1 and all(template)
    events = issue_order(template, rank, stages, in_turn, given)
    with_backward = {(action.stage, action.chunk_id) for action in template[rank] if action.kind == "B"}
    run = _Run(rank, len(template), stages, compute, communicator, dtype, with_backward)
    run.through(events, timer)


@dataclass(frozen=True)
class _Run:
    """One call of `execute`: some of its arguments, and the tensors that it holds.

    Attributes:
        with_backward: Stages and chunks of forward passes that a backward pass follows.
        pending_receives: Tensors received, or being received, by the action that needs them.
        outgoing: Tensors to be sent, by the action that has computed them.
        alive: Inputs and outputs of chunks whose backward pass is to come.
    """

    rank: int
    ranks: int
    stages: int
    compute: StageCompute
    communicator: Communicator
    dtype: torch.dtype
    with_backward: set[tuple[int, ChunkId]]
    pending_receives: dict[Action, PendingReceive] = field(default_factory=dict)
    outgoing: dict[Action, Tensor] = field(default_factory=dict)
    alive: dict[tuple[int, ChunkId], tuple[Tensor | None, Tensor]] = field(default_factory=dict)

    def through(self, events: Iterable[Action | Transfer], timer: Timer | None) -> None:
        """Run all actions and transfers, then wait for outstanding sends."""
        clock = None if timer is None else Clock(self.communicator.device)
        marks: list[tuple[Action, Mark, Mark]] = []
        for event in events:
            if isinstance(event, Transfer):
                self._transfer(event)
                continue
            self.communicator.heartbeat.at(event)
            received = self.pending_receives.pop(event).wait() if event in self.pending_receives else None
            start = None if clock is None else clock.mark()
            made = self._compute(event, received)
            if clock is not None:
                marks.append((event, start, clock.mark()))
            if event.after(self.stages, self.ranks) is not None:
                self.outgoing[event] = made
        self.communicator.finish()
        if timer is None or clock is None:
            return
        times = iter(clock.seconds([mark for _, *pair in marks for mark in pair]))
        for action, *_ in marks:
            timer(TimedAction(action, next(times), next(times), self.compute.label(action)))

    def _transfer(self, transfer: Transfer) -> None:
        """Issue this rank's end of a transfer, both if it is its own neighbour."""
        source, target = transfer.source, transfer.target
        sends, receives = (action.stage % self.ranks == self.rank for action in (source, target))
        tensor = self.outgoing.pop(source) if sends else None
        if tensor is not None and receives:
            self.pending_receives[target] = PendingReceive(tensor.detach())
        elif tensor is not None:
            self.communicator.send(tensor, source.is_backward)
        else:
            dtype = self.dtype if target.is_pass else torch.float64
            shape = self.compute.shape(target)
            self.pending_receives[target] = self.communicator.receive(shape, dtype, target.is_backward)

    def _compute(self, action: Action, received: Tensor | None) -> Tensor:
        """Compute the action; returns the tensor for the neighbour, if there is one that needs it."""
        if action.kind == "F":
            return self._forward(action, received)
        if action.kind == "B":
            return self._backward(action, received)
        if action.kind == "N":
            return self.compute.norm(action, received)
        return self.compute.update(action, received)

    def _forward(self, action: Action, hidden: Tensor | None) -> Tensor:
        is_kept = (action.stage, action.chunk_id) in self.with_backward
        needs_gradient = is_kept and hidden is not None and self.compute.needs_gradient(action)
        if hidden is not None and needs_gradient:
            hidden.requires_grad_(True)
        output = self.compute.forward(action, hidden)
        if is_kept:
            # An output without a gradient is not kept: below all adapters the backward pass has nothing to do.
            kept = output if output.requires_grad else output.new_empty(0)
            self.alive[action.stage, action.chunk_id] = (hidden if needs_gradient else None, kept)
        return output

    def _backward(self, action: Action, gradient: Tensor | None) -> Tensor:
        hidden, output = self.alive.pop((action.stage, action.chunk_id))
        self.compute.backward(action, output, gradient)
        if hidden is None:
            return output.new_empty(0)
        # When memory has run out the gradient is zero, but the neighbour still waits for it. The hidden states are no
        # longer needed, so their memory can hold it.
        return hidden.detach().zero_() if hidden.grad is None else hidden.grad
