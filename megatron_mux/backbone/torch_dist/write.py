"""Writes a `torch_dist` checkpoint of a model, tensor by tensor, as Megatron-Core 0.16 and 0.19 read it."""

from __future__ import annotations

import argparse
import io
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_mux.backbone.torch_dist.locate import TRACKER
from megatron_mux.backbone.torch_dist.mapping import TensorSource, places
from megatron_mux.backbone.torch_dist.storage import COMMON
from megatron_mux.errors import UserError
from megatron_mux.files import sync_directory, write
from megatron_mux.shape import BackboneShape
from megatron_mux.tensor_file import TensorInfo

RELEASE = "release"
"""What Megatron calls the directory of a checkpoint that comes from no iteration of its own."""

_Part = tuple[str, TensorSource]


class _Planner(DefaultSavePlanner):
    """Plans to write tensors that are made when they are written.

    Args:
        items: What to write.
        make: Makes the chunk of a name and an offset.
    """

    def __init__(self, items: list[WriteItem], make: Callable[[MetadataIndex], Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._items, self._make = items, make

    def create_local_plan(self) -> SavePlan:
        """See `SavePlanner.create_local_plan`."""
        self.plan = SavePlan(self._items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """See `SavePlanner.resolve_data`."""
        return self._make(write_item.index)


def write_torch_dist(
    directory: Path,
    shape: BackboneShape,
    arguments: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    read: Callable[[str], Tensor],
) -> int:
    """Write what Megatron would call its `--save` directory, with one checkpoint in it.

    Args:
        directory: An empty one.
        shape: Of the model.
        arguments: Megatron's command line for it.
        tensors: What there is, by full Hugging Face names.
        read: Reads one of them.

    Returns:
        The number of tensors written.

    Raises:
        UserError: Tensors that Megatron keeps as one have several dtypes.
    """
    iteration = directory / RELEASE
    iteration.mkdir()
    chunks = _chunks(shape, tensors)
    items = _items(chunks, tensors)

    def make(index: MetadataIndex) -> Tensor:
        offset = tuple(index.offset or ())
        value = _matrix(chunks[index.fqn][offset], tensors, read)
        return value.view((1,) * (len(offset) - value.dim()) + tuple(value.shape))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        save({}, storage_writer=FileSystemWriter(iteration), planner=_Planner(items, make), no_dist=True)
    common = {"args": argparse.Namespace(**arguments), "checkpoint_version": 3.0, "iteration": 0}
    content = io.BytesIO()
    torch.save(common, content)
    write(iteration / COMMON, content.getbuffer())
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    backend |= {"common_backend": "torch", "common_backend_version": 1}
    write(iteration / "metadata.json", json.dumps(backend).encode())
    sync_directory(iteration)
    write(directory / TRACKER, RELEASE.encode())
    return len({item.index.fqn for item in items})


def _chunks(
    shape: BackboneShape, tensors: Mapping[str, TensorInfo]
) -> dict[str, dict[tuple[int, ...], list[_Part]]]:
    """The Hugging Face tensors that make up each chunk of each of Megatron's, by name and offset."""
    # As Megatron does: layers are stacked if all are alike.
    stacked = shape.experts is None or not shape.experts.dense
    found: dict[str, dict[tuple[int, ...], list[_Part]]] = {}
    for name, place in places(shape).items():
        for written in place.names[: place.written]:
            key, index = place.key(written, stacked)
            offset = (*index, *(0 for _ in tensors[name].shape))
            found.setdefault(key, {}).setdefault(offset, []).append((name, place))
    return found


def _items(
    chunks: Mapping[str, Mapping[tuple[int, ...], list[_Part]]],
    tensors: Mapping[str, TensorInfo],
) -> list[WriteItem]:
    items = []
    for key, of_key in chunks.items():
        dtypes = {tensors[name].dtype for parts in of_key.values() for name, _ in parts}
        if len(dtypes) > 1:
            several = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            raise UserError(
                f"Megatron keeps {key} in one dtype, but here it has {several}: convert to one dtype first."
            )
        properties = TensorProperties(dtype=dtypes.pop())
        parts = next(iter(of_key.values()))
        size = _size(*parts[0], tensors)
        leading = len(next(iter(of_key))) - len(size)
        lead = tuple(max(offset[i] for offset in of_key) + 1 for i in range(leading))
        for offset in of_key:
            chunk = ChunkStorageMetadata(torch.Size(offset), torch.Size((1,) * leading + size))
            data = TensorWriteData(chunk, properties, torch.Size(lead + size))
            items.append(WriteItem(MetadataIndex(key, offset), WriteItemType.SHARD, tensor_data=data))
    return items


def _size(name: str, place: TensorSource, tensors: Mapping[str, TensorInfo]) -> tuple[int, ...]:
    """The shape of Megatron's tensor that a Hugging Face tensor is in, without layers and experts."""
    shape = tensors[name].shape
    return (place.rows, *(shape[:1] if place.transposed else shape[1:]))


def _matrix(parts: list[_Part], tensors: Mapping[str, TensorInfo], read: Callable[[str], Tensor]) -> Tensor:
    """One of Megatron's tensors, without layers and experts, from the Hugging Face tensors in it."""
    value = torch.empty(_size(*parts[0], tensors), dtype=tensors[parts[0][0]].dtype)
    for name, place in parts:
        stored = read(name)
        stored = stored.t() if place.transposed and stored.dim() == 2 else stored
        for theirs, ours, count in place.runs:
            value[theirs : theirs + count].copy_(stored[ours : ours + count])
    return value
