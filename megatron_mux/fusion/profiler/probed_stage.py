"""A stage of a backbone as probes see it: a layer of each kind, and inputs of many sizes.

With sequence parallelism a tensor rank has its own rows of hidden states. Products see all rows on every rank.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_mux.backbone.model import Backbone
from megatron_mux.base_ops import BaseOpInfo, BaseOpName
from megatron_mux.batch.pack import PackedSequence, pack
from megatron_mux.batch.packed_batch import PackedBatch, activate
from megatron_mux.fusion.profiler.profile import probe_sizes

SEGMENT = 64
"""Tokens of a sequence where only the number of rows matters."""

STACK = 4
"""Layers that are run on top of each other, so that what they keep is kept as in a step."""

_MOST_READ = 1 << 28
"""Bytes of weights that are read before a cold probe: more than caches hold."""

Run = Callable[[], tuple[Tensor, Sequence[Tensor]]]
"""A forward pass: gives outputs, and the tensors whose gradients are wanted."""


@dataclass
class Probe:
    """One forward and backward pass to be timed.

    Attributes:
        name: The curve it is a point of.
        make: Prepares what passes need, and gives the pass.
        cold: Whether its weights are to be out of the caches when it begins, as in a step, which uses each layer's
            weights once a pass.
        base: As `make`: passes without what is to be measured, which is the difference. They alternate with the others,
            so that both meet the same machine.
        rounds: Forward and backward seconds of each round.
    """

    name: str
    size: float
    make: Callable[[], Run]
    cold: bool = False
    base: Callable[[], Run] | None = None
    rounds: list[tuple[float, float]] = field(default_factory=list)

    @property
    def seconds(self) -> tuple[float, float]:
        """Medians; what is added by something small may come out less than nothing."""
        ways = zip(*self.rounds, strict=True)
        forward, backward = (max(0.0, statistics.median(way)) for way in ways)
        return forward, backward


class ProbedStage:
    """The stage. The first layer with a module stands for all that have it.

    Args:
        backbone: One without adapters.

    Attributes:
        stacks: The layers whose halves are run on top of each other, by half.
        ops: The BaseOps that some layer has.
        rows: Sizes of probes of which there are few, and `coarse` of those of which there are many.
        divided: Tensor ranks that divide the rows of hidden states.
    """

    def __init__(self, backbone: Backbone, most_tokens: int) -> None:
        self.backbone, self.shape, self.parallel = backbone, backbone.shape, backbone.parallel
        self.most_tokens, self.device, self.dtype = most_tokens, backbone.device, backbone.dtype
        self.layers: list[Any] = list(backbone.model.decoder.layers)
        routed = [backbone.shape.has_experts(index) for index in backbone.layers]
        halves = {
            "attention": self.layers,
            "mlp": [layer for layer, experts in zip(self.layers, routed, strict=True) if not experts],
            "experts": [layer for layer, experts in zip(self.layers, routed, strict=True) if experts],
        }
        self.stacks = {half: layers[:STACK] for half, layers in halves.items() if layers}
        self.ops: dict[BaseOpName, BaseOpInfo] = {}
        for info in backbone.base_ops():
            self.ops.setdefault(info.name, info)
        self.rows = probe_sizes(most_tokens)
        self.coarse = [n for n in (32, 128, 512, 2048, 8192) if n <= most_tokens]
        self.divided = self.parallel.tp_size if self.parallel.sequence_parallel else 1

    def own(self, rows: int) -> int:
        """Rows of hidden states that this rank has of a micro-batch's."""
        return rows // self.divided

    def read_other_layers(self) -> None:
        """Read weights that no probe uses, so that the caches no longer hold those that one uses."""
        used = {id(layer) for layers in self.stacks.values() for layer in layers}
        read = 0
        for p in (p for layer in self.layers if id(layer) not in used for p in layer.parameters()):
            if read < _MOST_READ and p.untyped_storage().nbytes():
                p.detach().sum()
                read += p.nbytes

    def batch(self, rows: int, tasks: int = 1) -> PackedBatch:
        """Rows of several tasks, each made of short sequences."""
        sequences: list[PackedSequence] = []
        for task in range(tasks):
            left = rows // tasks
            while left:
                length = min(SEGMENT, left)
                tokens = torch.zeros(length, dtype=torch.int64)
                labelled = torch.zeros(length, dtype=torch.bool)
                labelled[length // 2 :] = True
                sequences.append(PackedSequence(f"probe-{task}", len(sequences), tokens, labelled, 1.0))
                left -= length
        names = tuple(f"probe-{task}" for task in range(tasks))
        return pack(sequences, names, dict.fromkeys(names, 0)).to(self.device)

    def input(self, *shape: int) -> Tensor:
        """Random values that need a gradient."""
        return torch.randn(shape, dtype=self.dtype, device=self.device).mul_(0.1).requires_grad_()

    def width(self, op: BaseOpName) -> int:
        """Input width of a BaseOp on this rank."""
        return len(self.ops[op].inputs)

    def of_module(self, module: Callable[[Tensor], Any], rows: int, width: int) -> Run:
        """A pass of a module that takes `[rows, 1, width]`."""
        x, batch = self.input(rows, 1, width), self.batch(rows)

        def run() -> tuple[Tensor, Sequence[Tensor]]:
            with activate(batch):
                out = module(x)
            return (out[0] if isinstance(out, tuple) else out), (x,)

        return run
