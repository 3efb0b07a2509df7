"""Every optimizer by its spellings in `transformers.TrainingArguments.optim`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from megatron_mux.optimizers.adafactor import Adafactor
from megatron_mux.optimizers.adamw import AdamW
from megatron_mux.optimizers.adamw_8bit import AdamW8bit
from megatron_mux.optimizers.lion import Lion
from megatron_mux.optimizers.optimizer import Optimizer
from megatron_mux.optimizers.sgd import SGD


def _by_name(kinds: Iterable[type[Optimizer]]) -> Mapping[str, type[Optimizer]]:
    found: dict[str, type[Optimizer]] = {}
    for kind in kinds:
        for name in kind.names:
            if name in found:
                raise ValueError(f"two optimizers are called {name}: {found[name].__name__}, {kind.__name__}")
            found[name] = kind
    return MappingProxyType(found)


OPTIMIZERS: Mapping[str, type[Optimizer]] = _by_name((AdamW, AdamW8bit, Lion, Adafactor, SGD))
"""Optimizers by name; the first is the default of `transformers`."""
