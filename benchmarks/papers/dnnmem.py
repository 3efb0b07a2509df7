"""DNNMem (Gao et al., ESEC/FSE 2020) as LLMem's section 3.1 rebuilds it: one GPU, fp32, live tensors along the graph.

The peak is the sum of the CUDA context, the weights, their gradients, a constant buffer of the allocator, and the
largest total of live tensors at any operator of the forward pass: its inputs and outputs, and tensors not released yet,
each rounded up to 512 bytes.

The paper is read as follows:

- The graph is the model's own, up to its logits: "the computation graph from a given pre-trained DL model". The loss
  is not part of it.
- Everything is fp32, since DNNMem "does not handle mixed precision". Gradients have separate memory, since DNNMem does
  not know that they "share the same GPU memory space" with parameters (section 3.2). Optimizer states are left out, as
  in that section.
- Gradient checkpointing (section 7.2): a tensor made in a layer lives until its last reader in that layer. Tensors that
  other layers read (a layer's output), and those made outside layers, are kept for the backward pass.
- Attention runs as separate operators that keep their scores: fused kernels came after the paper's PyTorch 2.0 models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_mux.errors import UserError
from megatron_mux.memory.sizes import MIB
from megatron_mux.memory.tensors import Skeleton
from megatron_mux.memory.worker import one_line


@dataclass(frozen=True)
class Constants:
    """The constants of the estimate."""

    context: int = 512 * MIB
    """Approximate size of the CUDA context, which neither paper states."""
    buffer: int = 64 * MIB
    """Memory of the allocator beyond live tensors (section 3.1)."""
    alignment: int = 512
    """Sizes of tensors are rounded up to a multiple of this many bytes."""
    value: int = 4
    """Bytes of a weight and of its gradient."""


_NEVER_RELEASED = 1 << 60
"""Last reader of a tensor that is kept for the backward pass."""


@dataclass
class _Tensor:
    """A tensor of the graph."""

    size: int
    """Bytes."""
    born: int
    """Index of the operator that makes it."""
    read: int
    """Index of the last operator that reads it, or `_NEVER_RELEASED`."""
    layer: int | None
    """Index of the layer that makes it; None outside layers."""


class DNNMem:
    """The estimate for one model and sequence length.

    Args:
        skeleton: The model.
        length: Tokens of a sequence.
        constants: The estimate's constants.

    Raises:
        UserError: The model's forward pass cannot be traced on the meta device.
    """

    def __init__(self, skeleton: Skeleton, length: int, constants: Constants = Constants()) -> None:
        self.constants = constants
        self.weights = sum(self._aligned(t.count * constants.value) for t in skeleton.tensors.tensors)
        # Sizes are linear in the batch: two batches give both coefficients. (Models treat a batch of 1 differently.)
        two, three = (_graph(skeleton, batch, length) for batch in (2, 3))
        if [(t.born, t.read) for t in two] != [(t.born, t.read) for t in three]:
            raise UserError(f"dnnmem: {skeleton.path}: its graph depends on the number of sequences.")
        self._tensors = [(a, b.size - a.size) for a, b in zip(two, three, strict=True)]

    def peak(self, batch: int) -> int:
        """Bytes at the peak.

        Args:
            batch: Sequences.
        """
        return sum(self.breakdown(batch).values())

    def breakdown(self, batch: int) -> dict[str, int]:
        """Bytes at the peak, by kind.

        Args:
            batch: Sequences.
        """
        return {
            "base": self.constants.context,
            "parameters": self.weights,
            "gradients": self.weights,
            "outputs": self._peak_of_live_tensors(batch),
            "buffer": self.constants.buffer,
        }

    def _peak_of_live_tensors(self, batch: int) -> int:
        """Largest total of live tensors at any operator, in bytes."""
        changes: dict[int, int] = {}
        for tensor, more in self._tensors:
            size = self._aligned(tensor.size + (batch - 2) * more)
            changes[tensor.born] = changes.get(tensor.born, 0) + size
            changes[tensor.read + 1] = changes.get(tensor.read + 1, 0) - size
        most = alive = 0
        for place in sorted(changes):
            alive += changes[place]
            most = max(most, alive)
        return most

    def _aligned(self, count: int) -> int:
        return -(-count // self.constants.alignment) * self.constants.alignment


def _graph(skeleton: Skeleton, batch: int, length: int) -> list[_Tensor]:
    """Trace a forward pass; returns its tensors, including the input, in the order in which they are made."""
    tokens, mask = (torch.ones(batch, length, dtype=torch.long, device="meta") for _ in range(2))
    recorder = _Recorder(skeleton.module, tokens, mask)
    with recorder:
        try:
            with torch.no_grad(), torch.device("meta"):
                skeleton.module(input_ids=tokens, attention_mask=mask, use_cache=False)
        except Exception as error:  # models raise anything when tensors have no values
            message = f"dnnmem: {skeleton.path}: its forward pass cannot be traced: {one_line(error)}"
            raise UserError(message) from None
    return recorder.tensors


class _Recorder(TorchDispatchMode):
    """Records for each storage the operator that makes it and the last one that reads it."""

    def __init__(self, module: nn.Module, *inputs: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors: list[_Tensor] = []
        self._places: dict[int, _Tensor] = {}
        self._held: list[torch.UntypedStorage] = []  # keeps addresses unique
        self._operators = 0
        self._layer: int | None = None
        for weight in (*module.parameters(), *module.buffers()):
            self._places[self._key(weight)] = _Tensor(0, 0, 0, None)
        for tensor in inputs:
            self._note(tensor)
        self._hooks = [
            hook for place, layer in enumerate(_layers(module)) for hook in self._watch(place, layer)
        ]

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._operators += 1
        for tensor in _tensors((args, kwargs)):
            self._note(tensor)
        for tensor in _tensors(result):
            self._note(tensor)
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        """Record that the current operator makes or reads a tensor."""
        key = self._key(tensor)
        found = self._places.get(key)
        if found is None:
            size = tensor.untyped_storage().nbytes()
            found = _Tensor(size, self._operators, self._operators, self._layer)
            self._places[key] = found
            self.tensors.append(found)
        inside = self._layer is not None and found.layer == self._layer
        found.read = max(found.read, self._operators if inside else _NEVER_RELEASED)

    def _key(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        self._held.append(storage)
        return int(storage._cdata)

    def _watch(self, place: int, layer: nn.Module) -> tuple[Any, Any]:
        def enter(*_: Any) -> None:
            self._layer = place

        def leave(*_: Any) -> None:
            self._layer = None

        return layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _layers(module: nn.Module) -> list[nn.Module]:
    """Layers that gradient checkpointing recomputes."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)]
