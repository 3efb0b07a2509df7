"""The current phase of a step, and the layer that computes.

In the forward pass, hooks of modules report it. In the backward pass, hooks of autograd nodes do: a layer's backward
pass begins with the node that made its output. Nodes run in the reverse order of their creation, so all nodes of a
layer run before those of the layer below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

LOAD, JOIN, INPUTS, FORWARD, BACKWARD, OPTIMIZER, CLEAR = (
    "load",
    "join",
    "inputs",
    "forward",
    "backward",
    "optimizer",
    "clear",
)


class StepPosition:
    """The current position in a step.

    Attributes:
        layer: The layer that computes; None outside layers. Work between two layers counts to the first one.
    """

    def __init__(self) -> None:
        self.phase = LOAD
        self.layer: int | None = None
        self._cached = 0

    def enter(self, phase: str) -> None:
        """Begin a phase outside layers."""
        self.phase, self.layer, self._cached = phase, None, 0

    def follow(self, layers: Sequence[nn.Module]) -> None:
        """Track the layers of a model from now on."""
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._entering(index), with_kwargs=True)
            layer.register_forward_hook(self._leaving(index, last=index == len(layers) - 1))

    def arrive(self, layer: int, hidden: torch.Tensor, lowest: bool) -> None:
        """Note that the forward pass enters a layer with this input, where the backward pass leaves the lowest one."""
        self.layer = layer
        if lowest:
            self._mark(hidden.grad_fn, None)

    def leave(self, layer: int, hidden: torch.Tensor) -> None:
        """Note that the forward pass leaves a layer with this output, where the backward pass enters it."""
        self.layer = None
        self._mark(hidden.grad_fn, layer)

    def following_prefixes(self, update: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the `update` of a cache's layer: before the layers run, the i-th call is for the i-th layer."""

        def updating(cache: Any, keys: torch.Tensor, values: torch.Tensor, *more: Any, **named: Any) -> Any:
            if self.phase != FORWARD or self.layer is not None:
                return update(cache, keys, values, *more, **named)
            layer = self.layer = self._cached
            cached = update(cache, keys, values, *more, **named)
            self.layer, self._cached = None, layer + 1
            for tensor in cached:
                self._mark_until_split(tensor.grad_fn, layer)
            return cached

        return updating

    def _entering(self, index: int) -> Callable[..., None]:
        def enter(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            if self.phase != FORWARD:  # recomputed: the backward pass tracks the layer
                return
            self.layer = index
            if index == 0:
                hidden = inputs[0] if inputs else named["hidden_states"]
                self._mark(hidden.grad_fn, None)

        return enter

    def _leaving(self, index: int, last: bool) -> Callable[..., None]:
        def leave(_: nn.Module, __: Any, output: Any) -> None:
            if self.phase != FORWARD:
                return
            if last:
                self.layer = None
            hidden = output if isinstance(output, torch.Tensor) else output[0]
            self._mark(hidden.grad_fn, index)

        return leave

    def _mark(self, node: Any, layer: int | None) -> None:
        """Let the backward pass enter a layer, or leave layers, at this node."""
        if node is not None:

            def arrive(_: Any) -> None:
                self.layer = layer

            node.register_prehook(arrive)

    def _mark_until_split(self, node: Any, layer: int) -> None:
        """Mark nodes down to the split of the tensor that holds the prefixes of all layers."""
        while node is not None and not node.name().startswith("Split"):
            self._mark(node, layer)
            following = [after for after, _ in node.next_functions if after is not None]
            node = following[0] if following else None
        self._mark(node, None)
