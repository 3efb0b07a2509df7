"""Keeps texts between runs, under a key that names everything they depend on; versions are part of every key.

There are three kinds: sizes of models, traced steps, and answers of `megatron-mux estimate`. A file has a line that
describes its content, with a digest, and then the content. A file that is damaged counts as missing.
"""

from __future__ import annotations

import hashlib
import json
import os
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from megatron_mux.files import cache_directory, write_atomically
from megatron_mux.gpus import ALLOCATOR_VARIABLES, table

_LIBRARIES = ("torch", "transformers", "peft", "megatron-core")
_PACKAGE = Path(__file__).resolve().parents[1]
_ENVIRONMENT = ("CUBLAS_WORKSPACE_CONFIG", *ALLOCATOR_VARIABLES)
_READ = ("config.json", "adapter_config.json", "tokenizer*", "vocab*", "merges*")
"""Files of a directory that an answer may depend on; a user may well write the answer to another one in it."""
_LARGE = 1 << 20
"""Bytes of a file beyond which it is not read to tell whether it has changed."""


class Store:
    """A directory of texts.

    Args:
        kind: Kind of text, such as `traces`.
        directory: Directory; None for the user's cache directory.
    """

    def __init__(self, kind: str, directory: Path | None = None) -> None:
        self._directory = cache_directory(kind) if directory is None else directory

    def read(self, about: Mapping[str, Any]) -> str | None:
        """The text of a key; None if it is missing or damaged."""
        try:
            head, _, text = self.file(about).read_text(encoding="utf-8").partition("\n")
            found = json.loads(head)
        except (OSError, ValueError):
            return None
        sound = isinstance(found, dict) and found.get("sha256") == _digest(text)
        return text if sound and found.get("about") == _whole(about) else None

    def write(self, about: Mapping[str, Any], text: str) -> None:
        """Keep a text. Nothing is kept if the directory cannot be written."""
        head = json.dumps({"sha256": _digest(text), "about": _whole(about)})
        try:
            write_atomically(self.file(about), f"{head}\n{text}")
        except OSError:
            return

    def file(self, about: Mapping[str, Any]) -> Path:
        """The file of a key."""
        return self._directory / f"{_digest(json.dumps(_whole(about), sort_keys=True))[:24]}.json"


@dataclass(frozen=True)
class SavedOutput:
    """The output of a program."""

    output: str
    errors: Sequence[str]


class Answers:
    """Answers of a program, by its arguments and everything else they depend on.

    That is the contents of files that arguments name, library versions and this package's sources, and the environment.

    Args:
        more: What else an answer depends on, such as the width of a terminal.
    """

    def __init__(self, kept: Store, arguments: Namespace, more: object = None) -> None:
        self._kept = kept
        self._about = {
            "arguments": {name: _key(value) for name, value in sorted(vars(arguments).items())},
            "environment": {name: os.environ.get(name) for name in _ENVIRONMENT},
            "gpus": repr(table()),
            "more": more,
        }

    def read(self) -> SavedOutput | None:
        """The answer given before; None if there is none."""
        text = self._kept.read(self._about)
        return None if text is None else SavedOutput(**json.loads(text))

    def write(self, said: SavedOutput) -> None:
        """Keep an answer."""
        self._kept.write(self._about, json.dumps(asdict(said)))


@cache
def versions() -> Mapping[str, str]:
    """Versions of everything that a trace or an answer depends on: this package's sources, and its libraries."""
    digest = hashlib.sha256()
    for file in sorted(_PACKAGE.rglob("*.py")):
        digest.update(file.read_bytes())
    found = {"sources": digest.hexdigest()[:16]}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


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


def _whole(about: Mapping[str, Any]) -> Any:
    """A key and the versions, as JSON gives them back."""
    return json.loads(json.dumps({**about, "versions": versions()}))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
