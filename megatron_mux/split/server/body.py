"""The body of a backbone, computed for many sessions: one set of parameters, and each session's own adapter and layers.

Menos section 3.1 gives each client a model structure of its own over shared parameters. Here one structure serves all:
a micro-batch's rows meet the adapters of their own session only, in the layers of that session's body, so requests of
several sessions with the same layers can also be computed together, as hybrid tasks are.

Shapes: T rows of a session, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.adapters.adapter import TaskAdapter
from megatron_mux.adapters.attach import AdapterSet
from megatron_mux.adapters.host import Host
from megatron_mux.adapters.kind import AdapterSpec
from megatron_mux.adapters.tensors import blank
from megatron_mux.backbone.model import Backbone
from megatron_mux.batch.pack import PackedSequence, pack
from megatron_mux.batch.packed_batch import PackedBatch, activate
from megatron_mux.engine.optimize import TaskOptimizer, gradient_buffer_size, reduce_gradients
from megatron_mux.engine.snapshot import stored_parameters
from megatron_mux.engine.updates import BucketUpdate, update_of
from megatron_mux.errors import UserError
from megatron_mux.runtime import Parallel
from megatron_mux.split.protocol.pieces import MOMENTS, Piece, assemble, check_pieces, runs_of
from megatron_mux.tasks import TrainingSpec


@dataclass(frozen=True)
class Rows:
    """A session's rows of a micro-batch.

    Attributes:
        session: Its name.
        lengths: Tokens of each sequence, in the order of the rows.
        ids: Number of each sequence among those of its optimizer step: dropout masks depend on it.
        step: Optimizer steps done.
        training: Whether dropout is on.
        hidden: `[T, H]` hidden states, in the backbone's dtype and on its device.
        needs_input: Whether the client needs their gradient.
    """

    session: str
    lengths: tuple[int, ...]
    ids: tuple[int, ...]
    step: int
    training: bool
    hidden: Tensor
    needs_input: bool = False

    @property
    def count(self) -> int:
        """T."""
        return int(self.hidden.shape[0])


@dataclass(eq=False)
class Kept:
    """A forward pass that waits for its backward.

    Attributes:
        inputs: `[T, 1, H]` of each session, leaves of the graph.
        output: `[all T, 1, H]`, of this rank's layers.
        received: What came from the pipeline stage before.
        number: Names it to other ranks.
    """

    batch: PackedBatch
    inputs: list[Tensor]
    output: Tensor
    received: Tensor | None = None
    number: int = 0


@dataclass(eq=False)
class _Member:
    """A session's adapter and optimizer.

    Attributes:
        spec: The adapter's section.
        adapter: Its part in the body.
        optimizer: Steps that part.
        update: The same, as the engine calls it.
        penalised: The last step whose regulariser has been added to the gradients.
    """

    spec: AdapterSpec
    adapter: TaskAdapter
    optimizer: TaskOptimizer
    update: BucketUpdate
    penalised: int = -1


class Body:
    """Computes layers of a backbone for sessions that come and go.

    On several ranks, every rank calls each method with the same arguments; see `ranks`.

    Args:
        backbone: This rank's part of the layers; it needs no embedding and no output layer.
    """

    def __init__(self, backbone: Backbone, parallel: Parallel) -> None:
        self.backbone = backbone
        self.parallel = parallel
        base_ops, weights = backbone.base_ops(), backbone.module_weight
        self.adapters = AdapterSet(Host(base_ops, parallel, backbone.dtype, backbone.shape, weights=weights))
        self._members: dict[str, _Member] = {}

    # -- sessions

    def add(
        self,
        name: str,
        adapter: AdapterSpec,
        training: TrainingSpec,
        layers: range,
        total_steps: int,
        initial: Sequence[Piece] = (),
    ) -> None:
        """Attach a session's adapter to the layers of its body, with a fresh optimizer.

        Args:
            adapter, training: Sections of its task.
            layers: Global indices of its body's layers.
            total_steps: Optimizer steps that it runs for.
            initial: Values to start from, and what else a save holds; none makes a fresh adapter.

        Raises:
            UserError: A target is not a module of the backbone, or the values are not those of the adapter.
        """
        task = SimpleNamespace(name=name, adapter=adapter, training=training)
        values = None
        if initial:
            tensors = adapter.tensors(self.backbone.shape)
            check_pieces(initial, {key: tensor.shape for key, tensor in tensors.items()})
            values = {**blank(tensors), **assemble(initial, "value")}
        member = self.adapters.add(task, total_steps, values, layers)
        try:
            optimizer = TaskOptimizer(member, training, total_steps)
            states = {kind: assemble(initial, kind) for kind in MOMENTS}
            optimizer.load_state(
                {
                    key: {kind: values[key] for kind, values in states.items() if key in values}
                    for key in states["exp_avg"]
                }
            )
            member.load_state(assemble(initial, "extra"))
        except BaseException as error:
            self.adapters.remove(name)
            if isinstance(error, KeyError):
                raise UserError(f"the saved optimizer state has no {error}") from None
            raise
        self._members[name] = _Member(adapter, member, optimizer, update_of([optimizer]))

    def has(self, name: str) -> bool:
        """Whether a session's adapter is attached."""
        return name in self._members

    def remove(self, name: str) -> None:
        """Detach a session's adapter."""
        self.adapters.remove(name)
        del self._members[name]

    # -- passes

    @torch.no_grad()
    def _pack(self, rows: Sequence[Rows]) -> PackedBatch:
        sequences, names = [], tuple(r.session for r in rows)
        for request in rows:
            for length, number in zip(request.lengths, request.ids, strict=True):
                nothing = np.zeros(length, np.int64)
                sequences.append(PackedSequence(request.session, number, nothing, nothing.astype(bool), 1.0))
        host = pack(
            sequences,
            names,
            {r.session: r.step for r in rows},
            {name: self._members[name].spec.virtual_tokens for name in names},
            training=rows[0].training,
            slots={name: self._members[name].adapter.slot for name in names},
        )
        return host.to(self.parallel.device)

    def forward(self, rows: Sequence[Rows], layers: range, graph: bool) -> tuple[list[Tensor], Kept | None]:
        """Compute layers on rows of one or several sessions, as one micro-batch.

        Args:
            rows: Of each session; all training or all not.
            graph: Whether to build the graph of a backward pass.

        Returns:
            `[T, H]` of each session, and what `backward` takes.
        """
        batch = self._pack(rows)
        inputs = [r.hidden.unsqueeze(1).detach() for r in rows]
        for request, leaf in zip(rows, inputs, strict=True):
            leaf.requires_grad_(graph and request.needs_input)
        self.adapters.prepare()
        with torch.set_grad_enabled(graph):
            hidden = inputs[0] if len(inputs) == 1 else torch.cat(inputs)
            output = self._compute(batch, hidden, layers)
        outputs = list(output.detach().squeeze(1).split([r.count for r in rows]))
        return outputs, Kept(batch, inputs, output) if graph else None

    def _compute(self, batch: PackedBatch, hidden: Tensor, layers: range) -> Tensor:
        """`[T, 1, H]` to the same, by this rank's part of the layers."""
        held = self.backbone.layers
        part = range(max(layers.start, held.start), min(layers.stop, held.stop))
        if not part:
            return hidden
        with activate(batch):
            return self.backbone.forward(batch, hidden, part=part)

    def backward(self, kept: Kept, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Back-propagate to adapters and inputs.

        Args:
            kept: What `forward` returned; its memory is free afterwards.
            gradients: `[T, H]` of each session's output.

        Returns:
            `[T, H]` gradient of each input that a client needs, else None.
        """
        whole = gradients[0] if len(gradients) == 1 else torch.cat(list(gradients))
        self._back(kept, whole.unsqueeze(1))
        made: list[Tensor | None] = []
        for leaf in kept.inputs:
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            made.append(gradient.squeeze(1) if leaf.requires_grad else None)
        kept.inputs, kept.output = [], kept.output.new_empty(0)
        return made

    @staticmethod
    def _back(kept: Kept, gradient: Tensor) -> None:
        """Back-propagate `[T, 1, H]` through this rank's part of the layers."""
        if kept.output.requires_grad:
            with activate(kept.batch):
                torch.autograd.backward((kept.output,), (gradient,))

    # -- optimizer steps

    def squared_norm(self, name: str, step: int) -> float:
        """Squared norm of a session's gradient in the body, its regulariser included, over all ranks."""
        member, device = self._members[name], self.parallel.device
        if member.penalised != step:
            member.adapter.penalty(step)
            member.penalised = step
            params = [member.adapter.flat_params]
            size = gradient_buffer_size(params, self.parallel)
            buffer = torch.empty(size, dtype=torch.uint8, device=device)
            reduce_gradients(params, self.parallel, torch.zeros(1, device=device), buffer)
        squares = member.update.squared_norms()
        if self.parallel.world_size > 1:
            dist.all_reduce(squares)
        return float(squares[0])

    def update(self, name: str, step: int, norm: float, skip: bool) -> None:
        """Take a session's optimizer step, or skip it.

        Args:
            step: Optimizer steps done before it.
            norm: Of its gradient over client and server, for clipping.
            skip: Leave everything as it is, and make the gradients zero.
        """
        member, device = self._members[name], self.parallel.device
        member.penalised = -1
        if skip:
            member.optimizer.zero()
            return
        no_skip = torch.zeros(1, dtype=torch.bool, device=device)
        member.update.prepare([step], 1)
        member.update.update([step], 0, torch.tensor([norm], dtype=torch.float64, device=device), no_skip)
        if member.spec.acts_in_steps:
            member.adapter.after_step(step + 1, no_skip[0])
            member.adapter.flat_params.refresh()
        member.adapter.rollback_after(step + 1)

    def zero(self, name: str) -> None:
        """Forget a session's gradients."""
        self._members[name].penalised = -1
        self._members[name].optimizer.zero()

    # -- what it holds

    def state(self, name: str) -> list[Piece]:
        """Copies of a session's adapter and optimizer state, of this rank."""
        member = self._members[name]
        moments, extra = member.optimizer.state(), member.adapter.state()
        pieces = []
        for record in stored_parameters(member.adapter):
            if not record.owner and record not in member.adapter.fixed:
                continue  # fixed ones that the client owns are needed here to go on
            states = {name: stored.tensor for name, stored in moments.get(record.key, {}).items()}
            named: Mapping[str, Tensor] = {"value": record.value, **states}
            if record.key in extra:
                named = {**named, "extra": extra[record.key]}
            dim = record.dim if record.index is not None else None
            runs = () if record.index is None or dim is None else runs_of(record.index.cpu())
            for kind, tensor in named.items():
                copied = tensor.detach().cpu().clone()
                pieces.append(Piece(record.key, kind, record.full_shape, copied, dim, runs))  # type: ignore[arg-type]
        return pieces

    def bytes_of(self, name: str) -> int:
        """Bytes of a session's adapter, gradients and optimizer state: A + O of Menos' equation 3."""
        member = self._members[name]
        flat_params, fixed = member.adapter.flat_params, member.adapter.fixed
        tensors = [flat_params.values, flat_params.gradients, flat_params.copies, *member.optimizer.tensors]
        return unique_bytes([*tensors, *(record.value for record in fixed)])

    @property
    def shared_bytes(self) -> int:
        """Bytes of the backbone's parameters, which all sessions share: M of Menos' equation 3."""
        return unique_bytes(list(self.backbone.model.parameters()))


def unique_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of the storages of tensors, each counted once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
