"""What is timed to make a profile: a forward and a backward pass of each of a backbone's real modules, at each size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux import layout
from megatron_mux.backbone.latent_attention import LatentAttention
from megatron_mux.backbone.layer import attend, feed_forward
from megatron_mux.backbone.model import Backbone
from megatron_mux.fusion.profiler.adapter_probes import AdapterProbes
from megatron_mux.fusion.profiler.expert_probes import ExpertProbes
from megatron_mux.fusion.profiler.probed_stage import Probe, ProbedStage, Run
from megatron_mux.fusion.profiler.profile import grid_up_to
from megatron_mux.kernels.attention import Segment, segment_attention
from megatron_mux.kernels.fused_pointwise import Heads, turn
from megatron_mux.layout import MicroBatch


class Probes:
    """Makes the probes of a backbone.

    Args:
        backbone: One without adapters.
        most_tokens: Rows of the largest probes.

    Attributes:
        stage: Its layers.
        experts: The probes of its experts; None where it has none.
        adapters: The probes of adapters.
    """

    def __init__(self, backbone: Backbone, most_tokens: int) -> None:
        self.backbone = backbone
        self.stage = ProbedStage(backbone, most_tokens)
        self.experts = ExpertProbes(self.stage) if self.stage.routed else None
        self.adapters = AdapterProbes(self.stage, self.experts)

    def all(self) -> list[Probe]:
        """Every probe, in the order of a first turn."""
        found: list[Probe] = []
        for rows in self.stage.rows:
            found += self._attention_half(rows)
            if self.stage.dense:
                found += self._mlp_half(rows)
            if self.experts is not None:
                found += self.experts.operators(rows)
        found += self._attention()
        found += self._ends()
        found += self.adapters.all()
        found += self._messages()
        return found

    def _attention_half(self, rows: int) -> list[Probe]:
        """The operators of the half layer with attention, and all of it."""
        stage, layer = self.stage, self.stage.layers[0]
        found = self._products(stage.shape.attention_ops, rows)
        # With sequence parallelism norms see a rank's own rows.
        make = partial(stage.of_module, layer.input_layernorm, stage.own(rows), stage.shape.hidden)
        found.append(Probe("norm", rows, make))
        if stage.shape.ropes[0] is not None:
            found.append(Probe("rotary", rows, partial(self._rotary, rows)))
        half = partial(self._stack, "attention", lambda *given: attend(*given)[0], rows)
        return [*found, Probe("attention_half", rows, half, cold=True)]

    def _mlp_half(self, rows: int) -> list[Probe]:
        """The same of a half layer with an MLP."""
        stage = self.stage
        found = self._products(("linear_fc1", "linear_fc2"), rows)
        inner = stage.shape.out_features("linear_fc1") // stage.parallel.tp_size
        make = partial(stage.of_module, stage.dense[0].mlp.activation, rows, inner)
        found.append(Probe("activation", rows, make))
        half = partial(self._stack, "mlp", lambda layer, x, _: feed_forward(layer, x), rows)
        return [*found, Probe("mlp_half", rows, half, cold=True)]

    def _products(self, ops: Sequence[Any], rows: int) -> list[Probe]:
        stage = self.stage
        return [
            Probe(op, rows, partial(stage.of_module, stage.ops[op].module, rows, stage.width(op)))
            for op in ops
        ]

    def _angles(self, batch: MicroBatch) -> tuple[Tensor, Tensor] | None:
        return self.backbone.angles(batch)[0]

    def _heads(self) -> tuple[int, int, int, int]:
        """Query heads and key-value heads on this rank, features of a key and of a value."""
        shape, tp = self.backbone.shape, self.backbone.parallel.tp_size
        value = shape.head_dim if shape.latent is None else shape.latent.value
        return shape.heads // tp, shape.kv_heads_on_rank(tp), shape.head_dim, value

    def _rotary(self, rows: int) -> Run:
        heads, keys, size, _ = self._heads()
        attention = self.stage.layers[0].self_attention
        turns = self._angles(self.stage.batch(rows))
        assert turns is not None
        if isinstance(attention, LatentAttention):  # all heads share the rotated part of their keys
            width = self.stage.shape.rotary_width
            query, shared = self.stage.input(rows, heads, width), self.stage.input(rows, 1, width)
            rotate = attention.rotate
            return lambda: (
                torch.cat([rotate(query, *turns), rotate(shared, *turns)], dim=1),
                (query, shared),
            )
        mixed = self.stage.input(rows, 1, (heads + 2 * keys) * size)
        of = Heads(size, heads // keys)
        return lambda: (torch.cat(turn(mixed, turns, of), dim=1), (mixed,))

    def _stack(self, name: str, half: Callable[..., Tensor], rows: int) -> Run:
        """Half layers on top of each other, so that what they keep is kept as in a step.

        They have no messages, so also with sequence parallelism all rows pass through all of them.
        """
        stage, batch = self.stage, self.stage.batch(rows)
        x, turns = stage.input(rows, 1, stage.shape.hidden), self._angles(batch)
        layers = stage.stacks[name]

        def run() -> tuple[Tensor, Sequence[Tensor]]:
            out = x
            with layout.activate(batch):
                for layer in layers:
                    out = half(layer, out, turns)
            return out, (x,)

        return run

    def _attention(self) -> list[Probe]:
        """One sequence and eight of each length; one with each past."""
        found, most_tokens = [], self.stage.most_tokens
        for length in grid_up_to(min(1024, most_tokens), least=8):
            for past in (0, 256, 1024):
                if past and (length < 16 or length > 256):
                    continue
                for count in (1, 8) if not past and length * 8 <= 2 * most_tokens else (1,):
                    make = partial(self._attention_of, length, past, count)
                    found.append(Probe(f"attention:{length}:{past}", count, make))
        return found

    def _attention_of(self, length: int, past: int, count: int) -> Run:
        heads, keys, size, value = self._heads()
        scale, window = self.backbone.shape.scales[0], self.backbone.shape.windows[0]
        segments = [Segment("probe", i * length, length, i, past) for i in range(count)]
        rows, of = length * count, self.stage.input
        q, k, v = of(rows, heads, size), of(rows + past, keys, size), of(rows + past, keys, value)
        return lambda: (segment_attention(q, k, v, segments, scale=scale, window=window), (q, k, v))

    def _ends(self) -> list[Probe]:
        """The entry, by rows; the final norm and the loss head, by labels."""
        found: list[Probe] = []
        if self.backbone.first:
            found += [Probe("entry", rows, partial(self._entry, rows)) for rows in self.stage.coarse]
        if self.backbone.last:
            most = max(self.stage.most_tokens // 2, 16)
            labels = [n for n in (1, 4, *self.stage.rows) if n <= most]
            found += [Probe("head", n, partial(self._head, n), cold=True) for n in labels]
        return found

    def _entry(self, rows: int) -> Run:
        batch = self.stage.batch(rows)

        def run() -> tuple[Tensor, Sequence[Tensor]]:
            self._angles(batch)
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
        found = [
            Probe(name, rows, partial(self._sent, send, rows))
            for name, send in wanted
            for rows in self.stage.rows
        ]
        return found + (self.experts.messages() if self.experts is not None else [])

    def _sent(self, send: Callable[[Tensor], None], rows: int) -> Run:
        x = self.stage.input(rows, self.backbone.shape.hidden).detach()

        def run() -> tuple[Tensor, Sequence[Tensor]]:
            send(x)
            return x, ()

        return run
