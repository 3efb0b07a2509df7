"""Python's garbage collector, kept from visiting a million objects in the middle of a step."""

from __future__ import annotations

import gc


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
