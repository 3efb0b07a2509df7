"""Whole weights of linear modules, for what is computed from them once: initial values of adapters."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_mux.backbone import resolve
from megatron_mux.backbone.checkpoint import Checkpoint, NoWeights
from megatron_mux.backbone.quantised_source import QuantisedSource
from megatron_mux.backbone.registry import BackboneInfo


class ModuleWeights:
    """Reads weights from the backbone's files, whatever a rank holds of them.

    Args:
        dtype: Of its computation.
        on_gpu: Whether it computes on a GPU.
    """

    def __init__(
        self, info: BackboneInfo, source: Checkpoint | NoWeights, dtype: torch.dtype, on_gpu: bool
    ) -> None:
        self._info, self._source, self._dtype = info, source, dtype
        self._quantised = resolve.quantised_weights(info.shape)
        if info.shape.quantisation is not None:
            self._matrices = QuantisedSource(source, info.stored, info.shape.quantisation, dtype, on_gpu)

    def __call__(self, path: str) -> Tensor | None:
        """A module's weight `[out, in]` as the backbone computes with it: rounded to its dtype, or dequantised.

        Args:
            path: Full Hugging Face path of the module.

        Returns:
            On the CPU; None if there are no weights.

        Raises:
            UserError: The file cannot be read.
        """
        if isinstance(self._source, NoWeights):
            return None
        name, transposed = f"{path}.weight", self._info.shape.names.transposed
        with self._source:
            if name not in self._quantised:
                stored = self._source.read(self._info.stored[name], slice(None)).to(self._dtype)
                return stored.t() if transposed else stored
            return self._matrices.matrix(name, self._quantised[name], transposed).values(self._dtype)
