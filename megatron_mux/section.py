"""The base of all sections of `tasks.yaml`: strict fields, and known fields that are refused by name."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainValidator,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

# YAML 1.1 reads `1e-3` as text, since it wants a dot and a signed exponent; people write it all the same.
_EXPONENT = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+")

_LONGEST_VALUE = 60

# Beyond any real use: what is larger is a slip, and would fail where it can no longer be said in a sentence.
LARGEST_SIZE = 65_536
"""Maximum of a dimension of an adapter's weights."""
LARGEST_BATCH = 1_000_000
"""Maximum number of sequences, or of parts of a batch."""
LARGEST_COUNT = 1_000_000_000
"""Maximum number of steps and tokens."""

BASE_DIRECTORY = "base_directory"
"""Key of the validation context for the directory that relative paths start from."""


@dataclass(frozen=True)
class Refused:
    """A field of another library that is not supported.

    Attributes:
        advice: What to say of it; completes "adapter.use_dora: ...".
        neutral: Values that ask for nothing: the field is then dropped without a word.
        always: Any value asks for nothing (bookkeeping of the other library).
    """

    advice: str
    neutral: tuple[Any, ...] = (None, False)
    always: bool = False

    def asks_for_nothing(self, value: Any) -> bool:
        """Whether `value` can be ignored."""
        return self.always or any(type(value) is type(n) and value == n for n in self.neutral)


class Section(BaseModel):
    """A mapping in `tasks.yaml`: unknown keys and wrong types are refused, nothing is converted silently."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    refused: ClassVar[Mapping[str, Refused]] = {}
    """Unsupported fields of the library whose spelling the section follows."""

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {
            k: v for k, v in value.items() if not (k in cls.refused and cls.refused[k].asks_for_nothing(v))
        }


def problem(text: str) -> PydanticCustomError:
    """Make a validation error with our own wording, which follows "training.max_steps: "."""
    return PydanticCustomError("mux", "{problem}", {"problem": text})


def plain(text: str) -> str:
    """Format a text for a message of one line: quoted if it has unprintable characters."""
    return text if text.isprintable() else repr(text)


def shown(value: Any) -> str:
    """Format any value for a message, in few characters."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    try:
        text = repr(value)
    except RecursionError:
        text = f"a nested {type(value).__name__}"
    except ValueError:  # Python does not write out numbers of thousands of digits
        text = "a number of thousands of digits"
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def number(value: Any) -> Any:
    """The value, or the number that it is although YAML reads it as text."""
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def _whole_if_whole(value: float) -> float:
    return int(value) if value.is_integer() else value


def _path(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, str):
        if not value.strip() or "\0" in value:
            raise problem(f"must be a path, got {shown(value)}")
        value = Path(os.path.expanduser(value))
    if isinstance(value, Path):
        base = (info.context or {}).get(BASE_DIRECTORY)
        return value if base is None else Path(base) / value
    raise problem(f"must be a path, got {shown(value)}")


def _paths(value: Any, info: ValidationInfo) -> Any:
    if not isinstance(value, (list, tuple)):
        return _path(value, info)
    if not value:
        raise problem("must be a path or a list of paths, got an empty list")
    return tuple(_path(one, info) for one in value)


def _modules(value: Any) -> list[str] | str | None:
    if value is None:
        return None
    if isinstance(value, str) and value:
        try:
            re.compile(value)
        except re.error as error:
            raise problem(
                f"{value!r} is neither a list of module names nor a regular expression: {error}"
            ) from None
        return value
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) and v for v in value):
        raise problem(f"must be a list of module names such as [q_proj, v_proj], got {shown(value)}")
    return list(dict.fromkeys(value))


def _targets(value: Any) -> list[str] | str | None:
    if value == []:
        raise problem("must name at least one module, such as [q_proj, v_proj], or be all-linear")
    return _modules(value)


Number = Annotated[float, BeforeValidator(number)]
"""A finite number; `1e-3` counts although YAML reads it as text."""

TidyNumber = Annotated[float, BeforeValidator(number), AfterValidator(_whole_if_whole)]
"""A number that stays an `int` when it is whole, as other libraries expect to read it."""

FilePath = Annotated[Path, BeforeValidator(_path)]
"""A path; relative ones start from the task file's directory."""

FilePaths = Annotated[Path | tuple[Path, ...], BeforeValidator(_paths)]
"""A path, or a list of them; relative ones start from the task file's directory."""

Modules = Annotated[list[str] | str | None, PlainValidator(_modules)]
"""Hugging Face module names; as in peft, a single text is a regular expression for whole paths."""

Targets = Annotated[list[str] | str | None, PlainValidator(_targets)]
"""The same, at least one of them; or `all-linear`."""
