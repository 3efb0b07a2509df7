"""What is timed to make a profile: a forward and a backward pass of each of a backbone's real modules, at each size.

The first layer stands for all. Adapters are timed on their BaseOp: what the two take more than the BaseOp alone is
theirs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux import layout, megatron_core
from megatron_mux.adapters.attach import Host
from megatron_mux.adapters.base_op import AttachedBaseOp
from megatron_mux.adapters.costs import Sample
from megatron_mux.adapters.kind import AdapterSpec
from megatron_mux.adapters.registry import KINDS
from megatron_mux.backbone.model import Backbone
from megatron_mux.base_ops import BASE_OPS, BaseOpName
from megatron_mux.fusion.profile import grid_up_to
from megatron_mux.kernels.attention import Segment, segment_attention
from megatron_mux.kernels.low_rank_choice import KernelChoice, KernelName, alternatives
from megatron_mux.kernels.pointwise import rotate
from megatron_mux.layout import MicroBatch
from megatron_mux.tasks import TaskSpec

SEGMENT = 64
"""Tokens of a sequence where only the number of rows matters."""

STACK = 4
"""Layers that are run on top of each other to measure what a layer takes beyond its operators."""

_MANY_TASKS = 16
"""Tasks of a probe for which kernels that launch something for each task take long."""

_MOST_READ = 1 << 28
"""Bytes of weights that are read before a cold probe: more than caches hold."""


def adapter_samples() -> list[Sample]:
    """The adapters of all kinds whose seconds make a profile."""
    return [sample for kind in KINDS.values() for sample in kind.samples()]


Run = Callable[[], tuple[Tensor, Sequence[Tensor]]]
"""A forward pass: gives outputs, and the tensors whose gradients are wanted."""


@dataclass
class Probe:
    """One forward and backward pass to be timed.

    Attributes:
        name: The curve it is a point of.
        size: The point.
        make: Prepares what one pass needs, and gives the pass.
        cold: Whether its weights are to be out of the caches when it begins, as in a step, which uses each layer's
            weights once a pass.
        rounds: Forward and backward seconds of each round.
    """

    name: str
    size: float
    make: Callable[[], Run]
    cold: bool = False
    rounds: list[tuple[float, float]] = field(default_factory=list)

    @property
    def seconds(self) -> tuple[float, float]:
        """Medians."""
        return statistics.median(f for f, _ in self.rounds), statistics.median(b for _, b in self.rounds)


class Probes:
    """Makes the probes of a backbone.

    Args:
        backbone: One without adapters.
        most_tokens: Rows of the largest probes.

    Attributes:
        chosen: Which kernels compute adapters' low-rank terms.
    """

    def __init__(self, backbone: Backbone, most_tokens: int) -> None:
        self.backbone = backbone
        self.most_tokens = most_tokens
        self.chosen: KernelChoice = ()
        self.device, self.dtype = backbone.device, backbone.dtype
        self.layers: Any = backbone.model.decoder.layers
        self.ops = {info.name: info for info in backbone.base_ops() if info.layer == backbone.layers.start}
        self.rows = grid_up_to(most_tokens)
        self.coarse = [n for n in (32, 128, 512, 2048, 8192) if n <= most_tokens]

    def all(self) -> list[Probe]:
        """Every probe, in the order of a first turn."""
        found: list[Probe] = []
        for rows in self.rows:
            found += self._dense(rows)
        found += self._attention()
        found += self._ends()
        found += self._adapters()
        found += self._collectives()
        return found

    def read_other_layers(self) -> None:
        """Read weights that no probe uses, so that the caches no longer hold those that one uses."""
        read = 0
        for p in (p for layer in list(self.layers)[STACK:] for p in layer.parameters()):
            if read < _MOST_READ:
                p.detach().sum()
                read += p.nbytes

    def batch(self, rows: int, tasks: int = 1) -> MicroBatch:
        """Rows of several tasks, each made of short sequences."""
        sequences: list[layout.PackedSequence] = []
        for task in range(tasks):
            left = rows // tasks
            while left:
                length = min(SEGMENT, left)
                tokens = torch.zeros(length, dtype=torch.int64)
                labelled = torch.zeros(length, dtype=torch.bool)
                labelled[length // 2 :] = True
                sequences.append((f"probe-{task}", len(sequences), tokens, labelled, 1.0))
                left -= length
        names = tuple(f"probe-{task}" for task in range(tasks))
        return layout.pack(sequences, names, dict.fromkeys(names, 0)).to(self.device)

    def _input(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device).mul_(0.1).requires_grad_()

    def _module(self, module: Callable[[Tensor], Any], rows: int, width: int) -> Run:
        x, batch = self._input(rows, 1, width), self.batch(rows)

        def run() -> tuple[Tensor, Sequence[Tensor]]:
            with layout.activate(batch):
                out = module(x)
            return (out[0] if isinstance(out, tuple) else out), (x,)

        return run

    def _dense(self, rows: int) -> list[Probe]:
        shape, layer = self.backbone.shape, self.layers[0]
        half = shape.out_features("linear_fc1") // self.backbone.parallel.tp_size
        modules: dict[str, tuple[Callable[[Tensor], Any], int]] = {
            **{op: (self.ops[op].module, self._width(op)) for op in BASE_OPS},
            "norm": (layer.input_layernorm, shape.hidden),
            "activation": (_activation(layer.mlp), half),
        }
        found = [
            Probe(name, rows, partial(self._module, module, rows, width))
            for name, (module, width) in modules.items()
        ]
        if shape.ropes[0] is not None:
            found.append(Probe("rotary", rows, partial(self._rotary, rows)))
        for name in ("attention_half", "mlp_half"):
            found.append(Probe(name, rows, partial(self._stack, name, rows), cold=True))
        return found

    def _width(self, op: str) -> int:
        info = self.ops[op]  # type: ignore[index]
        return len(info.inputs)

    def _angles(self, batch: MicroBatch) -> tuple[Tensor, Tensor] | None:
        return self.backbone.angles(batch)[0]

    def _heads(self) -> tuple[int, int, int]:
        shape, tp = self.backbone.shape, self.backbone.parallel.tp_size
        return shape.heads // tp, shape.kv_heads_on_rank(tp), shape.head_dim

    def _rotary(self, rows: int) -> Run:
        heads, keys, size = self._heads()
        turns = self._angles(self.batch(rows))
        assert turns is not None
        query, key = self._input(rows, heads, size), self._input(rows, keys, size)
        return lambda: (torch.cat([rotate(query, *turns), rotate(key, *turns)], dim=1), (query, key))

    def _stack(self, name: str, rows: int) -> Run:
        """Half layers on top of each other, so that what they keep is kept as in a step."""
        x, batch = self._input(rows, 1, self.backbone.shape.hidden), self.batch(rows)
        turns = self._angles(batch)

        def run() -> tuple[Tensor, Sequence[Tensor]]:
            out = x
            with layout.activate(batch):
                for layer in list(self.layers)[:STACK]:
                    if name == "attention_half":
                        out = megatron_core.attention_half(layer, out, turns)
                    else:
                        out = megatron_core.mlp_half(layer, out)
            return out, (x,)

        return run

    def _attention(self) -> list[Probe]:
        """One sequence and eight of each length; one with each past."""
        found = []
        most = min(1024, self.most_tokens)
        for length in grid_up_to(most, least=8):
            for past in (0, 256, 1024):
                if past and (length < 16 or length > 256):
                    continue
                for count in (1, 8) if not past and length * 8 <= 2 * self.most_tokens else (1,):
                    make = partial(self._attention_of, length, past, count)
                    found.append(Probe(f"attention:{length}:{past}", count, make))
        return found

    def _attention_of(self, length: int, past: int, count: int) -> Run:
        heads, keys, size = self._heads()
        scale, window = self.backbone.shape.scales[0], self.backbone.shape.windows[0]
        segments = [Segment("probe", i * length, length, i, past) for i in range(count)]
        rows = length * count
        q, k = self._input(rows, heads, size), self._input(rows + past, keys, size)
        v = self._input(rows + past, keys, size)
        return lambda: (segment_attention(q, k, v, segments, scale=scale, window=window), (q, k, v))

    def _ends(self) -> list[Probe]:
        """The entry, by rows; the final norm and the loss head, by labels."""
        found: list[Probe] = []
        if self.backbone.first:
            found += [Probe("entry", rows, partial(self._entry, rows)) for rows in self.coarse]
        if self.backbone.last:
            labels = [n for n in (1, 4, *self.rows) if n <= max(self.most_tokens // 2, 16)]
            found += [Probe("head", n, partial(self._head, n), cold=True) for n in labels]
        return found

    def _entry(self, rows: int) -> Run:
        batch = self.batch(rows)

        def run() -> tuple[Tensor, Sequence[Tensor]]:
            self._angles(batch)
            return self.backbone.embed(batch), ()

        return run

    def _head(self, labels: int) -> Run:
        norm: Any = self.backbone.model.decoder.final_layernorm
        x = self._input(labels, 1, self.backbone.shape.hidden)
        targets = torch.zeros(labels, dtype=torch.int64, device=self.device)
        weights = torch.ones(labels, device=self.device)
        batch = replace(self.batch(2 * labels), labels=targets, label_rows=targets, label_weights=weights)
        return lambda: (self.backbone.loss(norm(x), batch)[0], (x,))

    def kernels(self) -> list[Probe]:
        """Low-rank terms at each BaseOp, by each of several kernels; empty where there is one.

        Of one task, and of many with dropout. The default kernels come first.
        """
        here = alternatives(self.device, self.dtype)
        sample, found = KINDS["LORA"].samples()[0], list[Probe]()
        for op in BASE_OPS if len(here) > 1 else ():
            section = sample.section(op, list(self.ops[op].parts))
            dropping = section.model_copy(update={"lora_dropout": 0.1})
            for own, tasks in ((section, 1), (dropping, _MANY_TASKS)):
                found += [self._adapted_by(own, op, self.coarse[-1], tasks, name) for name in here]
        return found

    def _adapters(self) -> list[Probe]:
        found: list[Probe] = []
        pairs: list[Probe] = []
        for sample in adapter_samples():
            at = [op for op in self.ops if sample.at(op, self.backbone.shape) is not None]
            for op in at:
                found += self._adapted(sample, op, self.coarse, tasks=1)
            for op in at[:1] if sample.paired else ():
                pairs += self._adapted(sample, op, self.coarse[1:3] or self.coarse, tasks=2)
        return found + pairs

    def _adapted(self, sample: Sample, op: BaseOpName, rows: Sequence[int], tasks: int) -> list[Probe]:
        """A BaseOp with adapters of one kind: what it takes more than the BaseOp alone is theirs."""
        section = sample.at(op, self.backbone.shape)
        assert section is not None
        return [self._adapted_by(section, op, count, tasks) for count in rows]

    def _adapted_by(
        self, section: AdapterSpec, op: BaseOpName, rows: int, tasks: int, kernels: KernelName | None = None
    ) -> Probe:
        info = self.ops[op]
        host = Host([info], self.backbone.parallel, self.dtype, self.backbone.shape)
        specs = [_spec(f"probe-{i}", section) for i in range(tasks)]
        adapters = [spec.adapter.attach(host, spec, 10, None) for spec in specs]
        parameters = [p.value for adapter in adapters for p in adapter.parameters]
        attached = AttachedBaseOp(info, host)
        attached.kernels = kernels or dict(self.chosen).get(op)
        for slot, adapter in enumerate(adapters):
            attached.add(adapter.name, adapter.at[0], slot)

        def make() -> Run:
            x, batch = self._input(rows, 1, self._width(op)), self.batch(rows, tasks)

            def run() -> tuple[Tensor, Sequence[Tensor]]:
                with layout.activate(batch):
                    y, _ = attached.forward(x)
                    if not info.column_parallel:
                        y, _ = attached.finish(y)
                    return y, (x, *parameters)

            return run

        name = f"{op}:{kernels}" if kernels else _name(section, op, len(info.parts), tasks)
        return Probe(name, rows, make)

    def _collectives(self) -> list[Probe]:
        """All-reduce among tensor ranks; a transfer from the first rank to the second and back, where there are two."""
        parallel = self.backbone.parallel

        def reduce(x: Tensor) -> None:
            dist.all_reduce(x, group=parallel.tp_group)

        def transfer(x: Tensor) -> None:
            if parallel.rank == 0:
                dist.send(x, 1)
                dist.recv(x, 1)
            elif parallel.rank == 1:
                dist.recv(x, 0)
                dist.send(x, 0)

        wanted = [("all_reduce", reduce)] * (parallel.tp_size > 1)
        wanted += [("transfer", transfer)] * (parallel.world_size > 1)
        return [
            Probe(name, rows, partial(self._exchange, exchange, rows))
            for name, exchange in wanted
            for rows in self.rows
        ]

    def _exchange(self, exchange: Callable[[Tensor], None], rows: int) -> Run:
        x = self._input(rows, self.backbone.shape.hidden).detach()

        def run() -> tuple[Tensor, Sequence[Tensor]]:
            exchange(x)
            return x, ()

        return run


def _activation(mlp: Any) -> Callable[[Tensor], Tensor]:
    """What the MLP does between its products, as Megatron's module does it."""
    function: Callable[[Tensor], Tensor] = mlp.activation_func
    if not mlp.config.gated_linear_unit:
        return function

    def gated(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return function(gate) * up

    return gated


def _name(section: AdapterSpec, op: BaseOpName, modules: int, tasks: int) -> str:
    curve = section.curve(modules)
    if curve is None:
        raise ValueError(f"{section.peft_type}: a sample takes no seconds")
    return f"{curve.name}:{op}:{curve.size}" + (f":{tasks}-tasks" if tasks > 1 else "")


def _spec(name: str, section: AdapterSpec) -> TaskSpec:
    """A task with this adapter."""
    task = {"name": name, "adapter": section.model_dump(), "data": {"path": "probe"}}
    return TaskSpec.model_validate({**task, "training": {"max_steps": 10}})
