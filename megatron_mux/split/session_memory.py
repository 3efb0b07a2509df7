"""The memory of a session: predicted before it joins, then measured once on random inputs (Menos section 3.3)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from megatron_mux.memory.forms.architecture import architecture_of
from megatron_mux.memory.forms.engine_memory import EngineMemory
from megatron_mux.memory.forms.engine_memory import Rows as FormRows
from megatron_mux.memory.forms.method import Method
from megatron_mux.memory.forms.task_adapters import TaskAdapters
from megatron_mux.shape import BackboneShape
from megatron_mux.split.agreement import Proposal
from megatron_mux.split.body import Body, Rows


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
    """

    rows: int
    forward: int
    graph: int
    backward: int
    hidden: int
    lasting: int

    @property
    def joining(self) -> int:
        """What must be there for the session to join: what lasts, and one backward pass."""
        return self.lasting + self.backward

    def scaled(self, size: int, rows: int) -> int:
        """A figure of requests for a request of other rows."""
        return -(-size * rows // self.rows)

    def fields(self) -> dict[str, Any]:
        """The figures, for a log."""
        return {f"{name}_bytes": value for name, value in asdict(self).items() if name != "rows"}


def predict(shape: BackboneShape, proposal: Proposal, itemsize: int, device: str, tensor: int = 1) -> Memory:
    """A session's memory by closed forms, before anything is allocated.

    A forward pass without a graph is bounded by a training pass of one layer: there is no closed form of it.

    Args:
        shape: The backbone's.
        proposal: What the client asks for.
        itemsize: Bytes of a value of the backbone's dtype.
        device: `cpu` or `cuda`.
        tensor: Ranks that share each layer.

    Raises:
        UserError: The adapter does not fit the backbone, or the cut leaves no layer.
    """
    layers, adapter = proposal.body(shape), proposal.adapter_spec()
    task = SimpleNamespace(
        name=proposal.task,
        adapter=adapter,
        training=proposal.training,
        sequences_per_step=proposal.sequences,
        data=SimpleNamespace(max_length=proposal.longest),
    )
    adapters: Any = TaskAdapters.of(task, shape)  # type: ignore[arg-type]
    rows, architecture = proposal.train_rows, architecture_of(shape)
    length = min(proposal.longest, rows)

    def memory(layers: range) -> EngineMemory:
        split = [range(layers.start), layers, range(layers.stop, shape.layers)]
        method = Method(tensor=tensor)
        return EngineMemory(
            architecture, [adapters], [own for own in split if own], method, itemsize, [(length,)], device
        )

    def passes(memory: EngineMemory) -> Any:
        each = np.array([[float(rows)]])
        copied = np.array([float(rows if adapter.virtual_tokens else 0)])
        return memory.passes(FormRows(each, each[:, 0], each[:, 0], copied), in_step=1)

    whole, hidden = memory(layers), rows * shape.hidden * itemsize
    made, one_layer = passes(whole), passes(memory(layers[:1]))
    # Without layers behind the body, the forms count what the client's output layer keeps.
    graph = int(made.kept[0, 1]) - 2 * hidden * (layers.stop == shape.layers)
    return Memory(
        rows=rows,
        forward=2 * hidden + int(one_layer.kept[0, 1] + one_layer.workspace[0, 1]),
        graph=graph,
        backward=graph + int(made.workspace[0, 1]) + 3 * hidden,
        hidden=hidden,
        lasting=int((whole.lasting.adapters + whole.lasting.gradients + whole.lasting.moments)[1]),
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
    count, longest = proposal.train_rows, min(proposal.longest, proposal.train_rows)
    lengths = [longest] * (count // longest)
    if count % longest:
        lengths.append(count % longest)
    backbone = body.backbone
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(count, backbone.shape.hidden, generator=generator).to(
        backbone.device, backbone.dtype
    )
    rows = Rows(name, tuple(lengths), tuple(range(len(lengths))), 0, True, hidden, True)
    gradient = torch.zeros_like(hidden)
    body.forward([rows], layers, graph=False)  # whatever is allocated once
    _, forward = body.measured(lambda: body.forward([rows], layers, graph=False))
    (_, kept), graph = body.measured(lambda: body.forward([rows], layers, graph=True))
    del kept

    def both() -> None:
        _, again = body.forward([rows], layers, graph=True)
        assert again is not None
        body.backward(again, [gradient])

    _, backward = body.measured(both)
    body.zero(name)
    return Memory(count, forward.peak, graph.lasting, backward.peak, hidden.nbytes, body.bytes_of(name))
