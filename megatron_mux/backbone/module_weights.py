"""Whole weights of linear modules, for what is computed from them once: initial values of adapters."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_mux.backbone import resolve
from megatron_mux.backbone.checkpoint import Checkpoint
from megatron_mux.backbone.quantised_source import QuantisedSource
from megatron_mux.backbone.registry import BackboneInfo


class ModuleWeights:
    """Reads weights from the backbone's files, whatever a rank holds of them.

    Args:
        info: Of the backbone.
        dtype: Of its computation.
        on_gpu: Whether it computes on a GPU.
        has_files: Whether there are weights; else there is only a config.json.
    """

    def __init__(self, info: BackboneInfo, dtype: torch.dtype, on_gpu: bool, has_files: bool) -> None:
        self._info, self._dtype, self._on_gpu, self._has_files = info, dtype, on_gpu, has_files
        self._files: Checkpoint | None = None
        self._quantised = resolve.quantised_weights(info.shape)

    def __call__(self, path: str) -> Tensor | None:
        """A module's weight `[out, in]` as the backbone computes with it: rounded to its dtype, or dequantised.

        Args:
            path: Full Hugging Face path of the module.

        Returns:
            On the CPU; None if there are no weights.

        Raises:
            UserError: The file cannot be read.
        """
        if not self._has_files:
            return None
        if self._files is None:
            self._files = Checkpoint(self._info.path)
        name, shape = f"{path}.weight", self._info.shape
        with self._files as files:
            if name not in self._quantised:
                stored = files.read(self._info.stored[name], slice(None)).to(self._dtype)
                return stored.t() if shape.names.transposed else stored
            assert shape.quantisation is not None
            source = QuantisedSource(files, self._info.stored, shape.quantisation, self._dtype, self._on_gpu)
            matrix = source.matrix(name, self._quantised[name], shape.names.transposed)
        found = torch.empty(matrix.rows, matrix.columns, dtype=self._dtype)
        matrix.dequantise_into(found)
        return found
