"""Finds the newest checkpoint in a directory of Megatron's, and refuses formats other than `torch_dist`."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_mux.errors import UserError
from megatron_mux.files import read_json

TRACKER = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"iter_\d+|release")
_TO_CONVERT = "load it in Megatron-LM with --ckpt-convert-format torch_dist --ckpt-convert-save DIR"


def is_megatron(path: Path) -> bool:
    """Whether a directory holds a checkpoint of Megatron's, in whatever format; a Hugging Face model is none."""
    try:
        names = {child.name for child in path.iterdir()}
    except OSError:
        return False
    if any(name.endswith(".safetensors") for name in names):
        return False
    return bool(names & {TRACKER, ".metadata", "metadata.json", "common.pt"}) or any(
        _ITERATION.fullmatch(name) or name.startswith("mp_rank_") or name.endswith(".distcp")
        for name in names
    )


def locate(path: Path) -> Path:
    """The directory of the newest checkpoint, or of the one that `path` is.

    Args:
        path: What Megatron calls `--save`, or the directory of one iteration within it.

    Raises:
        UserError: It is incomplete, or in a format that cannot be read.
    """
    found = path
    if (path / TRACKER).is_file():
        latest = (path / TRACKER).read_text(errors="replace").strip()
        found = path / (latest if latest == "release" else f"iter_{latest:0>7}")
    elif not (path / "metadata.json").is_file():
        several = sorted(child for child in path.iterdir() if _ITERATION.fullmatch(child.name))
        found = several[-1] if several else path
    if not found.is_dir():
        raise UserError(
            f"{path / TRACKER} names {found.name}, which does not exist: give --backbone another."
        )
    _check_format(found)
    return found


def _check_format(path: Path) -> None:
    """Refuse all formats but `torch_dist`, by name."""
    names = {child.name for child in path.iterdir()}
    if any(name.startswith("mp_rank_") for name in names):
        raise UserError(f"{path} is a checkpoint in Megatron's old format `torch`: {_TO_CONVERT}.")
    if "metadata.json" not in names:
        if ".metadata" in names:
            raise UserError(
                f"{path} is a checkpoint in format torch_dcp or fsdp_dtensor: supported is torch_dist; save it with "
                "Megatron's --ckpt-format torch_dist."
            )
        raise UserError(
            f"{path} holds no complete checkpoint: Megatron writes metadata.json at the end of a save."
        )
    backend = read_json(path / "metadata.json").get("sharded_backend")
    if backend != "torch_dist":
        raise UserError(
            f"{path} is a checkpoint in format {backend}: supported is torch_dist; {_TO_CONVERT}, with a Megatron that "
            "still reads it."
        )
    if ".metadata" not in names:
        raise UserError(f"{path} lacks .metadata: copy it whole.")
