"""The memory of a session: predicted before it joins, then measured once on random inputs (Menos section 3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from megatron_mux.kernels.short_attention import LONGEST, padded_length
from megatron_mux.memory.forms.architecture import Architecture, architecture_of
from megatron_mux.memory.forms.engine_layer import EngineLayer
from megatron_mux.memory.forms.engine_memory import EngineMemory
from megatron_mux.memory.forms.engine_memory import Rows as FormRows
from megatron_mux.memory.forms.forward_pass import forward_row
from megatron_mux.memory.forms.method import Method
from megatron_mux.memory.forms.task_adapters import TaskAdapters
from megatron_mux.shape import BackboneShape
from megatron_mux.split.agreement import Proposal
from megatron_mux.split.body import Body, Rows

PROFILED_PASSES = 5
"""Passes over its largest request that `profile` computes at least: what joining costs a client, in its rows."""


@dataclass(frozen=True)
class Memory:
    """What a session and its requests take, in bytes.

    Attributes:
        rows: Rows of the request that the figures of requests are of.
        forward: M_f, a forward pass without a graph.
        graph: What the graph of a forward pass keeps until its backward.
        backward: M_b, a forward pass with a graph and its backward.
        hidden: The hidden states of the request.
        lasting: A + O, adapter, gradients and optimizer state.
        forward_fixed, backward_fixed: Of `forward` and `backward`, what smaller requests need, too.
    """

    rows: int
    forward: int
    graph: int
    backward: int
    hidden: int
    lasting: int
    forward_fixed: int = 0
    backward_fixed: int = 0

    @property
    def joining(self) -> int:
        """What must be there for the session to join: what lasts, and one backward pass."""
        return self.lasting + self.backward

    @property
    def standing(self) -> int:
        """What a session may hold while it waits for more: what lasts, and the input of a forward pass."""
        return self.lasting + self.hidden

    def most(self, rows: int) -> int:
        """What a request needs at most beside `standing`.

        Args:
            rows: Of its largest request, which may be an evaluation's; then no other input is kept.
        """
        evaluation = self.forward_of(rows) + self.scaled(self.hidden, rows)
        return max(self.backward, evaluation - self.hidden)

    def forward_of(self, rows: int) -> int:
        """`forward` of a request of other rows."""
        return self._between(self.forward, self.forward_fixed, rows)

    def backward_of(self, rows: int) -> int:
        """`backward` of a request of other rows."""
        return self._between(self.backward, self.backward_fixed, rows)

    def scaled(self, size: int, rows: int) -> int:
        """`graph` or `hidden` of a request of other rows."""
        return -(-size * rows // self.rows)

    def _between(self, size: int, fixed: int, rows: int) -> int:
        """Not below the truth: the peak is at one of several moments, each linear in the rows."""
        return self.scaled(size, rows) if rows > self.rows else fixed + self.scaled(size - fixed, rows)

    def fields(self) -> dict[str, Any]:
        """The figures, for a log."""
        return {f"{name}_bytes": value for name, value in asdict(self).items() if name != "rows"}


def heaviest_lengths(architecture: Architecture, longest: int, device: str) -> tuple[int, int]:
    """The lengths, up to the longest, of which a row needs most in a forward pass without a graph, and in a graph.

    A GPU computes all lengths alike; a CPU pads short sequences, and multiplies all their pairs.

    Args:
        architecture: The backbone.
        longest: Tokens of the longest sequence.
        device: `cpu` or `cuda`.
    """
    if device != "cpu":
        return longest, longest
    # Of those that are padded to one length the shortest is padded most.
    short = [n for n in range(2, min(longest, LONGEST) + 1) if padded_length(n) > padded_length(n - 1)]
    layers = {n: EngineLayer(architecture, 4, n, device) for n in (longest, *short)}
    forward, kept = ({n: of(one) for n, one in layers.items()} for of in (forward_row, _kept_row))
    return max(forward, key=forward.__getitem__), max(kept, key=kept.__getitem__)


def _kept_row(layer: EngineLayer) -> float:
    return layer.bytes(layer.kept())


def sequences_behind_prefixes(rows: int, most: int, longest: int) -> list[int]:
    """Lengths that need most with virtual tokens, which are copied for each sequence: as many as there may be.

    The others are as long as they may be; neighbours of different lengths share no mask.

    Args:
        rows: Of all of them.
        most: Sequences.
        longest: Tokens of the longest one.
    """
    left, lengths = rows, list[int]()
    for behind in reversed(range(min(rows, most))):
        lengths.append(min(left - behind, max(1, longest - len(lengths) % 2)))
        left -= lengths[-1]
    return [*lengths, left] if left else lengths


def predict(
    shape: BackboneShape,
    proposal: Proposal,
    itemsize: int,
    device: str,
    tensor: int = 1,
    stages: Sequence[range] = (),
) -> Memory:
    """A session's memory by closed forms, before anything is allocated: of the rank that needs most.

    Args:
        shape: The backbone's.
        proposal: What the client asks for.
        itemsize: Bytes of a value of the backbone's dtype.
        device: `cpu` or `cuda`.
        tensor: Ranks that share each layer.
        stages: Layers of each pipeline rank; none: one rank has all layers of the body.

    Raises:
        UserError: The adapter does not fit the backbone, or the cut leaves no layer.
    """
    body = proposal.body(shape)
    parts = [range(max(own.start, body.start), min(own.stop, body.stop)) for own in stages or [body]]
    each = [asdict(_predict(shape, proposal, itemsize, device, tensor, part)) for part in parts if part]
    return Memory(**{figure: max(one[figure] for one in each) for figure in each[0]})


def _predict(
    shape: BackboneShape, proposal: Proposal, itemsize: int, device: str, tensor: int, layers: range
) -> Memory:
    """Memory on a rank that has some of the body's layers."""
    adapter = proposal.adapter_spec()
    task = SimpleNamespace(
        name=proposal.task,
        adapter=adapter,
        training=proposal.training,
        sequences_per_step=proposal.sequences,
        data=SimpleNamespace(max_length=proposal.longest),
        starts_from_reference=False,
    )
    adapters: Any = TaskAdapters.of(task, shape)  # type: ignore[arg-type]
    rows, architecture, prefix = proposal.train_rows, architecture_of(shape), adapter.virtual_tokens
    longest = min(proposal.longest, rows)
    in_forward, length = (longest,) * 2 if prefix else heaviest_lengths(architecture, longest, device)
    split = [range(layers.start), layers, range(layers.stop, shape.layers)]
    memory = EngineMemory(
        architecture,
        [adapters],
        [own for own in split if own],
        Method(tensor=tensor),
        itemsize,
        [(length,)],
        device,
    )
    each, copied = np.array([[float(rows)]]), min(rows, proposal.sequences) * prefix
    made = memory.passes(FormRows(each, each[:, 0], each[:, 0], np.array([float(copied)])))
    hidden, fixed = rows * shape.hidden * itemsize, int(memory.step_scratch[1])
    # Without layers behind the body, the forms count what the client's output layer keeps.
    graph = int(made.kept[0, 1]) - 2 * hidden * (layers.stop == shape.layers)
    behind = prefix > 0 and device == "cpu"
    layer = EngineLayer(architecture, itemsize, in_forward, device, tensor=tensor, prefixed=behind)
    of_prefixes = 2 * copied * architecture.keys * itemsize // tensor
    return Memory(
        rows=rows,
        forward=int(rows * (forward_row(layer) + memory.row_inputs)) + fixed + of_prefixes,
        graph=graph,
        backward=int(made.kept[0, 1]) + int(made.workspace[0, 1]) + 3 * hidden,
        hidden=hidden,
        lasting=int((memory.lasting.adapters + memory.lasting.gradients + memory.lasting.moments)[1]),
        forward_fixed=fixed + of_prefixes,
        backward_fixed=fixed + of_prefixes * len(layers),
    )


