"""An adapter's files in peft's format, read one tensor at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_mux.adapters.peft_format import CONFIG, WEIGHTS
from megatron_mux.errors import UserError
from megatron_mux.files import read_json

PREFIX = "base_model.model."
_DTYPES = ("F64", "F32", "F16", "BF16")
_KEPT_TENSORS = 3
"""Tensors kept after reading: experts, which a backbone stores one by one, use the same A and B."""


class StoredAdapter:
    """An adapter's config and tensors.

    Args:
        directory: Holds `adapter_config.json` and `adapter_model.safetensors`.

    Attributes:
        directory: See above.
        config: Content of `adapter_config.json`.
        shapes: Shape of each tensor by key.

    Raises:
        UserError: A file is missing or unreadable, or a tensor holds no floating-point numbers.
    """

    def __init__(self, directory: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.directory = directory
        missing = [name for name in (CONFIG, WEIGHTS) if not (directory / name).is_file()]
        if missing:
            raise UserError(
                f"{directory} holds no {' and no '.join(missing)}: give the directory of a PEFT adapter."
            )
        self.config = read_json(directory / CONFIG)
        self.weights = directory / WEIGHTS
        try:
            file: Any = safe_open(self.weights, framework="pt")
        except (OSError, SafetensorError) as error:
            raise UserError(f"{self.weights} is not a readable safetensors file: {error}.") from None
        self._file = file
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
        wrong = [key for key, part in slices.items() if part.get_dtype() not in _DTYPES]
        if wrong:
            raise UserError(
                f"{self.weights}: {wrong[0]} is stored as {slices[wrong[0]].get_dtype()}: supported are "
                f"{', '.join(_DTYPES)}."
            )
        self.shapes: Mapping[str, tuple[int, ...]] = {
            key: tuple(part.get_shape()) for key, part in slices.items()
        }
        self.read = lru_cache(_KEPT_TENSORS)(self._read)

    @property
    def kind(self) -> str:
        """Its `peft_type`."""
        return str(self.config.get("peft_type"))

    @property
    def name(self) -> str:
        """What it is called in messages and model cards: its directory, without the path."""
        path = self.directory.resolve()
        return f"{path.parent.name}/{path.name}" if path.name.startswith("checkpoint-") else path.name

    def _read(self, key: str) -> Tensor:
        """A tensor in fp32 (fp64 if stored so).

        Raises:
            UserError: It holds NaN or infinity.
        """
        tensor: Tensor = self._file.get_tensor(key)
        tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        if not bool(tensor.isfinite().all()):
            raise UserError(
                f"{self.weights}: {key} holds NaN or infinity: the task has diverged; take an earlier checkpoint."
            )
        return tensor

    def paths(self, suffix: str) -> list[str]:
        """Paths of the modules that have a tensor with this end of the key."""
        return [
            key.removeprefix(PREFIX).removesuffix(suffix)
            for key in self.shapes
            if key.startswith(PREFIX) and key.endswith(suffix)
        ]

    def fingerprint(self) -> str:
        """SHA-256 of the file of tensors."""
        with self.weights.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
