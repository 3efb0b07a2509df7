"""A backbone whose first and last layers are on the client, and whose body is on a server."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_mux.backbone.model import Backbone
from megatron_mux.backbone.model_directory import open_checkpoint
from megatron_mux.backbone.registry import BackboneInfo
from megatron_mux.base_ops import BaseOpInfo
from megatron_mux.batch.packed_batch import PackedBatch
from megatron_mux.kernels.loss.preference import RowScale
from megatron_mux.runtime import Parallel
from megatron_mux.split.client.remote import RemoteBody


def load_ends(
    info: BackboneInfo, parallel: Parallel, cut_front: int, cut_back: int, dtype: torch.dtype = torch.float32
) -> tuple[Backbone, Backbone]:
    """Read the client's layers, and nothing else; a tied embedding is read once.

    Args:
        info: Of the whole backbone; its directory may hold the client's layers alone.
        parallel: Of a process by itself, see `Parallel.alone`.
        cut_front: Number of layers behind the embedding.
        cut_back: Number of layers before the final norm.
        dtype: Of weights and hidden states.

    Returns:
        The first layers with the embedding; the last ones with the final norm and the output layer.

    Raises:
        UserError: A file cannot be read, or the layers of this family need Megatron-Core.
    """
    source, layers = open_checkpoint(info.path, info.shape), info.shape.layers
    front = Backbone(info, parallel, range(cut_front), dtype, "none", "resident", source)
    embedding = front.model.get_parameter("embedding.word_embeddings.weight")
    last = range(layers - cut_back, layers)
    back = Backbone(info, parallel, last, dtype, "none", "resident", source, embedding=embedding)
    return front, back


class SplitBackbone(Backbone):
    """The whole model as one stage: an engine computes with it as with any other.

    It holds no parameters of its own, so it is not made as other stages are.

    Args:
        front, back: The client's layers, from `load_ends`.
        remote: Computes the layers between them.
    """

    def __init__(self, front: Backbone, back: Backbone, remote: RemoteBody) -> None:
        self.front, self.back, self.remote = front, back, remote
        self.info, self.shape, self.parallel = front.info, front.shape, front.parallel
        self.dtype, self.device, self.recompute = front.dtype, front.device, front.recompute
        self.layers = range(front.shape.layers)
        self.first = self.last = True
        self.placement = None
        self.offload, self.vocabulary = front.offload, front.vocabulary
        self.lowest_adapter = front.lowest_adapter
        self.module_weight = front.module_weight

    @property
    def vocabulary_parts(self) -> None:
        """Tasks cannot train rows of their own: the body sends no gradient below all adapters."""

    def forward(
        self,
        batch: PackedBatch,
        hidden: Tensor | None = None,
        labelled_only: bool = False,
        part: range | None = None,
    ) -> Tensor:
        """See `Backbone.forward`; the body computes all rows."""
        hidden = self.remote(batch, self.front.forward(batch))
        return self.back.forward(batch, hidden, labelled_only)

    def loss(
        self,
        hidden: Tensor,
        batch: PackedBatch,
        scale: RowScale | None = None,
        smoothing: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `Backbone.loss`."""
        return self.back.loss(hidden, batch, scale, smoothing)

    def predict(self, hidden: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """See `Backbone.predict`."""
        return self.back.predict(hidden, batch)

    def base_ops(self) -> list[BaseOpInfo]:
        """The operators of the client's layers that adapters can attach to."""
        return [*self.front.base_ops(), *self.back.base_ops()]
