"""All logits of a micro-batch, which training never computes at once."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_mux.backbone.model import Backbone
from megatron_mux.batch.packed_batch import PackedBatch


def all_logits(backbone: Backbone, batch: PackedBatch, hidden: Tensor | None = None) -> Tensor:
    """`[T, V]` logits of every row, gathered over tensor ranks, without gradients.

    Args:
        backbone: The last stage.
        batch: The micro-batch.
        hidden: What the stage's `forward` returned; None: from the tokens, with one stage and `batch` active.
    """
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

    if hidden is None:
        hidden = backbone.forward(batch)
    parallel = backbone.parallel
    with torch.no_grad(), backbone.offload.using("head"):
        ends = backbone.vocabulary
        rows, layer = ends.all_rows(hidden), ends.output_layer(batch.task_rows, share=False)
        wide = torch.promote_types(rows.dtype, torch.float32)
        local = torch.empty(rows.shape[0], layer.weight.shape[0], dtype=wide, device=rows.device)
        for part, used, scores in layer.chunks(rows):
            local[part, : used.weight.shape[0]] = scores
        if parallel.tp_size > 1:
            local = gather_from_tensor_model_parallel_region(local, group=parallel.tp_group)
        return local[:, : backbone.shape.vocab]
