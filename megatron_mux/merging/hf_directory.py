"""Writes a Hugging Face directory: sharded safetensors, tensor by tensor, and the files beside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_mux.files import write, write_pieces
from megatron_mux.tensor_file import TensorInfo, bytes_of, header, in_file_order

_COPIED = (
    "*.json",
    "*.jinja",
    "*.model",
    "*.tiktoken",
    "vocab.txt",
    "merges.txt",
    "LICENSE*",
    "NOTICE*",
    "*POLICY*",
)
"""Files of a backbone that belong to what is made of it: tokenizer, generation config, chat template, licence."""
_LEFT = ("config.json", "*.index.json", "adapter_config.json", "prepared.json")


@dataclass
class _Shard:
    """One safetensors file to write."""

    tensors: dict[str, TensorInfo] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.tensors.values())


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file and flush it to disk."""
    write(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def copy_companions(source: Path, target: Path) -> None:
    """Copy the files beside a backbone's weights and config, and flush them to disk."""
    left = {path for pattern in _LEFT for path in source.glob(pattern)}
    found = {path for pattern in _COPIED for path in source.glob(pattern)}
    for path in sorted(path for path in found - left if path.is_file()):
        write(target / path.name, path.read_bytes())


def write_shards(
    directory: Path,
    tensors: Mapping[str, TensorInfo],
    value: Callable[[str], Iterator[Tensor]],
    largest: int,
) -> int:
    """Write tensors to as few files as the limit allows, with an index if there are several.

    Args:
        directory: Where.
        tensors: What to write, in the order in which files are filled.
        value: Returns the parts of a tensor, one after the other, in its dtype.
        largest: Most bytes of a file; a single larger tensor gets one of its own.

    Returns:
        The number of files.
    """
    shards = [_Shard()]
    for name, info in tensors.items():
        if shards[-1].tensors and shards[-1].nbytes + info.nbytes > largest:
            shards.append(_Shard())
        shards[-1].tensors[name] = info
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        several = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        file = f"model{several}.safetensors"
        parts = (bytes_of(part) for name in in_file_order(shard.tensors) for part in value(name))
        write_pieces(directory / file, chain(header(shard.tensors, {}), parts))
        weight_map |= dict.fromkeys(shard.tensors, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(shard.nbytes for shard in shards)}, "weight_map": weight_map}
        write_json(directory / "model.safetensors.index.json", index)
    return len(shards)
