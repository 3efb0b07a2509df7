"""Estimates a profile from the device's roofline: its peak arithmetic and its memory bandwidth.

An operator takes the longer of its arithmetic at the device's peak and its traffic at the device's bandwidth (on a CPU
their sum), and a fixed overhead for each launch. That is good enough to compare layouts; the seconds themselves may be
far off, and a plan made from them says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_mux.adapters.costs import Place
from megatron_mux.adapters.registry import KINDS
from megatron_mux.base_ops import COLUMN_PARALLEL, EXPERT_OPS, REPLICATED, BaseOpName
from megatron_mux.fusion.device import Device, device_of
from megatron_mux.fusion.even_experts import ExpertShares
from megatron_mux.fusion.layer_operators import base_ops, layer_operators
from megatron_mux.fusion.profile import Curve, Profile, grid_up_to
from megatron_mux.fusion.updates import estimated_updates
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
        shape: The backbone's sizes.
        about: What `about_run` says: the device, and whatever else names the run.
        itemsize: Bytes of the backbone's dtype.
        tensor_parallel: Ranks that share each layer.
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
        sizes=tuple(grid_up_to(most_tokens)),
        shares=None
        if shape.experts is None
        else ExpertShares.of(shape, tensor_parallel, expert, expert_tensor),
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
        attention_in_one_call=about["kind"] == "cuda" and itemsize == 2,
        updates=estimated_updates(device, about["kind"] == "cuda"),
        sequence_seconds=5e-5,
        step_seconds=10 * device.overhead,
    )


class _Load(NamedTuple):
    """The work of an operator.

    Attributes:
        flops: Floating-point operations.
        values: Values read and written.
        launches: Times that the device is asked to compute.
    """

    flops: float
    values: float
    launches: float = 1.0


@dataclass(frozen=True)
class _Rank:
    """What one rank computes and sends.

    Attributes:
        shape: The backbone's.
        device: Its limits.
        itemsize: Bytes of a value.
        tensor, expert_tensor: Ranks that share each layer, and each expert.
        sizes: Rows of the points of curves.
        shares: Its shares of experts; None without experts.
    """

    shape: BackboneShape
    device: Device
    itemsize: int
    tensor: int
    expert_tensor: int
    sizes: tuple[int, ...]
    shares: ExpertShares | None

    def operators(self) -> dict[str, Curve]:
        """The operators of layers, the embedding and the loss head."""
        shape, h = self.shape, self.shape.hidden
        own = 1.0 if self.shares is None else self.shares.own  # sequence parallelism comes with experts
        more_norms = 2 * h * shape.output_norms
        known = {
            "norm": self._passes(2 * h * own),
            "rotary": self._passes(self._rotated()),
            "activation": self._passes(self._activated("linear_fc1")),
            "shared_activation": self._passes(self._activated("shared_fc1")),
            "glue_attention": self._passes((3 * h + more_norms) * own + self._inner_norms()),
            "glue_mlp": self._passes((3 * h + more_norms) * own),
            **({} if self.shares is None else self._experts(self.shares)),
            **{str(op): self._curve(self._product(op)) for op in base_ops(shape)},
        }
        found = {name: known[name] for name in layer_operators(shape)}
        vocab = shape.vocab / self.tensor
        head = self._curve(lambda labels: _Load(4 * labels * h * vocab, 2 * (h + labels) * vocab), 0.0)
        return {**found, "entry": self._passes(2 * h), "head": head}

    def _experts(self, shares: ExpertShares) -> dict[str, Curve]:
        """A layer's experts besides their products."""
        experts, h = self.shape.experts, self.shape.hidden
        assert experts is not None
        count, weights = experts.count, experts.count * h
        moves = shares.pairs * 6 * h + shares.own * 3 * h
        launches = _PAIRS_LAUNCHES
        if shares.sent:
            moves, launches = moves + shares.sent * 10 * h, launches + _EXCHANGE_LAUNCHES
        activated = shares.pairs * self._activated("experts_fc1")

        def router(rows: float) -> _Load:
            own = rows * shares.own
            return _Load(2 * own * weights, own * (h + 6 * count) + weights, _ROUTER_LAUNCHES)

        return {
            "router": self._curve(router, 0.5),
            "experts_activation": self._passes(activated),
            "glue_experts": self._curve(lambda rows: _Load(rows * moves, rows * moves, launches)),
        }

    def attention(self) -> dict[str, Curve]:
        """Scores and values, twice that backward."""
        shape, device, found = self.shape, self.device, dict[str, Curve]()
        # The narrower of keys and values is filled up with zeros.
        size = shape.head_dim if shape.latent is None else max(shape.head_dim, shape.latent.value)
        for length in grid_up_to(8192, least=8):
            for past in (0, 256, 1024, 4096):
                pairs = length * (length + 1) / 2 + length * past
                flops = 4 * pairs * shape.heads * size / self.tensor
                keys = 2 * (length + past) * shape.kv_heads + 2 * length * shape.heads
                traffic = self.itemsize * keys * size / self.tensor
                seconds = (
                    device.seconds(2 * flops, traffic, self.itemsize),
                    device.seconds(16 * flops, 8 * traffic, self.itemsize),
                )
                found[f"attention:{length}:{past}"] = Curve((1, 8), seconds, tuple(2 * s for s in seconds))
        return found

    def adapters(self) -> Iterator[tuple[str, Curve]]:
        """Adapters of all kinds, wherever they can be; two of a kind share nothing."""
        for sample in (sample for kind in KINDS.values() for sample in kind.samples()):
            for op in base_ops(self.shape):
                routed = op in EXPERT_OPS
                if sample.at(op, self.shape) is None or (routed and self.expert_tensor > 1):
                    continue
                section = sample.section(op, ["module"])
                work, place = section.work(Place(op, *self._widths(op))), section.curve(1)
                assert place is not None, "samples take seconds"

                def load(rows: float, op: BaseOpName = op, work: Any = work) -> _Load:
                    computed, copies = self._rows(op, rows)
                    launches = _LOW_RANK_LAUNCHES * copies if op in EXPERT_OPS else 1
                    return _Load(
                        computed * work.flops, computed * work.moved + copies * work.weights, launches
                    )

                yield f"{place.name}:{op}:{place.size}", self._curve(load, 2.0)
                yield f"utilisation:{place.name}", Curve((1,), (1.0,), (1.0,))

    def dequantising(self) -> dict[str, Curve]:
        """A layer's weights on average, whatever the rows: bytes are read and values written, on a CPU then scaled."""
        units = architecture_of(self.shape).layers
        values = sum(unit.dequantised for unit in units) / len(units) / self.tensor
        if not values:
            return {}
        read = sum(unit.held.total for unit in units if unit.held is not None) / len(units) / self.tensor
        passes = 3 if self.device.adds else 1
        one = self.device.seconds(2 * values, read + passes * values * self.itemsize, self.itemsize)
        return {"dequantise": Curve((1,), (one,), (one,))}

    def messages(self, expert_ranks: int) -> dict[str, Curve]:
        """Between stages, tensor ranks and expert ranks.

        Args:
            expert_ranks: Ranks that exchange rows of experts.
        """
        tp, row = self.tensor, self.shape.hidden * self.itemsize
        found = {"transfer": self._link(row, 2 * tp)}  # a stage's neighbour may be on the next node
        if tp > 1:
            found["all_reduce"] = self._link(2 * row * (tp - 1) / tp, tp)
        if self.shares is not None and expert_ranks > 1:
            found["exchange"] = self._link(self.shares.away * row, expert_ranks)
            found["exchange_sizes"] = Curve((1,), (self.device.latency,), (0.0,))
        return found

    def _curve(self, load: Callable[[float], _Load], backward: float = 1.0) -> Curve:
        """Of an operator whose backward takes `backward` times as long."""
        seconds = []
        for size in self.sizes:
            flops, values, launches = load(size)
            one = self.device.seconds(flops, values * self.itemsize, self.itemsize)
            seconds.append(one + (launches - 1) * self.device.overhead)
        return Curve(self.sizes, tuple(seconds), tuple(backward * s for s in seconds))

    def _passes(self, width: float) -> Curve:
        """Reading and writing rows of so many values."""
        return self._curve(lambda rows: _Load(rows * width, rows * width))

    def _product(self, op: BaseOpName) -> Callable[[float], _Load]:
        """Rows times a matrix; of routed experts, times the matrix of each that has rows."""
        k, n = self._widths(op)

        def load(rows: float) -> _Load:
            computed, matrices = self._rows(op, rows)
            return _Load(2 * computed * k * n, computed * (k + n) + matrices * k * n, matrices)

        return load

    def _rows(self, op: BaseOpName, rows: float) -> tuple[float, float]:
        """Rows that a BaseOp computes, and how many matrices it multiplies them with."""
        if op not in EXPERT_OPS or self.shares is None:
            return rows, 1
        return rows * self.shares.pairs, self.shares.touched(rows)

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
