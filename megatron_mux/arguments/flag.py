"""A flag as a field of a dataclass: its text in `--help`, its default and its options of argparse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from megatron_mux.arguments.values import at_least, model, path

COUNT: Mapping[str, Any] = {"type": at_least(1), "metavar": "N"}
DIRECTORY: Mapping[str, Any] = {"type": path, "metavar": "DIR"}
MODEL: Mapping[str, Any] = {"type": model, "metavar": "DIR"}
FILE: Mapping[str, Any] = {"type": path, "metavar": "FILE"}


def flag(section: str, said: str, default: Any = None, **options: Any) -> Any:
    """A field that `add_flags` makes a flag of.

    Args:
        section: The group of flags it belongs to.
        said: Its text in `--help`.
        default: Its value if it is not given.
        options: Further arguments of `argparse.ArgumentParser.add_argument`.
    """
    return field(metadata={"section": section, "options": {"help": said, "default": default, **options}})
