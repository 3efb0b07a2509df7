"""Writes a Hugging Face directory: sharded safetensors, tensor by tensor, and the files beside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
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


Progress = Callable[[int, int, str], None]
"""Told the bytes written so far, all bytes, and the tensor that was written last."""


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
    from huggingface_hub import split_state_dict_into_shards_factory

    shards = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda info: info.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=largest,
    )
    for file, names in shards.filename_to_tensors.items():
        own = {name: tensors[name] for name in names}
        parts = (bytes_of(part) for name in in_file_order(own) for part in value(name))
        write_pieces(directory / file, chain(header(own, {}), parts))
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        write_json(directory / "model.safetensors.index.json", index)
    return len(shards.filename_to_tensors)
