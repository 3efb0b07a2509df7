"""Python's garbage collector, kept from visiting a million objects in the middle of a step."""

from __future__ import annotations

import gc

from megatron_mux.training.callback import Callback


def freeze_objects() -> None:
    """Exempt all objects made so far from collections.

    Importing torch, transformers and Megatron-Core leaves about a million objects that live as long as the process. A
    full collection visits them all, which takes a third of a second, whenever enough objects were made since the last:
    a save makes ten thousand.
    """
    gc.collect()
    gc.freeze()


def unfreeze_objects() -> None:
    """Undo `freeze_objects`."""
    gc.unfreeze()


class FrozenObjects(Callback):
    """Freezes the objects that the first steps have left, until the run ends."""

    _is_frozen = False

    def after_first_steps(self, is_last: bool) -> None:
        """Freeze them, once."""
        if not self._is_frozen:
            freeze_objects()
            self._is_frozen = True

    def close(self) -> None:
        """Have them collected again."""
        unfreeze_objects()
