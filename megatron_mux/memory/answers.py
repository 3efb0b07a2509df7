"""Keeps answers of a program, word for word, until something they depend on changes."""

from __future__ import annotations

import hashlib
import json
import os
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_mux.memory.caching.settings import NAMES
from megatron_mux.memory.store import Store, versions

_ENVIRONMENT = ("CUBLAS_WORKSPACE_CONFIG", *NAMES)
_READ = ("config.json", "adapter_config.json", "tokenizer*", "vocab*", "merges*")
"""Files of a directory that an answer may depend on; a user may well write the answer to another one in it."""
_LARGE = 1 << 20
"""Bytes of a file beyond which it is not read to tell whether it has changed."""


@dataclass(frozen=True)
class SavedOutput:
    """The output of a program.

    Attributes:
        output: Standard output.
        errors: Lines of standard error.
    """

    output: str
    errors: Sequence[str]


class Answers:
    """Answers of a program, by its arguments and everything else they depend on.

    That is the contents of files that arguments name, library versions and this package's sources, and the environment.

    Args:
        kept: Store for the answers.
        arguments: Arguments of the program.
        more: What else an answer depends on, such as the width of a terminal.
    """

    def __init__(self, kept: Store, arguments: Namespace, more: object = None) -> None:
        self._kept = kept
        self._about = {
            "arguments": {name: _key(value) for name, value in sorted(vars(arguments).items())},
            "environment": {name: os.environ.get(name) for name in _ENVIRONMENT},
            "versions": versions(),
            "more": more,
        }

    def read(self) -> SavedOutput | None:
        """The answer given before; None if there is none."""
        text = self._kept.read(self._about)
        return None if text is None else SavedOutput(**json.loads(text))

    def write(self, said: SavedOutput) -> None:
        """Keep an answer."""
        self._kept.write(self._about, json.dumps(asdict(said)))


def _key(value: Any) -> Any:
    """Key of an argument; for a path also its contents, and those of files that a YAML file names."""
    if not isinstance(value, Path):
        return value
    named = _named(value) if value.suffix in (".yaml", ".yml") else ()
    return [str(value.absolute()), _content(value), [_content(path) for path in named]]


def _content(path: Path) -> Any:
    """What tells whether a file has changed, or what is read of a directory's files."""
    try:
        if path.is_dir():
            files = sorted(file for name in _READ for file in path.glob(name) if file.is_file())
            return [[file.name, _changed(file)] for file in files]
        return [path.name, _changed(path)]
    except OSError:
        return None


def _changed(file: Path) -> str | list[int]:
    """A digest, or of a large file its size and when it was written."""
    about = file.stat()
    if about.st_size > _LARGE:
        return [about.st_size, about.st_mtime_ns, about.st_ino]
    return hashlib.sha256(file.read_bytes()).hexdigest()[:24]


def _named(file: Path) -> list[Path]:
    """Files and directories that a YAML file names, by paths from its directory."""
    import yaml

    try:
        texts = sorted(set(_texts(yaml.safe_load(file.read_text(encoding="utf-8")))))
        return [path for text in texts if "\0" not in text and (path := file.parent / text).exists()]
    except (OSError, ValueError, yaml.YAMLError):
        return []


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)
