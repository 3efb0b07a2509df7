"""The adapter kinds by `peft_type`: a new one is a file of this package and its name here."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from megatron_mux.adapters.kind import AdapterSpec

_FILES = (
    "lora",
    "ia3",
    "prefix",
    "bottleneck",
    "diff_pruning",
    "vera",
    "loha",
)
"""Each is a module of this package with a `KIND`, its section's class."""


def by_type(kinds: Iterable[type[AdapterSpec]]) -> dict[str, type[AdapterSpec]]:
    """Kinds by the one value that their `peft_type` takes.

    Raises:
        ValueError: Two kinds take the same, or one leaves out what every kind must say.
    """
    by_name: dict[str, type[AdapterSpec]] = {}
    for kind in kinds:
        name = kind.kind()
        left_out = {
            *kind.__abstractmethods__,
            *(n for n in ("refused", "run_time") if not getattr(kind, n, None)),
        }
        if left_out:
            raise ValueError(f"adapter kind {name} lacks {', '.join(sorted(left_out))}")
        if name in by_name:
            raise ValueError(f"two adapter kinds are called {name}: {by_name[name]} and {kind}")
        by_name[name] = kind
    return by_name


KINDS = by_type(importlib.import_module(f"megatron_mux.adapters.{name}").KIND for name in _FILES)
"""The sections of all kinds."""
