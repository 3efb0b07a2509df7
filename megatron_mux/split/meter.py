"""Measures the memory that a computation takes beyond what was there before it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")


class _Storages(TorchDispatchMode):
    """Bytes of storages that operators have made and that are still there, and the most of them at once.

    Attributes:
        now, peak: Bytes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
        }
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self._count(leaf, before)
        return made

    def _count(self, tensor: Tensor, before: set[int]) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in before or key in self._known:
            return
        size = storage.nbytes()
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


@dataclass(frozen=True)
class Peak:
    """Bytes that a computation took.

    Attributes:
        peak: The most at once, beyond what was there before.
        lasting: What is still there.
    """

    peak: int
    lasting: int


def measure(device: torch.device, compute: Callable[[], T]) -> tuple[T, Peak]:
    """Run a computation and measure its memory: on a GPU what the allocator holds for tensors, on a CPU the storages
    that operators make. Scratch memory inside a CPU's operators is not counted.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = compute()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
        return result, Peak(peak, torch.cuda.memory_allocated(device) - before)
    with _Storages() as storages:
        result = compute()
    return result, Peak(storages.peak, storages.now)
