"""What is timed to make a profile: a forward and a backward pass of a backbone's real modules, at each size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.backbone.layer import attention_half, mlp_half
from megatron_mux.backbone.model import Backbone
from megatron_mux.batch.packed_batch import activate
from megatron_mux.fusion.profiler.adapter_probes import AdapterProbes
from megatron_mux.fusion.profiler.core_attention import widest_window
from megatron_mux.fusion.profiler.expert_probes import ExpertProbes
from megatron_mux.fusion.profiler.probed_stage import SEGMENT, Probe, ProbedStage, Run
from megatron_mux.fusion.profiler.profile import probe_sizes
from megatron_mux.kernels.attention.carry import Carry
from megatron_mux.kernels.attention.segments import Segment, device_bounds, has_one_call, segment_attention

_PASTS = (16, 256, 2048, 16384)
_SHORTEST, _CHUNKS = 8, (16, 64, 256, 1024, 4096)
"""Tokens of the shortest sequence, and of those that are timed behind a past."""


class Probes:
    """Makes the probes of a backbone.

    Args:
        backbone: One without adapters.

    Attributes:
        experts: The probes of its experts; None where it has none.
        adapters: The probes of adapters.
    """

    def __init__(self, backbone: Backbone, most_tokens: int) -> None:
        self.backbone = backbone
        self.stage = ProbedStage(backbone, most_tokens)
        self.experts = ExpertProbes(self.stage) if "experts" in self.stage.stacks else None
        self.adapters = AdapterProbes(self.stage, self.experts)

    def all(self, longest: int) -> list[Probe]:
        """Every probe, in the order of a first turn.

        Args:
            longest: Tokens of the longest sequence.
        """
        probes: list[Probe] = []
        for rows in self.stage.rows:
            probes.append(Probe("attention_half", rows, partial(self._half, "attention", rows), cold=True))
            if "mlp" in self.stage.stacks:
                probes.append(Probe("mlp_half", rows, partial(self._half, "mlp", rows), cold=True))
            if self.experts is not None:
                probes += self.experts.parts(rows)
            probes += [Probe(op, rows, partial(self.adapters.alone, op, rows)) for op in self.stage.ops]
        probes += self._attention(longest)
        probes += self._ends()
        probes += self.adapters.all()
        probes += self._messages()
        return probes

    def _half(self, name: str, rows: int) -> Run:
        """Half layers on top of each other.

        They have no messages, so also with sequence parallelism all rows pass through all of them.
        """
        stage, batch = self.stage, self.stage.batch(rows)
        x, angles = stage.input(rows, 1, stage.shape.hidden), self.backbone.angles(batch)[0]

        def run() -> tuple[Tensor, Sequence[Tensor]]:
            out = x
            with activate(batch):
                for layer in stage.stacks[name]:
                    out = attention_half(layer, out, angles) if name == "attention" else mlp_half(layer, out)
            return out, (x,)

        return run

    def _attention(self, longest: int) -> Iterator[Probe]:
        """One sequence of each length, and eight of short ones; one with each past that takes no longer."""
        for length in probe_sizes(longest, least=_SHORTEST):
            yield self.attention(length)
            if length * 8 <= 2 * self.stage.most_tokens:
                yield self.attention(length, count=8)
            for past in _PASTS if length in _CHUNKS else ():
                # Three at least: kernels for a past are others than without one, and a slope needs points far apart.
                if past in _PASTS[:3] or length * (length + past) <= longest**2:
                    yield self.attention(length, past)

    def attention(self, length: int, past: int = 0, count: int = 1) -> Probe:
        """Sequences of one length; with a past, the last chunk of one, with the copy of what earlier ones left."""
        return Probe(f"attention:{length}:{past}", count, partial(self._core, length, past, count))

    def _core(self, length: int, past: int, count: int) -> Run:
        shape, tp, of = self.backbone.shape, self.backbone.parallel.tp_size, self.stage.input
        heads, keys, size = shape.heads // tp, shape.kv_heads_on_rank(tp), shape.head_dim
        value = size if shape.latent is None else shape.latent.value
        segments = [Segment("probe", i * length, length, i, past) for i in range(count)]
        rows, carry = length * count, Carry()
        for start in range(0, past, max(length, SEGMENT)):  # chunks are of one length
            chunk = min(max(length, SEGMENT), past - start)
            left = [of(chunk, keys, width).detach() for width in (size, value)]
            carry.leave(0, Segment("probe", 0, chunk, 0, start, continues=True), left[0], left[1])
        q, k, v = of(rows, heads, size), of(rows, keys, size), of(rows, keys, value)
        # As in a step, which has them before a micro-batch begins.
        bounds = device_bounds(segments, {}, q.device) if has_one_call(q.device, q.dtype) else None
        window = widest_window(shape.windows)
        attend = partial(segment_attention, scale=shape.scales[0], window=window, bounds=bounds)

        def run() -> tuple[Tensor, Sequence[Tensor]]:
            every_key, every_value = carry.extend(0, k, v, segments)
            return attend(q, every_key, every_value, segments), (q, k, v)

        return run

    def _ends(self) -> list[Probe]:
        """The entry, by rows; the final norm and the loss head, by labels."""
        probes: list[Probe] = []
        if self.backbone.first:
            probes += [Probe("entry", rows, partial(self._entry, rows)) for rows in self.stage.coarse]
        if self.backbone.last:
            most = max(self.stage.most_tokens // 2, 16)
            labels = [n for n in (1, 4, *self.stage.rows) if n <= most]
            probes += [Probe("head", n, partial(self._head, n), cold=True) for n in labels]
        return probes

    def _entry(self, rows: int) -> Run:
        batch = self.stage.batch(rows)

        def run() -> tuple[Tensor, Sequence[Tensor]]:
            self.backbone.angles(batch)
            return self.backbone.embed(batch), ()

        return run

    def _head(self, labels: int) -> Run:
        """Of the labelled rows; with sequence parallelism of all, gathered, of which half are labelled."""
        stage = self.stage
        norm: Any = self.backbone.model.decoder.final_layernorm
        rows = labels if stage.divided == 1 else max(1, stage.own(2 * labels))
        x = stage.input(rows, 1, stage.shape.hidden)
        targets = torch.zeros(labels, dtype=torch.int64, device=stage.device)
        weights = torch.ones(labels, device=stage.device)
        batch = replace(stage.batch(2 * labels), labels=targets, label_rows=targets, label_weights=weights)
        return lambda: (self.backbone.loss(norm(x), batch)[0], (x,))

    def _messages(self) -> list[Probe]:
        """All-reduce among tensor ranks; a transfer from the first rank to the second and back, where there are two;
        rows among expert ranks."""
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
        probes = [
            Probe(name, rows, partial(self._sent, send, rows))
            for name, send in wanted
            for rows in self.stage.rows
        ]
        return probes + (self.experts.messages() if self.experts is not None else [])

    def _sent(self, send: Callable[[Tensor], None], rows: int) -> Run:
        x = self.stage.input(rows, self.backbone.shape.hidden).detach()

        def run() -> tuple[Tensor, Sequence[Tensor]]:
            send(x)
            return x, ()

        return run
