"""What is kept between runs: texts by a key that names everything they depend on.

A file has a line that describes its content, a digest among it, and then the content. One that is damaged or of another
version is as good as none.
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

_PACKAGES = ("torch", "transformers", "peft")


class Store:
    """A directory of texts.

    Args:
        kind: What they are: `traces` for instance.
        directory: Where; by default the user's cache directory.
    """

    def __init__(self, kind: str, directory: Path | None = None) -> None:
        self._directory = cache_directory(kind) if directory is None else directory

    def read(self, about: Mapping[str, Any]) -> str | None:
        """The text that is kept for a key; None if there is none, or its file is damaged."""
        try:
            head, _, text = self.file(about).read_text(encoding="utf-8").partition("\n")
            found = json.loads(head)
        except (OSError, ValueError):
            return None
        sound = isinstance(found, dict) and found.get("sha256") == _digest(text)
        return text if sound and found.get("about") == _plain(about) else None

    def write(self, about: Mapping[str, Any], text: str) -> None:
        """Keep a text. A directory that cannot be written keeps nothing."""
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
    """The packages that a traced step depends on, and what of this one does."""
    found = {"memory": _sources()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


def _sources() -> str:
    """A digest of the modules that make a stream or a model's sizes."""
    room = Path(__file__).parent
    files = [
        *sorted((room / "trace").glob("*.py")),
        *(room / f"{name}.py" for name in ("stream/events", "stream/extension", "invisible", "tensors")),
    ]
    return _digest("".join(file.read_text(encoding="utf-8") for file in files))[:16]


def _plain(about: Mapping[str, Any]) -> Any:
    """As JSON gives it back."""
    return json.loads(json.dumps(about))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
