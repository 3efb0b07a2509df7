"""Converters of flags' values, for argparse."""

from __future__ import annotations

import argparse
import math
import signal
from collections.abc import Callable
from pathlib import Path

from megatron_mux.errors import UserError
from megatron_mux.hub_cache import find_model
from megatron_mux.memory.sizes import parse_size


def destination(flag: str) -> str:
    """The name under which argparse keeps a flag's value."""
    return flag.removeprefix("--").replace("-", "_")


def flag_of(name: str) -> str:
    """The flag whose value argparse keeps under a name."""
    return f"--{name.replace('_', '-')}"


def path(text: str) -> Path:
    """A path that is not empty."""
    if not text.strip() or "\0" in text:
        raise argparse.ArgumentTypeError(f"must be a path, got {text!r}")
    return Path(text)


def model(text: str) -> Path:
    """The directory of a model, or `org/name` of one in the Hugging Face cache."""
    try:
        return find_model(path(text))
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def named_path(text: str) -> tuple[str, Path]:
    """Convert to a name and a path: NAME=DIR, or DIR alone, whose task's name counts."""
    name, separator, directory = text.partition("=")
    if not separator:
        of = path(text).absolute()
        return (of.parent if of.name.startswith("checkpoint-") else of).name, path(text)
    if not (name and directory):
        raise argparse.ArgumentTypeError(f"must be NAME=DIR, got {text!r}")
    return name, path(directory)


def path_or_auto(text: str) -> Path | str:
    """A path that is not empty, or the word `auto` (`./auto` is a file)."""
    return text if text == "auto" else path(text)


def at_least(least: int, most: int | None = None) -> Callable[[str], int]:
    """A whole number of at least `least`, and of `most` at most."""
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"

    def whole(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"must be a whole number {bounds}, got {text!r}")
        return value

    return whole


def share(text: str) -> float:
    """A number above 0 and below 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"must be a number above 0 and below 1, got {text!r}")
    return value


def minutes(least: float) -> Callable[[str], float]:
    """A number of minutes, of at least `least`."""

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"must be a number of minutes, at least {least}, got {text!r}")
        return value

    return number


def signal_name(text: str) -> str:
    """The name of a signal that a process can handle, such as SIGUSR1."""
    if text not in signal.Signals.__members__ or text in ("SIGKILL", "SIGSTOP"):
        raise argparse.ArgumentTypeError(f"must be a signal such as SIGUSR1, got {text!r}")
    return text


def only(value: str, why: str) -> Callable[[str], str]:
    """A fixed value; any other one is refused, with the reason."""

    def fixed(text: str) -> str:
        try:
            same = float(text) == float(value)
        except ValueError:
            same = text == value
        if not same:
            raise argparse.ArgumentTypeError(f"only {value} is supported, got {text!r}: {why}")
        return text

    return fixed


def size(text: str) -> int:
    """A number of bytes, see `parse_size`."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def auto_or_none(convert: Callable[[str], int]) -> Callable[[str], int | str | None]:
    """What `convert` takes, or the word `auto`, or the word `none` for None."""

    def value(text: str) -> int | str | None:
        return {"auto": "auto", "none": None}[text] if text in ("auto", "none") else convert(text)

    return value


def counts(text: str) -> tuple[int, ...]:
    """Numbers of at least 0, separated by commas."""
    return tuple(at_least(0)(part) for part in text.split(","))
