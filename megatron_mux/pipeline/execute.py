"""Run a template's actions on one real stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatron_mux.pipeline.action import Action, TimedAction, Unit
from megatron_mux.pipeline.communicate import Communicator


class StageCompute(Protocol):
    """What a stage can compute; the engine supplies it."""

    def shape(self, action: Action) -> tuple[int, ...]:
        """Shape of the hidden states that enter and leave this stage for what the action computes."""
        ...

    def forward(self, action: Action, hidden: Tensor | None) -> Tensor:
        """Hidden states for the next stage, or the scalar loss on the last stage."""
        ...

    def backward(self, action: Action, output: Tensor, gradient: Tensor | None) -> None:
        """Back-propagate `gradient` (None on the last stage) through `output`."""
        ...

    def label(self, action: Action) -> str:
        """What to write on the action in a picture."""
        ...


def execute(
    actions: Sequence[Action],
    compute: StageCompute,
    communicator: Communicator,
    dtype: torch.dtype,
    timer: Callable[[TimedAction], None] | None = None,
) -> None:
    """Run `actions` in order; tensors move when an action needs or makes them.

    Args:
        actions: This stage's actions; forwards without a backward are evaluation and keep nothing.
        compute: The stage's work.
        communicator: Its transfers.
        dtype: Of hidden states and their gradients.
        timer: Called with each finished action; on a GPU the device is synchronised around each action then.
    """
    with_backward = {action.unit for action in actions if action.kind == "B"}
    alive: dict[Unit, tuple[Tensor | None, Tensor]] = {}
    for action in actions:
        key = action.unit
        if action.kind == "F":
            hidden = communicator.receive_hidden(compute.shape(action), dtype)
            if hidden is not None and key in with_backward:
                hidden.requires_grad_(True)
            start = _now(communicator.device, timer)
            output = compute.forward(action, hidden)
            stop = _now(communicator.device, timer)
            communicator.send_hidden(output)
            if key in with_backward:
                alive[key] = (hidden, output)
        else:
            hidden, output = alive.pop(key)
            gradient = communicator.receive_gradient(compute.shape(action), dtype)
            start = _now(communicator.device, timer)
            compute.backward(action, output, gradient)
            stop = _now(communicator.device, timer)
            if hidden is not None:
                # No adapter between here and the loss: the gradient is zero, and the neighbour waits for it.
                communicator.send_gradient(torch.zeros_like(hidden) if hidden.grad is None else hidden.grad)
        if timer is not None:
            timer(TimedAction(action, start, stop, compute.label(action)))
    communicator.finish()


def _now(device: torch.device, timer: Callable[[TimedAction], None] | None) -> float:
    if timer is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
