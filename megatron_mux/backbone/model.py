"""The backbone: a frozen Megatron-Core GPT model that computes packed micro-batches, one pipeline stage of it.

Shapes: T tokens in the micro-batch, N labelled ones, H hidden, V vocabulary. Between layers hidden states are
`[T, 1, H]`, Megatron's `[s, b, h]`; with sequence parallelism each tensor rank holds its T / tp rows of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megatron_mux.backbone import columns, plain, weights
from megatron_mux.backbone.checkpoint import Checkpoint, NoWeights
from megatron_mux.backbone.experts.at_start import check_experts, placement_or_default
from megatron_mux.backbone.experts.layer import MoELayer
from megatron_mux.backbone.experts.moving import move_experts
from megatron_mux.backbone.layer import LayersPass, compute_layer
from megatron_mux.backbone.layer_pieces import LayerPieces, TensorMessages, yields_of
from megatron_mux.backbone.model_directory import open_checkpoint
from megatron_mux.backbone.module_weights import ModuleWeights
from megatron_mux.backbone.pieces import Yields
from megatron_mux.backbone.registry import BackboneInfo, info_without_weights, read_backbone_info
from megatron_mux.backbone.rotary import Angles, StageRotary
from megatron_mux.backbone.split import Split, even_split, stage_layers
from megatron_mux.backbone.stage_pass import Pieces, StagePass
from megatron_mux.backbone.vocabulary import Vocabulary
from megatron_mux.backbone.weight_offload import Kind, WeightOffload
from megatron_mux.base_ops import BaseOpInfo
from megatron_mux.batch.packed_batch import PackedBatch, activate
from megatron_mux.errors import UserError
from megatron_mux.expert_shape import Placement
from megatron_mux.kernels.loss.preference import RowScale
from megatron_mux.kernels.own_rows import Place, VocabularyPart
from megatron_mux.quantised.scheme import QuantMethod
from megatron_mux.runtime import Parallel

Recompute = Literal["none", "full", "selective"]


class Backbone:
    """One stage of the frozen model on this process. Made by `Backbone.load`, or several by `load_stages`.

    Attributes:
        info: What config.json and the headers of the weights say.
        shape: Its structure, `padded_vocab` as divided here.
        device: Of the weights.
        layers: Global indices of this stage's layers.
        first, last: Whether it embeds tokens; whether it computes the loss.
        model: Megatron's `GPTModel` (a container here: its `forward` is not used), or plain modules called alike.
        placement: Which expert ranks hold which experts; None without experts.
        vocabulary: Its embedding and output layer, and the rows of them that tasks train themselves.
        module_weight: Reads the whole weight of a linear module from its file.
        residence: Where its parameters live; unless resident, they can be read while their group is in use only.
        lowest_adapter: Returns the lowest layer with an adapter of some task; replaced where most are on another rank.
    """

    def __init__(
        self,
        info: BackboneInfo,
        parallel: Parallel,
        layers: range,
        dtype: torch.dtype,
        recompute: Recompute,
        residence: Kind,
        source: Checkpoint | NoWeights,
        placement: Placement | None = None,
        ends: bool = True,
        embedding: nn.Parameter | None = None,
    ) -> None:
        self.info = info
        padded = -(-info.shape.vocab // parallel.tp_size) * parallel.tp_size
        self.shape = shape = dataclasses.replace(info.shape, padded_vocab=padded)
        self.parallel = parallel
        self.dtype = dtype
        self.recompute = recompute
        self.device = parallel.device
        self.layers = layers
        self.first, self.last = ends and layers.start == 0, ends and layers.stop == shape.layers
        self.placement = placement_or_default(shape, parallel, placement)
        self.model: Any = self._build(recompute == "selective")
        self.offload = WeightOffload(residence, parallel)
        self.module_weight = ModuleWeights(info, source, dtype, self.device.type == "cuda")
        part = dataclasses.replace(weights.Part.of(parallel, self.placement), ends=ends)
        weights.load(self.model, shape, layers, source, info.stored, self.offload, part, dtype, embedding)
        self.lowest_adapter: Callable[[Backbone], int] = _lowest_attached
        self._anchor = torch.zeros(0, device=self.device, requires_grad=True)
        self.vocabulary = Vocabulary(self.model, shape, parallel, dtype, self.offload)
        self._rotary = StageRotary(shape, layers, dtype, self.device)

    def _build(self, recompute_attention: bool) -> Any:
        """This stage's model on the meta device: Megatron's, or plain modules in a process without its groups."""
        if self.parallel.is_alone:
            return plain.build(
                self.shape, self.dtype, self.layers, recompute_attention, (self.first, self.last)
            )
        from megatron_mux.backbone import spec  # imports Megatron-Core, which takes seconds

        return spec.build(
            self.shape,
            self.parallel,
            self.dtype,
            self.layers,
            recompute_attention,
            self.placement,
            (self.first, self.last),
        )

    @classmethod
    def load(
        cls,
        path: str | Path,
        parallel: Parallel,
        dtype: torch.dtype = torch.float32,
        recompute: Recompute = "none",
        split: Split | None = None,
        stage: int | None = None,
        residence: Kind = "resident",
        config_only: bool = False,
        placement: Placement | None = None,
        ends: bool = True,
        quantise: QuantMethod | None = None,
    ) -> Backbone:
        """Build this rank's share of a stage and fill it, reading nothing else of the checkpoint.

        Args:
            path: A Hugging Face directory, or one of a Megatron checkpoint.
            recompute: What to compute again in the backward: nothing, whole layers (`full`), or core attention.
            split: Layers of each stage; by default one stage to a rank, with the layers divided evenly.
            stage: The stage to load; by default this rank's first.
            config_only: Do not look for weights: make parameters with undefined values.
            placement: Which expert ranks hold which experts; by default neighbouring ones share a rank.
            ends: Whether the first stage embeds tokens, and the last one has the final norm and the output layer.
            quantise: How to quantise the weights of linear modules, if the checkpoint does not store them so.

        Raises:
            UserError: The directory, its config or its tensors are invalid or unsupported, or cannot be divided so.
        """
        info = (info_without_weights if config_only else read_backbone_info)(path, quantise)
        info.check_parallel(parallel.tp_size, parallel.pp_size, *parallel.experts.sizes[:2])
        check_experts(info.shape, parallel, residence)
        number = parallel.pp_rank if stage is None else stage
        layers = stage_layers(split or even_split(info.shape.layers, parallel.pp_size))[number]
        source = NoWeights() if config_only else open_checkpoint(info.path, info.shape)
        return cls(info, parallel, layers, dtype, recompute, residence, source, placement, ends)

    # ---- computing --------------------------------------------------------------------------------------------------

    def forward(
        self,
        batch: PackedBatch,
        hidden: Tensor | None = None,
        labelled_only: bool = False,
        part: range | None = None,
    ) -> Tensor:
        """Compute this stage on a micro-batch; call inside `activate(batch)`, forward and backward.

        Args:
            batch: The micro-batch, on this device. One without rows computes nothing of its own, but still gathers
                the weights, and computes the experts' rows, that other data-parallel ranks need at this time, forward
                and backward.
            hidden: Output of the previous stage; None on the first stage.
            labelled_only: On the last stage, compute the last layer's MLP and the final norm on labelled rows only.
                Ignored with sequence parallelism, which divides the rows, and where a router needs all of them for a
                balancing loss.
            part: Global indices of the layers to compute; None: all of the stage.

        Returns:
            Hidden states of `hidden_shape(batch)`, after the final norm on the last stage; `[N, 1, H]` with
            `labelled_only`. `loss` and `predict` take either. They require a gradient only if `hidden` does or an
            adapter lies below: of a task in this batch if the weights are resident, else of any task.
        """
        if hidden is None:
            hidden = self.embed(batch)
        angles = self.angles(batch)
        labelled_only = labelled_only and self._selects_labelled(batch)
        if not self.layers:
            return self._final_norm(batch, hidden, labelled_only) if self.last else hidden
        layers = self.begin_layers(hidden, lowest := self._trained_from)
        for i in range(len(self.layers)) if part is None else [self.layers.index(layer) for layer in part]:
            layers.through(i, partial(self._layer, i, batch, angles[i], labelled_only, lowest))
        return layers.hidden

    def begin_layers(self, hidden: Tensor, trained_from: int) -> LayersPass:
        """Begin a pass through this stage's layers: see `WeightOffload.layers`."""
        return self.offload.layers(hidden, trained_from) if self.offload.groups else LayersPass(hidden)

    def begin(self, batch: PackedBatch, input_needs_grad: bool, labelled_only: bool = False) -> StagePass:
        """Begin to compute this stage on a micro-batch with its messages left to the caller.

        Args:
            input_needs_grad: Whether an earlier stage needs a gradient: the same on all expert ranks.
        """
        decoder, last = self.model.decoder, len(self.layers) - 1
        labelled_only = labelled_only and self._selects_labelled(batch)
        trained_from = self._trained_from
        angles = self.angles(batch) if batch.rows else []
        layers = [
            LayerPieces(
                layer=decoder.layers[i],
                batch=batch,
                angles=angles[i] if batch.rows else None,
                messages=self._tensor_messages,
                labelled_only=labelled_only and i == last,
                recompute=self.recompute == "full",
                last_norm=decoder.final_layernorm if batch.rows and self.last and i == last else None,
                anchor=self._anchor,
                exchanged=input_needs_grad or i >= trained_from,
            )
            if self._computes(i, batch)
            else None
            for i in range(len(self.layers))
        ]
        return StagePass(layers, self.offload, trained_from, self._messages)

    @property
    def pieces(self) -> Pieces:
        """The pieces of a pass that `begin` begins, whatever the micro-batch."""
        return Pieces.between(self._messages)

    @property
    def _tensor_messages(self) -> TensorMessages:
        return TensorMessages(self.parallel.tp_size > 1, self.parallel.sequence_parallel)

    @property
    def _messages(self) -> list[Yields]:
        """Messages of each layer, each way; of a backward pass also those of layers that it computes again."""
        found = [yields_of(layer, self._tensor_messages) for layer in self.model.decoder.layers]
        return [own.recomputed for own in found] if self.recompute == "full" else found

    def embed(self, batch: PackedBatch) -> Tensor:
        """Embed the tokens: see `Vocabulary.embed`."""
        return self.vocabulary.embed(batch, self.hidden_shape(batch))

    def angles(self, batch: PackedBatch) -> list[Angles | None]:
        """The rotary angles of a micro-batch for each layer of this stage: see `StageRotary.angles`."""
        return self._rotary.angles(batch)

    def loss(
        self,
        hidden: Tensor,
        batch: PackedBatch,
        scale: RowScale | None = None,
        smoothing: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The loss of what `forward` returned; last stage only: see `Vocabulary.loss`."""
        return self.vocabulary.loss(hidden, batch, scale, smoothing)

    def predict(self, hidden: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """The likeliest tokens after what `forward` returned; last stage only: see `Vocabulary.predict`."""
        return self.vocabulary.predict(hidden, batch)

    def scores(self, hidden: Tensor, batch: PackedBatch) -> Tensor:
        """Logits of what `forward` returned; last stage only: see `Vocabulary.scores`."""
        return self.vocabulary.scores(hidden, batch)

    def hidden_shape(self, batch: PackedBatch) -> tuple[int, int, int]:
        """Shape of the hidden states that stages send each other."""
        divided = self.parallel.tp_size if self.parallel.sequence_parallel else 1
        return batch.rows // divided, 1, self.shape.hidden

    # ---- adapters ---------------------------------------------------------------------------------------------------

    def base_ops(self) -> list[BaseOpInfo]:
        """The operators of this stage's layers that adapters can attach to."""
        found = []
        part = weights.Part.of(self.parallel, self.placement)
        for index, layer in zip(self.layers, self.model.decoder.layers, strict=True):
            for op in part.ops(self.shape, index):
                found.append(
                    BaseOpInfo(
                        layer=index,
                        name=op,
                        module=layer.get_submodule(columns.MODULE_PATHS[op]),
                        inputs=columns.inputs(self.shape, op, *part.of_op(op)),
                        parts=columns.parts(self.shape, op, *part.of_op(op)),
                        hf_prefix=self.shape.names.layer.format(index),
                    )
                )
        return found

    @property
    def vocabulary_parts(self) -> Mapping[Place, VocabularyPart] | None:
        """What tasks can train rows of in place of the backbone's; None: in no stage of this backbone."""
        return self.vocabulary.parts

    def place_experts(self, placement: Placement) -> int:
        """Move routed experts to the ranks that a placement names, rank to rank. Every rank calls it, between steps.

        Returns:
            Bytes of weights that this rank received.

        Raises:
            UserError: Weights are not resident.
        """
        assert self.placement is not None
        if self.offload.groups:
            raise UserError(
                "Experts cannot move: that needs --mux-backbone-weights resident and no quantisation."
            )
        received = 0
        for _, layer in self.expert_layers():
            received += move_experts(layer, self.placement, placement)
        self.placement = placement
        return received

    @property
    def in_step(self) -> bool:
        """Whether data-parallel ranks must make the same passes, because each needs what others hold."""
        return self.offload.in_step or (self.placement is not None and self.parallel.experts.over_data)

    def expert_layers(self) -> Iterator[tuple[int, MoELayer]]:
        """The experts of this stage's layers, by the layer's index in the whole backbone."""
        for index, layer in zip(self.layers, self.model.decoder.layers, strict=True):
            if self.shape.has_experts(index):
                yield index, layer.mlp

    # ---- details ----------------------------------------------------------------------------------------------------

    @property
    def _trained_from(self) -> int:
        """Index within the stage of the first layer that some task needs gradients of."""
        if self.vocabulary.embeds_own:
            return 0
        return max(0, self.lowest_adapter(self) - self.layers.start)

    def _selects_labelled(self, batch: PackedBatch) -> bool:
        """Whether the last layer of this stage may compute its MLP on labelled rows only."""
        return self.last and not self.parallel.sequence_parallel and not batch.balanced.count

    def _computes(self, i: int, batch: PackedBatch) -> bool:
        """Whether this rank computes the stage's layer `i`: without rows its experts may have those of others."""
        return bool(batch.rows) or (
            self.shape.has_experts(self.layers[i]) and self.parallel.experts.over_data
        )

    def _layer(
        self, i: int, batch: PackedBatch, angles: Angles | None, labelled: bool, lowest: int, hidden: Tensor
    ) -> Tensor:
        """Compute the stage's layer `i`, on the last stage with the final norm after its last layer."""
        if not self._computes(i, batch):
            return hidden
        decoder = self.model.decoder
        is_last = self.last and i == len(decoder.layers) - 1
        trimmed = labelled and is_last  # labelled rows only
        # Below all adapters no expert rank needs the backward; above, all of them take part in it.
        trained = torch.is_grad_enabled() and (i >= lowest or hidden.requires_grad)
        with torch.set_grad_enabled(trained):
            hidden = compute_layer(decoder.layers[i], hidden, angles, trimmed, self.recompute == "full")
        if is_last:
            with activate(batch.labelled if trimmed else batch):
                hidden = decoder.final_layernorm(hidden)
        return hidden

    def _final_norm(self, batch: PackedBatch, hidden: Tensor, labelled_only: bool) -> Tensor:
        """The last stage without layers: the final norm, of labelled rows alone if these were asked for."""
        if labelled_only:
            hidden, batch = hidden.index_select(0, batch.label_rows), batch.labelled
        with activate(batch), self.offload.using("head"):
            normed: Tensor = self.model.decoder.final_layernorm(hidden)
        return normed


def _lowest_attached(backbone: Backbone) -> int:
    for number, layer in zip(backbone.layers, backbone.model.decoder.layers, strict=True):
        # Attaching replaces `forward` on the instance, on every rank of the stage alike.
        if any("forward" in vars(module) for module in layer.modules()):
            return number
    return backbone.layers.stop


def load_stages(
    path: str | Path,
    parallel: Parallel,
    dtype: torch.dtype = torch.float32,
    recompute: Recompute = "none",
    split: Split | None = None,
    residence: Kind = "resident",
    config_only: bool = False,
    placement: Placement | None = None,
    quantise: QuantMethod | None = None,
) -> list[Backbone]:
    """Load all stages of this rank, in the order of the model; see `Backbone.load`."""
    stages = len(split) if split else parallel.pp_size
    load = partial(Backbone.load, path, parallel, dtype, recompute, split, residence=residence)
    load = partial(load, config_only=config_only, placement=placement, quantise=quantise)
    return [load(stage=stage) for stage in range(parallel.pp_rank, stages, parallel.pp_size)]
