"""Keeps texts between runs, under a key that names everything they depend on.

There are three kinds: sizes of models, traced steps, and answers of `tools/estimate_memory.py`. A file has a line that
describes its content, with a digest, and then the content. A file that is damaged counts as missing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from megatron_mux.files import cache_directory, write_atomically

_LIBRARIES = ("torch", "transformers", "peft", "megatron-core")
_PACKAGE = Path(__file__).resolve().parents[1]


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
        return text if sound and found.get("about") == _plain(about) else None

    def write(self, about: Mapping[str, Any], text: str) -> None:
        """Keep a text. Nothing is kept if the directory cannot be written."""
        head = json.dumps({"sha256": _digest(text), "about": _plain(about)})
        try:
            write_atomically(self.file(about), f"{head}\n{text}")
        except OSError:
            return

    def file(self, about: Mapping[str, Any]) -> Path:
        """The file of a key."""
        return self._directory / f"{_digest(json.dumps(_plain(about), sort_keys=True))[:24]}.json"


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


def _plain(about: Mapping[str, Any]) -> Any:
    """As JSON gives it back."""
    return json.loads(json.dumps(about))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
