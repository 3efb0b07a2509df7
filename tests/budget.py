"""Memory that can run out without a GPU: bytes of live tensors are counted as they are made, and limited."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from megatron_mux.backbone.model import Backbone
from megatron_mux.batch.packed_batch import PackedBatch


class Budget(TorchDispatchMode):
    """While it is entered, what operators allocate is counted; beyond `limit` they fail as on a full GPU.

    With several ranks it belongs on top of `tests.distributed.exchanges.OnCopies`: a budget would count what gloo's
    threads still hold.

    Args:
        limit: See below.
        error: What they raise; another one than a GPU's is not recovered from.

    Attributes:
        limit: Bytes; None: not limited.
        held, peak: Bytes now and at most.
        failures: Allocations that found no room.
    """

    def __init__(self, limit: float | None = None, error: type[Exception] = torch.OutOfMemoryError) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit = limit
        self._error = error
        self.held = self.peak = 0
        self.failures = 0
        self._sizes: dict[int, int | None] = {}  # None: from before
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> Budget:
        # Weights that are brought for use fill a storage that was emptied, which is no operator's work.
        torch.UntypedStorage.resize_ = self._resizing()  # type: ignore[method-assign]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and (storage := leaf.untyped_storage())._cdata not in self._sizes:
                self._sizes[storage._cdata] = None  # from before: the backbone, the records
                weakref.finalize(storage, self._free, storage._cdata)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._sizes or storage.device.type == "meta":
            return
        self._take(size)
        self._sizes[key] = size
        weakref.finalize(storage, self._free, key)

    def _take(self, size: int) -> None:
        if self.limit is not None and size > 0 and self.held + size > self.limit:
            self.failures += 1
            raise self._error(f"tried to allocate {size} bytes. {self.held} are held")
        self.held += size
        self.peak = max(self.peak, self.held)

    def _free(self, key: int) -> None:
        self.held -= self._sizes.pop(key, None) or 0

    def _resizing(self) -> Callable[..., Any]:
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            before = self._sizes.get(storage._cdata)
            if before is not None:
                self._take(size - before)
                self._sizes[storage._cdata] = size
            return self._resize(storage, size)

        return resize


def on_the_host() -> AbstractContextManager[None]:
    """What is made here would not be on a GPU: a budget does not count it."""
    return _disable_current_modes()


@contextmanager
def failing(stages: Sequence[Backbone], when: Callable[[PackedBatch], bool]) -> Iterator[None]:
    """Forward passes of these stages find no memory for batches for which `when` says so."""

    def wrapped(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(batch: PackedBatch, *args: Any, **more: Any) -> Tensor:
            if when(batch):
                raise torch.OutOfMemoryError("made to fail. Nothing is short")
            return forward(batch, *args, **more)

        return call

    for stage in stages:
        stage.forward = wrapped(stage.forward)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for stage in stages:
            del stage.forward  # the instance's own: the class's is seen again
