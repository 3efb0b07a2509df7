"""The weights of a backbone as they would be without quantisation, read one at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_mux.backbone.checkpoint import Checkpoint
from megatron_mux.backbone.quantised_source import QuantisedSource, stored_tensors
from megatron_mux.backbone.registry import BackboneInfo, stored_dtype
from megatron_mux.backbone.resolve import expected, quantised_weights
from megatron_mux.tensor_file import TensorInfo

_CHUNK_BYTES = 32 << 20


class BackboneSource:
    """Reads a checkpoint's weights by their full Hugging Face names.

    Args:
        info: Of the backbone.
        checkpoint: Its files, open.
        rounded_to: The dtype in which a run computed that quantised the backbone on load; None: the checkpoint's.
        on_gpu: Whether it computed on a GPU.

    Attributes:
        tensors: Dtype and shape of each weight, in the order in which the files hold them; a weight that is stored
            quantised has the dtype that config.json names.
    """

    def __init__(
        self,
        info: BackboneInfo,
        checkpoint: Checkpoint,
        rounded_to: torch.dtype | None = None,
        on_gpu: bool = False,
    ) -> None:
        self.info, self._checkpoint = info, checkpoint
        self._quantised: dict[str, tuple[int, int]] = {}
        quantisation = info.shape.quantisation
        places, stored = dict(info.stored), dict[str, tuple[int, int]]()
        if quantisation is not None:
            self._quantised = quantised_weights(info.shape)
            wide = getattr(torch, stored_dtype(info.path) or "", torch.float32)
            self._dtype = (rounded_to or wide) if quantisation.is_made else torch.float32
            self._matrices = QuantisedSource(checkpoint, info.stored, quantisation, self._dtype, on_gpu)
            stored = {} if quantisation.is_made else self._quantised
            for name, size in stored.items():
                codes, *others = stored_tensors(quantisation, name, size)
                places = {each: place for each, place in places.items() if each not in others}
                places[name] = places.pop(codes)
        order = {place: number for number, place in enumerate(checkpoint.tensors)}
        shapes = expected(info.shape)
        self.tensors = {
            name: TensorInfo(wide if name in stored else checkpoint.dtype(places[name]), shapes[name])
            for name in sorted(places, key=lambda name: order[places[name]])
        }
        self._places = places

    def written_name(self, name: str) -> str:
        """What a weight is called where it is written: as in the checkpoint, which may lack the model's prefix."""
        base = self.info.shape.names.base
        bare = not self._places[name].startswith(base) and name.startswith(base)
        return name.removeprefix(base) if bare else name

    def read(self, name: str) -> Tensor:
        """A weight, in its own dtype or more precisely."""
        if name not in self._quantised:
            return self._checkpoint.read(self._places[name], slice(0, self.tensors[name].shape[0]))
        transposed = self.info.shape.names.transposed
        values = self._matrices.matrix(name, self._quantised[name], transposed).values(self._dtype)
        return values.t() if transposed else values

    def parts(self, name: str) -> Iterator[Tensor]:
        """The same, some rows at a time."""
        shape = self.tensors[name].shape
        if name in self._quantised or len(shape) != 2:
            yield self.read(name)
            return
        everything = slice(0, shape[0]), slice(0, shape[1])
        for _, chunk in self._checkpoint.read_chunks(self._places[name], *everything, _CHUNK_BYTES):
            yield chunk
