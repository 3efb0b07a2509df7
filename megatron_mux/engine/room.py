"""Memory that is taken beforehand, for what must not want for any: there other ranks would wait for this one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Room:
    """Bytes for one thing at a time: gradients that are summed over ranks, a message of a pass that found no memory.

    Args:
        device: Where.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes = self._taken(0)

    @property
    def size(self) -> int:
        """Bytes."""
        return self._bytes.nbytes

    def take(self, size: int) -> None:
        """Be of `size` bytes from now on.

        Raises:
            torch.OutOfMemoryError: There is no memory; then it is as it was.
        """
        before = self.size
        if size == before:
            return
        self._bytes = self._taken(0)
        try:
            self._bytes = self._taken(size)
        except torch.OutOfMemoryError:
            self._bytes = self._taken(before)
            raise

    def of(self, count: int, dtype: torch.dtype) -> Tensor:
        """Room for so many elements, which hold anything: always the same bytes.

        Raises:
            torch.OutOfMemoryError: It is too small, and there is no memory for more.
        """
        size = count * dtype.itemsize
        if size > self.size:
            self.take(size)
        return self._bytes[:size].view(dtype)

    def surely(self, make: Callable[[], T]) -> T:
        """What `make` makes of a little memory: where there is none, of the room's own, which is then taken again.

        Args:
            make: May be called twice.
        """
        with suppress(torch.OutOfMemoryError):
            return make()
        size, self._bytes = self.size, self._taken(0)
        made = make()
        with suppress(torch.OutOfMemoryError):
            self.take(size)
        return made

    def _taken(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)
