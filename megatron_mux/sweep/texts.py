"""Settings and figures of configurations as tables show them: short, and different where they differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_mux.tasks.sweep import value_text

_HEADINGS: Mapping[str, str] = {
    "adapter.lora_alpha": "alpha",
    "adapter.lora_dropout": "dropout",
    "adapter.peft_type": "kind",
    "adapter.target_modules": "modules",
    "data.path": "data",
    "eval.path": "eval",
    "training.gradient_accumulation_steps": "accumulate",
    "training.learning_rate": "lr",
    "training.lr_scheduler_type": "schedule",
    "training.num_train_epochs": "epochs",
    "training.per_device_train_batch_size": "batch",
}
_LONG = 16
"""Characters of a list from which on its first value and the number of the others stand for it."""
_DECIMALS = (3, 6)
"""Of figures: at least, and at most."""
_LARGE = 1e7
"""Figures from which on decimals say nothing."""


def short_heading(key: str) -> str:
    """A short heading for a field: its own name, unless that is long or says little."""
    return _HEADINGS.get(key, key.rpartition(".")[2])


def headings(fields: Sequence[str]) -> dict[str, str]:
    """Short headings; of fields that would have the same one, their whole names."""
    short = [short_heading(key) for key in fields]
    return {key: own if short.count(own) == 1 else key for key, own in zip(fields, short, strict=True)}


def value_texts(key: str, values: Sequence[Any]) -> list[str]:
    """A field's values in a few characters, in as many more as different ones need to look different."""
    wanted = len(set(map(repr, values)))
    texts: list[str] = []
    for form in _forms(key, values):
        texts = [form(value) for value in values]
        if len(set(texts)) == wanted:
            break
    return texts


def _forms(key: str, values: Sequence[Any]) -> Iterator[Callable[[Any], str]]:
    """Yield ways to write a field's values, the shortest first."""
    if key.endswith(".path"):
        yield partial(value_text, key)
        paths = [path for value in values for path in (value if isinstance(value, list | tuple) else [value])]
        for parts in range(1, max((len(Path(str(path)).parts) for path in paths), default=0) + 1):
            yield partial(_path_text, parts)
        return
    if any(len(value_text(key, value)) > _LONG for value in values):
        yield partial(_list_text, key)
    yield partial(value_text, key)


def _path_text(parts: int, value: Any) -> str:
    """The last parts of a path, or of each of several."""
    paths = value if isinstance(value, list | tuple) else [value]
    return ".".join("/".join(Path(str(path)).parts[-parts:]) for path in paths)


def _list_text(key: str, value: Any) -> str:
    """The first value of a list, and how many others there are."""
    if isinstance(value, list | tuple) and len(value) > 1:
        return f"{value_text(key, value[0])}+{len(value) - 1}"
    return value_text(key, value)


def figure_texts(values: Sequence[float | None]) -> list[str]:
    """Figures with equally many decimals, enough for neighbours that differ to look different, within bounds."""
    usual = [value for value in values if value is not None and abs(value) < _LARGE]
    pairs = [(a, b) for a, b in pairwise(usual) if a != b]
    least, most = _DECIMALS
    enough = (n for n in range(least, most) if all(f"{a:.{n}f}" != f"{b:.{n}f}" for a, b in pairs))
    decimals = next(enough, most) if pairs else least

    def text(value: float | None) -> str:
        if value is None:
            return "-"
        return f"{value:.{decimals}f}" if math.isfinite(value) and abs(value) < _LARGE else f"{value:.4g}"

    return [text(value) for value in values]
