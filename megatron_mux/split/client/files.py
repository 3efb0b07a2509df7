"""The files that a client reads: a whole backbone, of which it reads its own layers, or an export with these alone."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron_mux.backbone.checkpoint import Checkpoint
from megatron_mux.backbone.registry import BackboneInfo, read_backbone_info, read_shape
from megatron_mux.backbone.resolve import resolve
from megatron_mux.backbone.weights import Part, plan
from megatron_mux.errors import UserError
from megatron_mux.files import read_json
from megatron_mux.hub_cache import find_model
from megatron_mux.shape import BackboneShape

EXPORT = "split.json"
"""What tells an export from a whole backbone."""


class ExportedLayers(BaseModel):
    """Content of `split.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int = Field(default=1, ge=1, le=1)
    """Version of this file's layout."""
    fingerprint: str
    """Of the whole backbone."""
    cut_front: int = Field(ge=1)
    """Layers behind the embedding."""
    cut_back: int = Field(ge=0)
    """Layers before the final norm."""
    digest: str
    """SHA-256 of config.json, and of dtypes, shapes and samples of the tensors."""


def check_cuts(shape: BackboneShape, cut_front: int, cut_back: int) -> None:
    """Refuse cuts that leave the server no layer, or show it embeddings.

    Raises:
        UserError: They do.
    """
    if cut_front < 1:
        raise UserError(
            f"--cut-front {cut_front}: whoever sees embeddings knows every token: keep at least one layer on the client"
        )
    if cut_back < 0 or cut_front + cut_back >= shape.layers:
        raise UserError(
            f"--cut-front {cut_front} and --cut-back {cut_back} leave no layer of {shape.layers} for the server: cut "
            "nearer to the ends"
        )


def client_tensors(shape: BackboneShape, cut_front: int, cut_back: int) -> set[str]:
    """Full Hugging Face names of the tensors that a client needs."""
    whole = replace(shape, padded_vocab=shape.vocab)
    parts = (range(cut_front), range(shape.layers - cut_back, shape.layers))
    plans = [plan(whole, layers, Part()) for layers in parts]
    return {piece.source for plan in plans for pieces in plan.values() for piece in pieces}


def read_client_info(path: str | Path, cut_front: int, cut_back: int) -> BackboneInfo:
    """Metadata of a client's backbone, read without its weights.

    Args:
        path: The directory of a whole backbone, or of an export that holds the layers.
        cut_front, cut_back: See `ExportedLayers`.

    Returns:
        The metadata, with the whole backbone's fingerprint; of an export, `stored` has the client's tensors only.

    Raises:
        UserError: As `read_backbone_info`; or the cuts are refused; or the export does not hold these layers, or was
            changed.
    """
    path = find_model(path)
    shape = read_shape(path)
    shape.refuse("Split fine-tuning", "quantisation")
    check_cuts(shape, cut_front, cut_back)
    if not (path / EXPORT).is_file():
        return read_backbone_info(path)
    exported, info = read_export(path)
    if cut_front > exported.cut_front or cut_back > exported.cut_back:
        raise UserError(
            f"--cut-front {cut_front} and --cut-back {cut_back}: {path} was exported with {exported.cut_front} and "
            f"{exported.cut_back} layers: export it again, or cut nearer to the ends"
        )
    return info


def read_export(path: Path) -> tuple[ExportedLayers, BackboneInfo]:
    """What an export holds.

    Raises:
        UserError: It is incomplete, or was changed since it was made.
    """
    try:
        exported = ExportedLayers.model_validate(read_json(path / EXPORT))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{path / EXPORT}: {where}: {first['msg']}") from None
    shape = read_shape(path)
    with Checkpoint(path) as checkpoint:
        if digest_of(path, checkpoint) != exported.digest:
            raise UserError(
                f"{path}: config.json or the weights are not as they were exported: export them again"
            )
        stored = resolve(shape, checkpoint, client_tensors(shape, exported.cut_front, exported.cut_back))
    return exported, BackboneInfo(path, shape, exported.fingerprint, stored)


def digest_of(path: Path, checkpoint: Checkpoint) -> str:
    """See `ExportedLayers.digest`."""
    digest = hashlib.sha256((path / "config.json").read_bytes())
    digest.update(checkpoint.digest({name: name for name in checkpoint.tensors}).encode())
    return digest.hexdigest()
