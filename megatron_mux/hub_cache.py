"""Finds models that are named as on the Hugging Face hub in its local cache; nothing is downloaded."""

from __future__ import annotations

import os
import re
from pathlib import Path

from megatron_mux.errors import UserError

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SNAPSHOT = re.compile(r"models--(.+?)--(.+)")


def find_model(name: str | os.PathLike[str]) -> Path:
    """The local directory of a model.

    Args:
        name: A path, returned as it is if it exists; else `org/name`, which is looked for in the cache of the hub
            (`$HF_HOME`, `$HF_HUB_CACHE`).

    Raises:
        UserError: The name is one of the hub, and the model is not in the cache; says how to download it.
    """
    path = Path(name)
    text = os.fspath(name)
    if os.path.lexists(path) or not _REPOSITORY.fullmatch(text):
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        found: Path | None = Path(snapshot_download(text, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        found = None
    if found is None or not (found / "config.json").is_file():
        raise UserError(
            f"{text}: no such directory, and no model of that name in the Hugging Face cache: download it with "
            f"`hf download {text}`"
        )
    return found


def hint_to_download(directory: Path) -> str:
    """How to complete a model of which the hub's cache holds a part; empty for other directories."""
    name = _cached_name(directory)
    return "" if name is None else f" Complete it with `hf download {name}`."


def model_id(path: Path) -> str:
    """What others can load a model by: `org/name` of a snapshot in the hub's cache, else its absolute path."""
    return _cached_name(path) or str(path.resolve())


def shown_model(path: Path) -> str:
    """How a user would name a model on a command line: `org/name`, else the path as it was given."""
    return _cached_name(path) or str(path)


def _cached_name(path: Path) -> str | None:
    """The name of a snapshot in the hub's cache; None for other directories."""
    path = path.resolve()
    found = _SNAPSHOT.fullmatch(path.parents[1].name) if path.parent.name == "snapshots" else None
    return f"{found[1]}/{found[2]}" if found is not None else None
