"""Merges an adapter into its backbone: a new Hugging Face directory with the changed weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_mux.backbone.model_directory import open_checkpoint, read_config
from megatron_mux.backbone.registry import read_backbone_info
from megatron_mux.errors import UserError
from megatron_mux.files import new_directory, write
from megatron_mux.hub_cache import find_model, model_id
from megatron_mux.merging.backbone_source import BackboneSource
from megatron_mux.merging.hf_directory import Progress, copy_companions, write_json, write_shards
from megatron_mux.merging.kinds import merge_kind
from megatron_mux.merging.provenance import check_backbone
from megatron_mux.merging.stored_adapter import PREFIX, StoredAdapter
from megatron_mux.merging.weights import Change, Changes
from megatron_mux.merging.whole_rows import replace_modules, replace_rows
from megatron_mux.model_card import Parent, base_model_name, merged_card
from megatron_mux.quantised.scheme import QuantMethod
from megatron_mux.tensor_file import TensorInfo


@dataclass(frozen=True)
class Merged:
    """What a merge did.

    Attributes:
        kind: Of the adapter.
        tensors, changed: Tensors written, and those of them that differ from the backbone's.
        size: Bytes of all tensors.
        files: Number of safetensors files.
        untied: Whether the output layer was the embedding, and no longer is.
        seconds: Time that it took.
    """

    kind: str
    tensors: int
    changed: int
    size: int
    files: int
    untied: bool
    seconds: float


@dataclass(frozen=True)
class _Written:
    """A tensor to write.

    Attributes:
        source: Full Hugging Face name of the weight that it is made of.
        changes: What happens to that.
        info: Dtype and shape in which it is written.
    """

    source: str
    changes: list[Change]
    info: TensorInfo


def merge(
    backbone: str | Path,
    adapter: str | Path,
    output: str | Path,
    dtype: torch.dtype | None = None,
    largest: int = 5_000_000_000,
    progress: Progress = lambda done, total, name: None,
    quantise: QuantMethod | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> Merged:
    """Write the backbone with the adapter merged into it.

    Weights are computed in fp32 and rounded once, to the dtype in which they are written. Those of a quantised backbone
    are dequantised first, and the result is not quantised.

    Args:
        backbone: Directory of the backbone, or `org/name` in the Hugging Face cache.
        adapter: Directory in peft's format.
        output: Directory to make.
        dtype: Of the weights; None: as they are stored, or as config.json says of quantised ones.
        largest: Most bytes of a safetensors file.
        progress: Told of every tensor.
        quantise: How the run that trained the adapter quantised the backbone on load; None: not at all.
        warn: Told if the adapter was trained on another backbone.

    Raises:
        UserError: The adapter is of a kind that cannot be merged, or of another backbone; or the output exists.
    """
    began = time.monotonic()
    backbone, adapter, output = find_model(backbone), Path(adapter), Path(output)
    info, stored = read_backbone_info(backbone, quantise), StoredAdapter(adapter)
    info.check_parallel(1, 1)
    companions = info.tokenizer
    trained = check_backbone(adapter, info, warn)
    with open_checkpoint(backbone, info.shape) as checkpoint, new_directory("--output", output) as directory:
        changes = plan_changes(stored, Changes.of_backbone(info))
        source = BackboneSource(info, checkpoint, trained.rounded_to, trained.device == "cuda")
        written = _plan(changes, source, dtype)
        total, done = sum(each.info.nbytes for each in written.values()), 0

        def value(name: str) -> Iterator[Tensor]:
            nonlocal done
            for part in _value(written[name], source, stored):
                done += part.nbytes
                yield part
            progress(done, total, name)

        files = write_shards(directory, {name: each.info for name, each in written.items()}, value, largest)
        write_json(directory / "config.json", _config(backbone, changes, dtype))
        copy_companions(companions, directory)
        parents = (
            Parent(base_model_name(model_id(backbone)), info.fingerprint),
            Parent(stored.name, stored.fingerprint()),
        )
        quantised = str(info.shape.quantisation or "")
        write(directory / "README.md", merged_card(*parents, stored.config, adapter, quantised).encode())
    changed = sum(bool(each.changes) for each in written.values())
    return Merged(stored.kind, len(written), changed, total, files, changes.unties, time.monotonic() - began)


def plan_changes(adapter: StoredAdapter, changes: Changes) -> Changes:
    """Add all changes of an adapter, and return them.

    Raises:
        UserError: It cannot be merged, or some of its tensors have no place.
    """
    used = merge_kind(adapter, changes)
    used |= replace_rows(adapter, changes)
    used |= replace_modules(adapter, changes, used)
    left = sorted(adapter.shapes.keys() - used)
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise UserError(
            f"{adapter.weights} holds {left[0].removeprefix(PREFIX)}{more}, for which the backbone {changes.info.path} "
            f"has no place or {adapter.kind} no rule: give the backbone it was trained on."
        )
    if not changes.of:
        raise UserError(f"{adapter.weights} changes nothing: it holds no tensors.")
    return changes


def _config(backbone: Path, changes: Changes, dtype: torch.dtype | None) -> dict[str, Any]:
    """Content of the merged model's config.json."""
    config = read_config(backbone)
    for name in ("quantization_config", "compression_config"):
        config.pop(name, None)
    if dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
    if changes.unties:
        config["tie_word_embeddings"] = False
    return config


def _plan(changes: Changes, source: BackboneSource, dtype: torch.dtype | None) -> dict[str, _Written]:
    """What to write, in the order in which the checkpoint stores it, by the names in the new files."""
    plan: dict[str, _Written] = {}
    experts = changes.info.shape.experts
    for name, info in source.tensors.items():
        # fp32 in transformers, whatever the model's dtype
        kept = experts is not None and name.endswith(f".{experts.names.router_bias}")
        made = TensorInfo(info.dtype if dtype is None or kept else dtype, info.shape)
        plan[source.written_name(name)] = _Written(name, changes.of.get(name, []), made)
        if name == changes.embedding and changes.unties:
            plan[changes.head] = _Written(name, changes.of.get(changes.head, []), made)
    return plan


def _value(written: _Written, source: BackboneSource, adapter: StoredAdapter) -> Iterator[Tensor]:
    """The parts of a tensor to write."""
    dtype = written.info.dtype
    if not written.changes:
        for part in source.parts(written.source):
            yield part.to(dtype)
        return
    weight = source.read(written.source)
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    for change in written.changes:
        weight = change(weight)
    weight = weight.to(dtype)
    if not bool(weight.isfinite().all()):
        raise UserError(f"{adapter.directory}: merging makes NaN or infinity of {written.source} in {dtype}.")
    yield weight
