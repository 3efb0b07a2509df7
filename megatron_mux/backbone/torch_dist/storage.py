"""The global tensors of a `torch_dist` directory: which chunks each consists of, and where their values are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import torch

from megatron_mux.backbone.checkpoint import Stored
from megatron_mux.backbone.torch_dist.unpickle import Archive, PickledTensor, attributes, unpickle
from megatron_mux.errors import UserError

COMMON = "common.pt"
_COMMON_KEY = "common_state"
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
"""Safetensors' names."""


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor in a file, which holds it as `torch.save` wrote it.

    Attributes:
        offsets, shape: Of the part.
        file: Holds it, from `start` on, `length` bytes.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: Path
    start: int
    length: int

    def stored(self, dtype: str) -> Stored:
        """Where its values are.

        Raises:
            UserError: The file is damaged, or holds something else.
        """
        try:
            with self.file.open("rb") as file:
                archive = Archive(file, self.start, self.length, str(self.file))
                found = archive.content
                if not isinstance(found, PickledTensor) or math.prod(found.shape) != math.prod(self.shape):
                    raise ValueError("a tensor is not as .metadata says")
                if found.dtype is None or DTYPES.get(found.dtype) != dtype or not _is_contiguous(found):
                    raise ValueError("a tensor is stored in another layout or dtype")
                start, size = archive.position(found.key)
                first = found.offset * found.dtype.itemsize
                if first + math.prod(self.shape) * found.dtype.itemsize > size:
                    raise ValueError("a tensor is cut")
                return Stored(self.file, dtype, self.shape, start + first)
        except OSError as error:
            raise UserError(f"{self.file} cannot be read: {error.strerror or error}.") from None
        except (ValueError, TypeError) as error:
            raise UserError(f"{self.file} cannot be read: {error}.") from None


def _is_contiguous(tensor: PickledTensor) -> bool:
    sizes, strides = tensor.shape, tensor.stride
    return all(n == 1 or strides[i] == math.prod(sizes[i + 1 :]) for i, n in enumerate(sizes))


@dataclass(frozen=True)
class GlobalTensor:
    """A tensor that ranks saved in parts.

    Attributes:
        shape: Of the whole.
        dtype: As safetensors calls it; the name of another one is left as it is.
        chunks: Its parts.
    """

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]

    def by_index(self, leading: int) -> dict[tuple[int, ...], list[Chunk]]:
        """The chunks that hold each index of the first `leading` dimensions (of layers, of experts)."""
        found: dict[tuple[int, ...], list[Chunk]] = {}
        for chunk in self.chunks:
            spans = zip(chunk.offsets[:leading], chunk.shape[:leading], strict=True)
            for index in product(*(range(first, first + count) for first, count in spans)):
                found.setdefault(index, []).append(chunk)
        return found


@dataclass(frozen=True)
class Contents:
    """What a checkpoint's directory holds of the model.

    Attributes:
        tensors: By Megatron's names; the optimizer's are left out.
        arguments: Megatron's command line; None: it was not saved.
    """

    tensors: Mapping[str, GlobalTensor]
    arguments: Mapping[str, Any] | None


def read_contents(path: Path) -> Contents:
    """Read what a `torch_dist` directory holds, without its values.

    Raises:
        UserError: It is damaged, or a pickle in it is refused.
    """
    try:
        return _read(path, (path / ".metadata").stat().st_mtime_ns)
    except OSError as error:
        file = error.filename or path / ".metadata"
        raise UserError(f"{file} cannot be read: {error.strerror or error}.") from None


@lru_cache(maxsize=4)
def _read(path: Path, written: int) -> Contents:
    with (path / ".metadata").open("rb") as file:
        metadata = attributes(unpickle(file, str(path / ".metadata")))
    try:
        places = {
            (index.fqn, getattr(index, "offset", None)): Chunk(
                (), (), path / info.relative_path, info.offset, info.length
            )
            for index, info in metadata["storage_data"].items()
            if _is_of_model(index.fqn) and _is_plain(info)
        }
        tensors = {
            name: _tensor(name, attributes(entry), places)
            for name, entry in metadata["state_dict_metadata"].items()
            if _is_of_model(name) and "chunks" in attributes(entry)
        }
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(
            f"{path / '.metadata'} is not the metadata of a torch_dist checkpoint: {error}."
        ) from None
    return Contents(tensors, _arguments(path, places))


def _is_of_model(name: str) -> bool:
    return not name.startswith(("optimizer.", "rng_state", "rerun_state_machine", "dataloader"))


def _is_plain(info: Any) -> bool:
    if Path(info.relative_path).name != info.relative_path:
        raise ValueError(f"it names the file {info.relative_path}")
    if getattr(info, "transform_descriptors", None):
        raise ValueError("its values are compressed")
    return True


def _tensor(name: str, entry: Mapping[str, Any], places: Mapping[Any, Chunk]) -> GlobalTensor:
    dtype = entry["properties"].state[0]
    chunks = []
    for each in entry["chunks"]:
        place = places[name, each.offsets]
        chunks.append(Chunk(each.offsets, each.sizes, place.file, place.start, place.length))
    return GlobalTensor(entry["size"], DTYPES.get(dtype, str(dtype)), tuple(chunks))


def _arguments(path: Path, places: Mapping[Any, Chunk]) -> Mapping[str, Any] | None:
    """Megatron's command line, from common.pt, or from where versions after 0.16 keep the same."""
    place = next((c for (name, _), c in places.items() if name.partition("/")[0] == _COMMON_KEY), None)
    if (path / COMMON).is_file():
        place = Chunk((), (), path / COMMON, 0, (path / COMMON).stat().st_size)
    if place is None:
        return None
    with place.file.open("rb") as file:
        content = Archive(file, place.start, place.length, str(place.file)).content
    content = content[0] if isinstance(content, list) and content else content
    found = attributes(content).get("args")
    return None if found is None else attributes(found)
