"""Estimates a profile from the device's roofline: its peak arithmetic and its memory bandwidth.

An operator takes the longer of its arithmetic at the device's peak and its traffic at the device's bandwidth (on a CPU
their sum), and a fixed overhead for each launch. That is good enough to compare layouts; the seconds themselves may be
far off, and a plan made from them says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_mux.adapters.costs import BaseOpWidths
from megatron_mux.adapters.registry import KINDS
from megatron_mux.base_ops import COLUMN_PARALLEL, EXPERT_OPS, REPLICATED, BaseOpName
from megatron_mux.fusion.device import Device, device_of
from megatron_mux.fusion.even_experts import ExpertShares
from megatron_mux.fusion.profiler.layer_operators import base_ops
from megatron_mux.fusion.profiler.profile import Curve, Profile, points, probe_sizes, summed
from megatron_mux.fusion.profiler.updates import estimated_updates
from megatron_mux.memory.forms.architecture import architecture_of
from megatron_mux.shape import BackboneShape

MESSAGE_SHARE = {"cpu": 0.2, "cuda": 0.06}
"""`Profile.message_share`: on a CPU about what gloo's thread was seen to take; on a GPU 8 CTAs of an H100's 132
multiprocessors."""

_ROUTER_LAUNCHES, _EXCHANGE_LAUNCHES, _PAIRS_LAUNCHES = 24, 24, 6
"""Small operators of a router and of the order of its pairs; of choosing ranks and laying out messages; of spreading,
weighting and summing pairs."""

_LOW_RANK_LAUNCHES = 2
"""Products of low-rank terms in the forward pass, for each expert and task."""


def roofline(
    shape: BackboneShape,
    about: Mapping[str, Any],
    itemsize: int,
    tensor_parallel: int = 1,
    most_tokens: int = 16384,
) -> Profile:
    """The estimated profile.

    Args:
        about: What `about_run` says: the device, and whatever else names the run.
        most_tokens: Rows of the last point of the curves.
    """
    device = device_of(about["kind"], about["device"], about["threads"])
    expert = int(about.get("expert_parallel", 1))
    expert_tensor = int(about.get("expert_tensor", tensor_parallel))
    rank = _Rank(
        shape=shape,
        device=device,
        itemsize=itemsize,
        tensor=tensor_parallel,
        expert_tensor=expert_tensor,
        sizes=tuple(probe_sizes(most_tokens)),
        shares=None
        if shape.experts is None
        else ExpertShares.of(shape, tensor_parallel, expert, expert_tensor),
        in_one_call=about["kind"] == "cuda" and itemsize == 2,
    )
    curves = {
        **rank.operators(),
        **rank.attention(),
        **dict(rank.adapters()),
        **rank.messages(expert * expert_tensor),
        **rank.dequantising(),
    }
    sends = tensor_parallel > 1 or "exchange" in curves
    return Profile(
        source="roofline",
        about={**about, "device": device.name},
        curves=curves,
        message_share=MESSAGE_SHARE[about["kind"]] if sends else 0.0,
        updates=estimated_updates(device, about["kind"] == "cuda"),
        sequence_seconds=5e-5,
        step_seconds=10 * device.overhead,
    )


@dataclass(frozen=True)
class _Rank:
    """What one rank computes and sends.

    Attributes:
        tensor, expert_tensor: Ranks that share each layer, and each expert.
        sizes: Rows of the points of curves.
        shares: Its shares of experts; None without experts.
        in_one_call: Whether one kernel serves all sequences of a batch.
    """

    shape: BackboneShape
    device: Device
    itemsize: int
    tensor: int
    expert_tensor: int
    sizes: tuple[int, ...]
    shares: ExpertShares | None
    in_one_call: bool

    def operators(self) -> dict[str, Curve]:
        """Half layers and their BaseOps, the embedding and the loss head."""
        shape, h = self.shape, self.shape.hidden
        share = 1.0 if self.shares is None else self.shares.own  # sequence parallelism comes with experts
        norm, added = self._passes(2 * h * share), (3 * h + 2 * h * shape.output_norms) * share
        products = {str(op): self._product(op) for op in base_ops(shape)}

        def mlp(first: BaseOpName, second: BaseOpName) -> list[Curve]:
            return [products[first], self._passes(self._activated(first)), products[second]]

        inner = [self._passes(self._rotated()), self._passes(added + self._inner_norms())]
        halves = {"attention_half": [norm, *(products[op] for op in shape.attention_ops), *inner]}
        if "linear_fc1" in products:
            halves["mlp_half"] = [norm, *mlp("linear_fc1", "linear_fc2"), self._passes(added)]
        if self.shares is not None:
            halves["router"] = [norm, *self._routing(self.shares)]
            halves["experts"] = [
                products["experts_fc1"],
                self._passes(self.shares.pairs * self._activated("experts_fc1")),
                products["experts_fc2"],
            ]
        if "shared_fc1" in products:
            halves["shared"] = mlp("shared_fc1", "shared_fc2")
        vocab = shape.vocab / self.tensor
        head = self._curve(4 * h * vocab, 2 * vocab, 2 * h * vocab, backward=0.0)
        named = {name: summed(curves) for name, curves in halves.items()}
        return {**named, **products, "entry": self._passes(2 * h), "head": head}

    def _routing(self, shares: ExpertShares) -> list[Curve]:
        """The router, and the way of rows to experts and back."""
        experts, h = self.shape.experts, self.shape.hidden
        assert experts is not None
        count, weights, local = experts.count, experts.count * h, shares.own
        moves = shares.pairs * 6 * h + local * 3 * h
        launches = _PAIRS_LAUNCHES
        if shares.sent:
            moves, launches = moves + shares.sent * 10 * h, launches + _EXCHANGE_LAUNCHES
        return [
            self._curve(2 * local * weights, local * (h + 6 * count), weights, _ROUTER_LAUNCHES, 0.5),
            self._curve(moves, moves, launches=launches),
        ]

    def attention(self) -> dict[str, Curve]:
        """Scores and values, twice that backward; a past is copied."""
        shape, device = self.shape, self.device
        # The narrower of keys and values is filled up with zeros.
        size = shape.head_dim if shape.latent is None else max(shape.head_dim, shape.latent.value)
        launch = device.overhead if self.in_one_call else 0.0

        def of(length: int, past: int) -> tuple[float, float]:
            pairs = length * (length + 1) / 2 + length * past
            values = 2 * (length + 3 * past) * shape.kv_heads + 2 * length * shape.heads
            parts = size / self.tensor
            seconds = device.seconds(
                4 * pairs * shape.heads * parts, self.itemsize * values * parts, self.itemsize
            )
            return seconds - launch, 2 * (seconds - launch)

        return {
            "attention_launch": Curve((1,), (launch,), (2 * launch,)),
            **{
                f"attention:{length}": points({past: of(length, past) for past in (0, 16, 256, 1024, 4096)})
                for length in probe_sizes(8192, least=8)
            },
        }

    def adapters(self) -> Iterator[tuple[str, Curve]]:
        """Adapters of all kinds, wherever they can be; two of a kind share nothing."""
        for sample in (sample for kind in KINDS.values() for sample in kind.samples()):
            for op in base_ops(self.shape):
                routed = op in EXPERT_OPS
                if sample.at(op, self.shape) is None or (routed and self.expert_tensor > 1):
                    continue
                section = sample.section(op, ["module"])
                work, place = section.work(BaseOpWidths(*self._widths(op))), section.curve(1)
                assert place is not None, "samples take seconds"

                launches = _LOW_RANK_LAUNCHES if routed else 1
                added = self._curve(work.flops, work.moved, work.weights, launches, 2.0, routed)
                yield f"{place.name}:{op}:{place.size}", added
                yield f"utilisation:{place.name}", Curve((1,), (1.0,), (1.0,))

    def dequantising(self) -> dict[str, Curve]:
        """A layer's weights on average, whatever the rows: bytes are read and values written, on a CPU then scaled."""
        counts = architecture_of(self.shape).layers
        values = sum(part.dequantised for part in counts) / len(counts) / self.tensor
        if not values:
            return {}
        read = sum(part.held.total for part in counts if part.held is not None) / len(counts) / self.tensor
        passes = 3 if self.device.adds else 1
        seconds = self.device.seconds(2 * values, read + passes * values * self.itemsize, self.itemsize)
        return {"dequantise": Curve((1,), (seconds,), (seconds,))}

    def messages(self, expert_ranks: int) -> dict[str, Curve]:
        """Between stages, tensor ranks and expert ranks.

        Args:
            expert_ranks: Ranks that exchange rows of experts.
        """
        tp, row = self.tensor, self.shape.hidden * self.itemsize
        curves = {"transfer": self._link(row, 2 * tp)}  # a stage's neighbour may be on the next node
        if tp > 1:
            curves["all_reduce"] = self._link(2 * row * (tp - 1) / tp, tp)
        if self.shares is not None and expert_ranks > 1:
            curves["exchange"] = self._link(self.shares.away * row, expert_ranks)
            curves["exchange_sizes"] = Curve((1,), (self.device.latency,), (0.0,))
        return curves

    def _curve(
        self,
        flops: float,
        values: float,
        weights: float = 0.0,
        launches: float = 1.0,
        backward: float = 1.0,
        routed: bool = False,
    ) -> Curve:
        """Of an operator.

        Args:
            flops: Floating-point operations of a row.
            values: Read and written of a row.
            weights: Values read and written whatever the rows.
            launches: Times that the device is asked to compute.
            backward: How many times as long the backward takes.
            routed: Whether rows are pairs of a row and an expert, and each expert that has some has weights and
                launches of its own.
        """
        seconds = []
        for rows in self.sizes:
            computed, copies = float(rows), 1.0
            if routed and self.shares is not None:
                computed, copies = rows * self.shares.pairs, self.shares.touched(rows)
            moved = (computed * values + copies * weights) * self.itemsize
            each = self.device.seconds(computed * flops, moved, self.itemsize)
            seconds.append(each + (copies * launches - 1) * self.device.overhead)
        return Curve(self.sizes, tuple(seconds), tuple(backward * s for s in seconds))

    def _passes(self, width: float) -> Curve:
        """Reading and writing rows of so many values."""
        return self._curve(width, width)

    def _product(self, op: BaseOpName) -> Curve:
        """Rows times a matrix; of routed experts, times the matrix of each that has rows."""
        k, n = self._widths(op)
        return self._curve(2 * k * n, k + n, k * n, routed=op in EXPERT_OPS)

    def _parts(self, op: BaseOpName) -> int:
        """Ranks that divide a BaseOp."""
        return 1 if op in REPLICATED else self.expert_tensor if op in EXPERT_OPS else self.tensor

    def _widths(self, op: BaseOpName) -> tuple[float, float]:
        """Input and output width of a BaseOp on a rank."""
        inputs, outputs = self.shape.in_features(op), self.shape.out_features(op)
        parts = self._parts(op)
        return (inputs, outputs / parts) if op in COLUMN_PARALLEL else (inputs / parts, outputs)

    def _activated(self, first: BaseOpName) -> float:
        """Values that an activation reads and writes of a row that the MLP's first BaseOp has computed."""
        return (self.shape.out_features(first) + self.shape.inner(first)) / self._parts(first)

    def _rotated(self) -> float:
        """Values of a row that rotary embedding reads and writes."""
        shape, tp = self.shape, self.tensor
        if not any(shape.ropes):
            return 0
        if shape.latent is not None:  # all heads share the rotated part of their keys
            return 2 * (shape.heads / tp + 1) * shape.latent.rotated
        return 2 * (shape.heads + shape.kv_heads) * shape.head_dim / tp

    def _inner_norms(self) -> float:
        """Values of a row that norms within attention read and write, and queries and keys that are put together."""
        shape, tp = self.shape, self.tensor
        if shape.latent is None:
            return 2 * (shape.heads + shape.kv_heads) * shape.head_dim / tp * shape.qk_norm
        latents = 2 * ((shape.latent.query_rank or 0) + shape.latent.rank)
        return latents + 4 * shape.heads * shape.head_dim / tp

    def _link(self, bytes_per_row: float, ranks: int) -> Curve:
        """Of a collective in a group that spans so many ranks."""
        link, latency = self.device.link_over(ranks), self.device.latency
        seconds = tuple(latency + size * bytes_per_row / link for size in self.sizes)
        return Curve(self.sizes, seconds, seconds)