def profile(body: Body, name: str, proposal: Proposal, layers: range) -> Memory:
    """Measure a session's memory on random inputs of the size that its client has configured.

    Nothing changes: gradients are dropped, no optimizer steps.

    Args:
        body: The session is in it.
        name: Of the session.
        proposal: What the client asked for.
        layers: Of the session's body.
    """
    backbone, most = body.backbone, proposal.train_rows
    longest = min(proposal.longest, most)
    prefixed = proposal.adapter_spec().virtual_tokens > 0

    def measured(count: int, length: int) -> tuple[int, int, int, int]:
        lengths = [length] * (count // length) + [count % length] * (count % length > 0)
        if prefixed:
            lengths = sequences_behind_prefixes(count, proposal.sequences, longest)
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(count, backbone.shape.hidden, generator=generator)
        hidden = hidden.to(backbone.device, backbone.dtype)
        rows = Rows(name, tuple(lengths), tuple(range(len(lengths))), 0, True, hidden, True)
        return body.measure(rows, layers)

    def fixed(large: int, little: int) -> int:
        """Where the line through both meets a request without rows."""
        return max(0, (little * most - large * few) // (most - few)) if most > few else 0

    in_forward, in_graph = heaviest_lengths(architecture_of(backbone.shape), longest, backbone.device.type)
    forward, graph, backward, lasting = measured(most, in_graph)
    if in_forward != in_graph and not prefixed:
        forward = max(forward, measured(most, in_forward)[0])
    few = min(most, proposal.sequences) if prefixed else 1
    small = measured(few, 1)
    hidden = most * backbone.shape.hidden * backbone.dtype.itemsize
    return Memory(
        rows=most,
        forward=forward,
        graph=graph,
        backward=backward,
        hidden=hidden,
        lasting=lasting,
        forward_fixed=fixed(forward, small[0]),
        backward_fixed=fixed(backward, small[2]),
    )
