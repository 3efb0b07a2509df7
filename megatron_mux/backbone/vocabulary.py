"""The ends of the backbone: the token embedding and the output layer, and the rows of them that tasks train.

Shapes: T tokens in the micro-batch, N labelled ones, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from megatron_mux.backbone.weight_offload import Key, WeightOffload
from megatron_mux.batch.packed_batch import PackedBatch
from megatron_mux.kernels.embedding_noise import EmbeddingNoise
from megatron_mux.kernels.loss.head import OutputLayer, predict, weighted_loss, whole_scores
from megatron_mux.kernels.loss.preference import RowScale, scale_gradient
from megatron_mux.kernels.own_rows import Lookup, Place, VocabularyPart
from megatron_mux.runtime import Parallel
from megatron_mux.shape import BackboneShape


class Vocabulary:
    """The embedding and the output layer of a stage, as far as it has them.

    Args:
        shape: The backbone's, `padded_vocab` as divided here.

    Attributes:
        parts: This rank's part of each matrix that the stage has; empty on expert managers.
        noise: Added to the embeddings of tasks while they train.
    """

    def __init__(
        self,
        model: Any,
        shape: BackboneShape,
        parallel: Parallel,
        dtype: torch.dtype,
        offload: WeightOffload,
    ) -> None:
        self._model, self._shape, self._parallel = model, shape, parallel
        self._dtype, self._offload = dtype, offload
        self._group = parallel.tp_group if parallel.tp_size > 1 else None
        self._anchor = torch.zeros(0, device=parallel.device, requires_grad=True)
        self._scale: Tensor | None = None
        if shape.embedding_scale != 1.0:
            # Rounded as transformers rounds it: to fp32, then to the backbone's dtype.
            scale = torch.tensor(shape.embedding_scale, dtype=torch.float32, device=parallel.device)
            self._scale = scale.to(dtype)
        size = shape.padded_vocab // parallel.tp_size
        start = min(parallel.tp_rank * size, shape.vocab)
        stop = min(start + size, shape.vocab)
        self.noise: dict[str, EmbeddingNoise] = {}
        self.parts: dict[Place, VocabularyPart] = {}
        if hasattr(model, "embedding"):
            self.parts["embedding"] = VocabularyPart(
                start, stop, lambda: self._weight("embedding", stop - start), shape.padding_token
            )
        if hasattr(model, "output_layer"):
            self.parts["head"] = VocabularyPart(start, stop, lambda: self._weight("head", stop - start))

    def _weight(self, key: Key, rows: int) -> Tensor:
        """A copy of this rank's part of a matrix in host memory, without padding."""
        with self._in_place(key):
            module = self._model.output_layer if key == "head" else self._model.embedding.word_embeddings
            weight: Tensor = module.weight.detach()[:rows]
            return weight.to("cpu", copy=True)

    def _in_place(self, key: Key, following: Key | None = None) -> AbstractContextManager[None]:
        """Context in which an end's weights are in place; those of a resident backbone always are."""
        return self._offload.using(key, following) if self._offload.groups else nullcontext()

    @property
    def embeds_own(self) -> bool:
        """Whether some task trains rows of the embedding."""
        return "embedding" in self.parts and bool(self.parts["embedding"].own)

    def embed(self, batch: PackedBatch, shape: tuple[int, int, int]) -> Tensor:
        """Embed the tokens: `[T, 1, H]`, this rank's rows of it with sequence parallelism.

        Returns:
            Hidden states that require a gradient if a task of the batch trains rows of the embedding.
        """
        with self._in_place("embedding", 0):
            if not batch.rows:
                return torch.empty(shape, dtype=self._dtype, device=self._parallel.device)
            embedding = self._model.embedding
            with torch.no_grad():
                # Not `embedding.forward`: with sequence parallelism it wants a CUDA generator for its dropout of zero.
                words = embedding.word_embeddings(batch.tokens.unsqueeze(0))
            words = self._with_own_rows(words, batch, divided=embedding.reduce_scatter_embeddings)
            if self._scale is not None:
                words = words * self._scale
            if self.noise and batch.training:
                words = self._with_noise(words, batch, divided=embedding.reduce_scatter_embeddings)
            if embedding.reduce_scatter_embeddings:
                return words
            hidden: Tensor = words.transpose(0, 1)
            if self._shape.position_limit is not None:
                places = embedding.position_embeddings(batch.positions + self._shape.position_offset)
                hidden = hidden + places.unsqueeze(1)
            if self._parallel.sequence_parallel:
                from megatron.core.tensor_parallel import mappings

                hidden = mappings.scatter_to_sequence_parallel_region(hidden, group=self._parallel.tp_group)
            return hidden.contiguous()

    def _with_own_rows(self, words: Tensor, batch: PackedBatch, divided: bool) -> Tensor:
        if not self.embeds_own or not (own := self.parts["embedding"].of(batch.task_rows)):
            return words
        flat = words.view(-1, words.shape[-1])
        first = self._parallel.tp_rank * flat.shape[0] if divided else 0
        lookup = Lookup(self.parts["embedding"], batch.tokens, own, first, divided, self._group)
        return lookup.replace(flat, self._anchor).view_as(words)

    def _with_noise(self, words: Tensor, batch: PackedBatch, divided: bool) -> Tensor:
        flat = words.reshape(-1, words.shape[-1]).clone()
        first = self._parallel.tp_rank * flat.shape[0] if divided else 0
        for name, rows in batch.task_rows.items():
            start, stop = (min(max(row - first, 0), flat.shape[0]) for row in rows)
            if name in self.noise and start < stop:
                part = slice(start + first, stop + first)
                ids, index = batch.groups.sequence_ids[part], batch.groups.token_index[part]
                noise = self.noise[name].of(batch.task_steps[name], ids, index, flat.shape[1])
                flat[start:stop] += noise.to(flat.dtype)
        return flat.view_as(words)

    def loss(
        self, hidden: Tensor, batch: PackedBatch, scale: RowScale | None, smoothing: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The micro-batch's share of its tasks' losses.

        Args:
            hidden: What the last layer returned, of all rows or of the labelled ones.
            scale: Factors of the labelled rows' gradients, set before the backward pass; None: all are one.
            smoothing: See `weighted_loss`.

        Returns:
            The scalar sum over labels of weight x negative log-likelihood, differentiable with respect to `hidden`;
            and the `[N]` negative log-likelihoods, fp32, detached.
        """
        with self._in_place("head"):
            if not batch.rows:
                return hidden.sum(dtype=torch.promote_types(self._dtype, torch.float32)), batch.label_weights
            rows = self._rows(hidden, batch)
            if scale is not None:
                rows = scale_gradient(rows, scale)
            layer = self.output_layer(batch.labelled.task_rows, share=True)
            total, nll = weighted_loss(rows, batch.labels, batch.label_weights, layer, smoothing)
        return total, nll.float()

    def predict(self, hidden: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """The labels' negative log-likelihoods and the likeliest tokens, without gradients.

        Args:
            hidden: What the last layer returned, of all rows or of the labelled ones.

        Returns:
            `[N]` fp32, and `[N]` int64.
        """
        with torch.no_grad(), self._in_place("head"):
            if not batch.rows:
                return batch.label_weights, batch.labels
            layer = self.output_layer(batch.labelled.task_rows, share=False)
            nll, tokens = predict(self._rows(hidden, batch), batch.labels, layer)
        return nll.float(), tokens

    def scores(self, hidden: Tensor, batch: PackedBatch) -> Tensor:
        """The logits of the labelled rows over the whole vocabulary, without gradients.

        Args:
            hidden: What the last layer returned, of all rows or of the labelled ones.

        Returns:
            `[N, V]` fp32, the same on every tensor rank.
        """
        with torch.no_grad(), self._in_place("head"):
            if not batch.rows:
                return hidden.new_zeros(0, 1)
            layer = self.output_layer(batch.labelled.task_rows, share=False)
            return whole_scores(self._rows(hidden, batch), layer)

    def all_rows(self, hidden: Tensor) -> Tensor:
        """All rows `[T, H]` on every tensor rank; the backward sums the ranks' gradients."""
        if self._parallel.sequence_parallel:
            from megatron.core.tensor_parallel import mappings

            hidden = mappings.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=True, group=self._parallel.tp_group
            )
        return hidden.squeeze(1)

    def _rows(self, hidden: Tensor, batch: PackedBatch) -> Tensor:
        """Labelled rows `[N, H]`. N is less than T, so the number of rows tells whether they were selected already."""
        rows = self.all_rows(hidden)
        return rows if rows.shape[0] == batch.label_rows.shape[0] else rows.index_select(0, batch.label_rows)

    def output_layer(self, labelled: Mapping[str, tuple[int, int]], share: bool) -> OutputLayer:
        """The output layer of a micro-batch.

        Args:
            labelled: Task to its `(start, stop)` labelled rows.
            share: Whether tensor ranks sum the gradients of hidden states.
        """
        weight: Tensor = self._model.output_layer.weight
        return OutputLayer(
            weight=weight,
            start=self._parallel.tp_rank * weight.shape[0],
            vocab=self._shape.vocab,
            group=self._group,
            reduce_gradient=share and not self._parallel.sequence_parallel,
            own=part.of(labelled) if (part := self.parts["head"]).own else (),
        )
