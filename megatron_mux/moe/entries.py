"""Checks of the files' numeric arrays that name the entry at fault, such as `access[3][17]`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from megatron_mux.errors import UserError
from megatron_mux.files import read_json
from megatron_mux.section import shown

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

Model = TypeVar("Model", bound=BaseModel)


def index(*position: int) -> str:
    """Write a position behind a name: `[3][17]`."""
    return "".join(f"[{i}]" for i in position)


def to_array(value: Any, name: str, shape: Sequence[int | None], axes: Sequence[str]) -> Floats:
    """Convert nested lists of finite, non-negative numbers.

    Args:
        shape: Length of each axis; None: any length, the same for all of its lists.
        axes: What an entry along each axis is, for messages, such as `("layer", "expert")`.

    Raises:
        ValueError: An entry is missing, no number, negative, infinite or NaN; the message begins with its name.
    """
    _check_entries(value, name, 0, list(shape), axes)
    try:
        array = np.asarray(value, dtype=np.float64)
    except OverflowError:
        raise ValueError(f"{name}: has a number of more than 300 digits") from None
    for position in np.argwhere(~(np.isfinite(array) & (array >= 0)))[:1]:
        where = name + index(*map(int, position))
        raise ValueError(f"{where}: must be a number of at least 0, got {array[tuple(position)]:g}")
    return array


def _check_entries(value: Any, name: str, axis: int, lengths: list[int | None], axes: Sequence[str]) -> None:
    """Check that lists of an axis, and those inside, have one length each; fills in the lengths that are None."""
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{name}: must be a list with an entry for each {axes[axis]}, got {shown(value)}")
    if lengths[axis] is None:
        lengths[axis] = len(value)
    if len(value) != lengths[axis] or not value:
        wanted = lengths[axis] or "at least one"
        raise ValueError(
            f"{name}: has {len(value)} entries, but must have {wanted}, one for each {axes[axis]}"
        )
    if axis + 1 < len(lengths):
        for i, part in enumerate(value):
            _check_entries(part, name + index(i), axis + 1, lengths, axes)
    elif not set(map(type, value)) <= {int, float}:
        i, entry = next((i, entry) for i, entry in enumerate(value) if type(entry) not in (int, float))
        raise ValueError(f"{name}{index(i)}: must be a number of at least 0, got {shown(entry)}")


def read_model(path: str | Path, kind: type[Model], what: str) -> Model:
    """Read a JSON file into a pydantic model.

    Args:
        what: What the file should be, such as "an access profile".

    Raises:
        UserError: The file cannot be read, or an entry is wrong; names the file and each such entry.
    """
    content = read_json(Path(path))
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise UserError(*(f"{path}: {line}" for line in sentences(error, what))) from None


def sentences(error: ValidationError, what: str) -> list[str]:
    """Describe each problem that pydantic found, beginning with the entry's name."""
    lines = []
    for detail in error.errors(include_url=False):
        where = "".join(
            index(part) if isinstance(part, int) else f".{part}"
            for part in detail["loc"]
            if not str(part).startswith(("function-", "list[", "dict["))
        ).lstrip(".")
        message = str(detail.get("ctx", {}).get("error", detail["msg"]))
        if detail["type"] == "missing":
            message = f"is missing: give {what}"
        elif detail["type"] == "extra_forbidden":
            message = "is not known: check its spelling"
        elif detail["type"] != "value_error":
            message = f"{message[0].lower()}{message[1:]}, got {shown(detail['input'])}"
        elif where and message.startswith(where):
            where = ""
        lines.append(f"{where}: {message}" if where else message)
    return list(dict.fromkeys(lines))
