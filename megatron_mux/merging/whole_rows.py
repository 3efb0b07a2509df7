"""What an adapter stores instead of changing it: whole modules (`modules_to_save`) and rows of tokens."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from megatron_mux.errors import UserError
from megatron_mux.merging.stored_adapter import PREFIX, StoredAdapter
from megatron_mux.merging.weights import Changes

_ROWS = ".token_adapter.trainable_tokens_delta"


def replace_rows(adapter: StoredAdapter, changes: Changes) -> set[str]:
    """Add the replacement of rows by `trainable_token_indices`.

    Where the output layer is the embedding, peft replaces the rows of both, unless the output layer has its own.

    Returns:
        The keys of the tensors that are used.

    Raises:
        UserError: The config does not say which tokens they are, or they are not this backbone's.
    """
    used = set()
    paths = adapter.paths(_ROWS)
    for path in paths:
        key = PREFIX + path + _ROWS
        rows, width = changes.size(path, key)
        tokens = _tokens(adapter, path)
        if adapter.shapes[key] != (len(tokens), width) or not all(0 <= token < rows for token in tokens):
            raise UserError(
                f"{adapter.weights}: {key} of shape {list(adapter.shapes[key])} does not hold {len(tokens)} rows of "
                f"{path}, which is [{rows}, {width}]."
            )
        index = torch.tensor(tokens)
        shared = paths == [changes.info.shape.names.embedding]
        changes.add(path, partial(_with_rows, adapter, key, index), shared=shared)
        used.add(key)
    return used


def _with_rows(adapter: StoredAdapter, key: str, index: Tensor, weight: Tensor) -> Tensor:
    return weight.index_copy(0, index, adapter.read(key).to(weight.dtype))


def _tokens(adapter: StoredAdapter, path: str) -> list[int]:
    """The tokens whose rows of a module are replaced."""
    given = adapter.config.get("trainable_token_indices")
    if isinstance(given, dict):
        given = next((tokens for name, tokens in given.items() if path.endswith(name)), None)
    if not isinstance(given, list):
        raise UserError(
            f"{adapter.directory}: trainable_token_indices does not say which rows of {path} it has."
        )
    return [int(token) for token in given]


def replace_modules(adapter: StoredAdapter, changes: Changes, used: set[str]) -> set[str]:
    """Add the replacement of whole tensors: of `modules_to_save`, and of embeddings that peft stores beside LoRA.

    Args:
        adapter: The adapter.
        changes: To add to.
        used: Keys of tensors that have been used already.

    Returns:
        The keys of the tensors that are used.

    Raises:
        UserError: A tensor is of another shape than the backbone's.
    """
    found = set()
    for key, size in adapter.shapes.items():
        if key in used or not key.startswith(PREFIX):
            continue
        is_base = (
            ".base_layer." in key
        )  # what LoRA on an embedding is added to: the output layer keeps sharing it
        path, _, leaf = key.removeprefix(PREFIX).replace(".base_layer.", ".").rpartition(".")
        name = changes.name(path, leaf)
        if name is None:
            continue
        if size != changes.sizes[name]:
            raise UserError(
                f"{adapter.weights}: {key} has shape {list(size)}, but the backbone's {list(changes.sizes[name])}: a "
                "changed vocabulary cannot be merged."
            )
        tied = is_base or bool(adapter.config.get("ensure_weight_tying"))
        changes.replace(name, partial(adapter.read, key), shared=tied)
        found.add(key)
    return found
