"""What is done with each flag of Megatron-LM's training scripts; the table itself is megatron_flags.txt."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

Treatment = Literal["honoured", "fixed", "without effect", "per task", "refused"]

_TABLE = Path(__file__).with_suffix(".txt")
_HEADING = re.compile(rf"\[({'|'.join(get_args(Treatment))})(?:: (.+))?\]")
_FLAG = re.compile(r"(--[a-z0-9_-]+)(?: ([^#\s]+))?(\s+# 0\.16)?")


@dataclass(frozen=True)
class MegatronFlag:
    """A line of the table.

    Attributes:
        treatment: `honoured`: it is one of our flags; `fixed`: accepted with one value; `without effect`: accepted;
            `per task`: a key of tasks.yaml does it; `refused`.
        reason: Why it is refused or fixed, and what to do; of a flag `per task`, that key.
        value: The value of a `fixed` flag; of one `without effect` `VALUE` or, if it takes any number, `VALUE...`.
        is_old: Whether Megatron-LM 0.19 no longer has it.
    """

    treatment: Treatment
    reason: str = ""
    value: str = ""
    is_old: bool = False


def _read() -> Iterator[tuple[str, MegatronFlag]]:
    heading: tuple[Treatment, str] | None = None
    for line in _TABLE.read_text().splitlines():
        if found := _HEADING.fullmatch(line):
            heading = cast(Treatment, found[1]), found[2] or ""
        elif found := _FLAG.fullmatch(line):
            assert heading is not None
            yield found[1], MegatronFlag(*heading, found[2] or "", found[3] is not None)
        elif line and not line.startswith("#"):
            raise ValueError(f"{_TABLE.name}: cannot be read: {line!r}")


MEGATRON_FLAGS: Mapping[str, MegatronFlag] = dict(_read())
"""Every flag of Megatron-LM's parser, in 0.16.1 and 0.19."""


def flags_by(treatment: Treatment) -> dict[str, MegatronFlag]:
    """The flags of a treatment."""
    return {name: flag for name, flag in MEGATRON_FLAGS.items() if flag.treatment == treatment}
