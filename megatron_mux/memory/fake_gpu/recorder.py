"""Records what a program allocates and frees, below autograd: each new storage, and its end.

Views and in-place operators make no new storage. Scratch that a kernel allocates for itself and frees before it returns
is invisible and added from a table; workspaces that libraries keep are not added here.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Self

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_mux.attributes import replaced
from megatron_mux.memory.fake_gpu.step_position import (
    BACKWARD,
    FORWARD,
    INPUTS,
    JOIN,
    LOAD,
    OPTIMIZER,
    StepPosition,
)
from megatron_mux.memory.kernel_scratch import Scratch
from megatron_mux.memory.stream.events import Category, Moment, Stream, StreamBuilder

_VALUE = torch.ops.aten._local_scalar_dense.default
_DEVICE = torch.ops.prim.device.default
# Fake kernels make its random seeds on the meta device; a GPU has them in host memory unless a graph is captured.
_SEEDS_ON_HOST = "_scaled_dot_product_efficient_attention"

_STEPPED = (Category.PARAMETERS, Category.ADAPTERS, Category.GRADIENTS)
"""Categories that show which tensor an optimizer steps."""

Answer = Callable[[torch.Tensor], Any]
"""Returns the value to read from a fake tensor."""

ScratchOf = Callable[[str, Sequence[Any]], Sequence[Scratch]]
"""Returns the scratch of an operator, by its name and arguments."""


@dataclass
class _Block:
    size: int
    category: Category
    layer: int | None


@dataclass
class _Live:
    """A storage and the number of its block; `there` is false while the storage is resized to no bytes."""

    number: int
    there: bool
    ended: Any = None


@dataclass(frozen=True)
class _Entry:
    """A recorded event: `code` is the number of the block it allocates, or `~number` of the one it frees."""

    code: int
    phase: str
    layer: int | None
    operator: str

    def kind(self) -> tuple[str, int | None, bool]:
        """Phase, layer, and whether it is a free."""
        return self.phase, self.layer, self.code < 0


class Recorder(TorchDispatchMode):
    """Records while it is entered; enter it on top of a fake mode, if there is one.

    Meanwhile the garbage collector is disabled, which would free cycles at unpredictable moments.

    Args:
        place: Current phase and layer.
        device: Type of the device whose memory counts.
        vocabulary: Tensors made outside layers with this last dimension are logits.
        answer: Values read from fake tensors; None if tensors are real.
        scratch: Scratch to add for each operator; None adds nothing.
        late: Whether some tensors are there already: what is written in place is then no new storage.

    Attributes:
        vocabulary: As given; it may be set later.
    """

    def __init__(
        self,
        place: StepPosition,
        device: str,
        vocabulary: int,
        answer: Answer | None = None,
        scratch: ScratchOf | None = None,
        late: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._place = place
        self._devices = {device, "meta"}
        self.vocabulary = vocabulary
        self._answer = answer
        self._scratch = scratch
        self._late = late
        self._in_turn = False
        self._at: int | None = None
        self._blocks: list[_Block] = []
        self._log: list[_Entry] = []
        self._live: dict[int, _Live] = {}
        self._stack = contextlib.ExitStack()

    @property
    def events(self) -> int:
        """Number of events so far."""
        return len(self._log)

    def __enter__(self) -> Self:
        if gc.isenabled():
            gc.disable()
            self._stack.callback(gc.enable)
        # Resizing a storage is no operator.
        resize = torch.UntypedStorage.resize_

        def resizing(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            resized: torch.UntypedStorage = resize(storage, size)
            self._resized(storage)
            return resized

        self._stack.enter_context(replaced(torch.UntypedStorage, "resize_", resizing))
        return super().__enter__()  # type: ignore[no-any-return,no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._stack.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # a third of all calls
            return args[0].fake_device
        if func is _VALUE and self._answer is not None and isinstance(args[0], FakeTensor):
            return self._answer(args[0])
        made = func(*args, **(kwargs or {}))
        self._see(func, args, made)
        return made

    @contextlib.contextmanager
    def stepping(self, in_turn: bool) -> Iterator[None]:
        """Inside, an optimizer steps.

        Args:
            in_turn: Whether it steps one tensor at a time: then all allocations and frees belong to the layer of that
                tensor. Otherwise a block belongs to the layer of its operator's arguments, and frees to no layer.
        """
        self._in_turn, self._at = in_turn, None
        yield
        self._in_turn = False

    def label(self, tensor: torch.Tensor, category: Category) -> None:
        """Set the category of a live tensor."""
        if block := self._block_of(tensor):
            block.category = category

    def label_layer(self, tensor: torch.Tensor, layer: int | None) -> None:
        """Set the layer of a live tensor, which what an optimizer makes of it inherits."""
        if block := self._block_of(tensor):
            block.layer = layer

    def done(self) -> Stream:
        """All events so far.

        Successive frees are sorted in the order in which their blocks were allocated: autocast empties its cache in an
        order that changes from run to run, and the allocator's state afterwards does not depend on it.
        """
        builder = StreamBuilder()
        for (phase, layer, is_free), entries in itertools.groupby(self._log, key=_Entry.kind):
            if is_free:
                for number in sorted(~entry.code for entry in entries):
                    builder.free(number, Moment(phase, layer))
                continue
            for entry in entries:
                block = self._blocks[entry.code]
                # Weights and optimizer states have been labelled since.
                owner = block.layer if phase in (LOAD, JOIN, OPTIMIZER) else layer
                builder.allocate(block.size, Moment(phase, owner, entry.operator), category=block.category)
        return builder.done()

    def _see(self, func: Any, args: Sequence[Any], made: Any) -> None:
        """Record new storages among an operator's results."""
        if is_view(func) or (self._late and _is_argument(func)):
            return
        operator = func._schema.name.removeprefix("aten::")
        for index, tensor in enumerate(_tensors(made)):
            if tensor.device.type not in self._devices:
                continue
            # A model on the meta device exists before its weights are loaded.
            if tensor.device.type == "meta" and (operator == _SEEDS_ON_HOST or self._place.phase == LOAD):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata in self._live or not storage.nbytes():
                continue
            self._allocate(storage, self._category(tensor), operator, self._layer(args, made, index))
        if self._scratch is not None:
            self._take(self._scratch(operator, args))

    def _take(self, scratch: Sequence[Scratch]) -> None:
        """Record an operator's scratch: all allocations, then all frees."""
        phase, layer, first = self._place.phase, self._place.layer, len(self._blocks)
        for name, size in scratch:
            self._log.append(_Entry(len(self._blocks), phase, layer, name))
            self._blocks.append(_Block(size, Category.WORKSPACE, layer))
        self._log += [_Entry(~number, phase, layer, "") for number in range(first, len(self._blocks))]

    def _allocate(
        self, storage: torch.UntypedStorage, category: Category, operator: str, layer: int | None
    ) -> None:
        key = storage._cdata

        def end(_: Any) -> None:
            live = self._live.pop(key)
            if live.there:
                self._note_free(live.number)

        number = self._note(_Block(storage.nbytes(), category, layer), layer, operator)
        self._live[key] = _Live(number, True, weakref.ref(storage, end))

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """Record that a storage has released its memory or got some, for the same purpose."""
        live = self._live.get(storage._cdata)
        size = storage.nbytes()
        if live is None or (live.there and size == self._blocks[live.number].size):
            return
        if live.there:
            self._note_free(live.number)
        live.there = size > 0
        if live.there:
            block = replace(self._blocks[live.number], size=size)
            live.number = self._note(block, self._place.layer, "resize_")

    def _note(self, block: _Block, layer: int | None, operator: str) -> int:
        """Record an allocation; returns the block's number."""
        self._blocks.append(block)
        self._log.append(_Entry(len(self._blocks) - 1, self._place.phase, layer, operator))
        return len(self._blocks) - 1

    def _note_free(self, number: int) -> None:
        layer = self._at if self._in_turn else self._place.layer
        self._log.append(_Entry(~number, self._place.phase, layer, ""))

    def _layer(self, args: Sequence[Any], made: Any, index: int) -> int | None:
        """The layer of a new block. An optimizer works outside layers: its blocks belong to the layer of arguments."""
        if self._place.phase not in (JOIN, OPTIMIZER) or not args:
            return self._place.layer
        of = args[0]
        if isinstance(of, (list, tuple)):  # the i-th result is for the i-th tensor
            of = of[index] if isinstance(made, (list, tuple)) else None
        block = self._block_of(of) if isinstance(of, torch.Tensor) else None
        if self._in_turn:
            if block is not None and block.category in _STEPPED:
                self._at = block.layer
            return self._at
        return self._place.layer if block is None else block.layer

    def _block_of(self, tensor: torch.Tensor) -> _Block | None:
        found = self._live.get(tensor.untyped_storage()._cdata)
        return None if found is None else self._blocks[found.number]

    def _category(self, tensor: torch.Tensor) -> Category:
        """Category of a new tensor, as far as its creation shows."""
        phase = self._place.phase
        if phase == LOAD:
            return Category.PARAMETERS
        if phase == INPUTS:
            return Category.OTHER
        if phase not in (FORWARD, BACKWARD):
            return Category.WORKSPACE
        logits = self._place.layer is None and tensor.dim() > 1 and tensor.shape[-1] == self.vocabulary
        return Category.LOGITS if logits else Category.ACTIVATIONS


@cache
def is_view(func: Any) -> bool:
    """Whether an operator returns a view of existing memory, perhaps a library's own (gloo's copy of what it reduces).

    The result of `torch.tensor` first appears as a view.
    """
    alias = _alias_of(func)
    return alias is not None and not alias.is_write and func is not torch.ops.aten.lift_fresh.default


@cache
def _is_argument(func: Any) -> bool:
    """Whether an operator returns what it writes into."""
    alias = _alias_of(func)
    return alias is not None and alias.is_write


def _alias_of(func: Any) -> Any:
    """What an operator's first result is an alias of; None if it is new, or there is none."""
    return func._schema.returns[0].alias_info if func._schema.returns else None


def _tensors(made: Any) -> Iterator[torch.Tensor]:
    """The tensors among an operator's results, which may be nested lists."""
    if isinstance(made, torch.Tensor):
        yield made
    elif isinstance(made, (list, tuple)):
        for part in made:
            yield from _tensors(part)
