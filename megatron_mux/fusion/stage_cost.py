"""What a micro-batch of a hybrid task takes and keeps on each stage: equations 3 and 5 of MuxTune, from a profile.

Equation 3 has a term for the BaseOps, which depends on all rows together, and one for the adapters at each BaseOp,
`max(sum of u_a t_a, max of t_a)`. Here the first is written out: products, norms and the rest by rows, attention by
sequence, the loss head and the last MLP by labels, what lies below the lowest adapter without a backward pass. Equation
5's third term, activations, is likewise by rows; its first two are `resident`.

Shapes: S stages, K tasks; arrays `[2, ...]` hold forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_mux.fusion.alignment import Chunk, Weights
from megatron_mux.fusion.cost import Hybrid, HybridCost
from megatron_mux.fusion.load import OPS, Site, TaskLoad
from megatron_mux.fusion.profile import Profile

Array = npt.NDArray[np.float64]

_ATTENTION_OPS = ("norm", "linear_qkv", "rotary", "linear_proj", "glue_attention")
_MLP_OPS = ("norm", "linear_fc1", "activation", "linear_fc2", "glue_mlp")

_BELOW = {
    # What has no backward pass in the layer of the lowest adapter, by the BaseOp that has it.
    "linear_qkv": ("norm", "linear_qkv"),
    "linear_proj": ("norm", "linear_qkv", "rotary", "linear_proj"),
    "linear_fc1": (*_ATTENTION_OPS, "norm", "linear_fc1"),
    "linear_fc2": (*_ATTENTION_OPS, "norm", "linear_fc1", "activation", "linear_fc2"),
}

_OPTIMIZER_BYTES = 16
"""Of an adapter's element: value, gradient and two moments in fp32 (M_g of equation 5, and the optimizer's)."""

_LOGITS_BYTES = 2 * (64 << 20)
"""The loss head's chunk of logits and what it makes of it."""


class StageCosts:
    """A `CostModel` of tasks on a backbone divided into stages.

    Args:
        profile: Seconds of operators.
        shape: The backbone's sizes.
        loads: The tasks.
        stages: The layers of each stage.
        tensor: Ranks that share each layer.
        data: Pipelines that share each task's sequences.
        itemsize: Bytes of the backbone's dtype.
        recompute: Whether layers are computed again in the backward pass.
        overlap: Whether hybrid tasks of one bucket hide each other's communication, as the paper's do. Else it is part
            of every pass.
    """

    def __init__(
        self,
        profile: Profile,
        shape: Any,
        loads: Sequence[TaskLoad],
        stages: Sequence[range],
        tensor: int = 1,
        data: int = 1,
        itemsize: int = 4,
        recompute: bool = False,
        overlap: bool = True,
    ) -> None:
        self.overlap = overlap
        self.profile = profile
        self.shape = shape
        self.loads = list(loads)
        self.stages = list(stages)
        self.tensor = tensor
        self.data = data
        self.itemsize = itemsize
        self.recompute = recompute
        self._index = {load.name: i for i, load in enumerate(self.loads)}
        self._curves = profile.curves
        self._lengths = _attention_grid(profile)
        self._sites = [_by_stage(load.sites, self.stages) for load in self.loads]
        self._lowest = [_lowest(load.sites, shape.layers) for load in self.loads]
        # `[K, 2]` seconds of attention of a task's whole step in one layer.
        self._attention = np.array(
            [
                np.sum([self._sequence(n, load.virtual_tokens) for n in load.tokens], axis=0)
                for load in self.loads
            ]
        ).reshape(-1, 2)
        self._adapters_at = lru_cache(maxsize=None)(self._adapters_of)
        self._dense_at = lru_cache(maxsize=4096)(self._dense)

    # -- equation 3

    def hybrid(self, tasks: Hybrid, micro_batches: int) -> HybridCost:
        """One of `micro_batches` equal parts of a step of `tasks` together; see `CostModel`."""
        count = sum(len(self.loads[t].tokens) for t in tasks)
        # There are no more micro-batches than sequences.
        parts = max(1, min(micro_batches * self.data, count))
        rows = {t: self.loads[t].total / parts for t in tasks}
        labels = sum(sum(self.loads[t].labels) for t in tasks) / parts
        attention = self._attention[list(tasks)].sum(axis=0) / parts
        longest = max(max(self.loads[t].tokens, default=0) for t in tasks)
        return self._combine(rows, labels, attention, longest)

    def chunk(self, chunk: Chunk) -> HybridCost:
        """Exactly this chunk of a hybrid task, its sequences' lengths and pasts as they are."""
        rows: dict[int, float] = {}
        labels, attention = 0.0, np.zeros(2)
        for piece in chunk:
            task = self._index[piece.task]
            load = self.loads[task]
            rows[task] = rows.get(task, 0.0) + piece.tokens
            # Labels are mostly the end of a sequence.
            whole = load.tokens[piece.sequence] if piece.sequence < len(load.tokens) else piece.stop
            first = whole - load.labels[piece.sequence] if piece.sequence < len(load.labels) else 0
            labels += max(0, min(piece.stop, whole) - max(piece.start, first))
            attention = attention + self._sequence(piece.tokens, load.virtual_tokens + piece.start)
        return self._combine(rows, labels, attention)

    def _combine(
        self, rows: Mapping[int, float], labels: float, attention: Array, longest: float = 0.0
    ) -> HybridCost:
        """Seconds and bytes of a batch: rows of each task, labels, attention's seconds in one layer `[2]`.

        It keeps as much as `longest` rows at least: sequences are not divided among micro-batches.
        """
        total = sum(rows.values())
        lowest = min((self._lowest[t] for t in rows), default=(self.shape.layers, "linear_fc2"))
        if self.profile.attention_in_one_call:
            attention = attention + np.array(self._curves["attention:8:0"].at(1))
        seconds = np.array(
            [self._stage(s, total, labels, attention, lowest) for s in range(len(self.stages))]
        )
        adapters = [
            self._adapters_at(t, round(n, 3)) for t, n in rows.items()
        ]  # K of [2 (sum, weighted), 2, S, ops]
        if adapters:
            plain = np.max([a[0] for a in adapters], axis=0)
            fused = np.sum([a[1] for a in adapters], axis=0)
            seconds += np.maximum(plain, fused).sum(axis=2).T
        if self.recompute:
            seconds[:, 1] += seconds[:, 0]
        exposed: tuple[float, ...] = ()
        if self.tensor > 1:
            one = self._curves["all_reduce"].at(total)[0]
            exposed = tuple(2 * len(layers) * one for layers in self.stages)
            if not self.overlap:
                seconds += np.array(exposed)[:, None]
                exposed = ()
        transfer: tuple[float, ...] = ()
        if len(self.stages) > 1:
            transfer = (self._curves["transfer"].at(total)[0],) * (len(self.stages) - 1)
        return HybridCost(
            forward=tuple(float(x) for x in seconds[:, 0]),
            backward=tuple(float(x) for x in seconds[:, 1]),
            exposed=exposed,
            memory=tuple(self._kept(layers, max(total, longest), rows) for layers in self.stages),
            transfer=transfer,
        )

    def _stage(
        self, stage: int, rows: float, labels: float, attention: Array, lowest: tuple[int, str]
    ) -> tuple[float, float]:
        """Seconds of the BaseOps and all else that is frozen."""
        layers = self.stages[stage]
        last = stage == len(self.stages) - 1
        above = len([layer for layer in layers if layer >= lowest[0]])
        attention_half = self._dense_at("attention", rows)
        mlp_half = self._dense_at("mlp", rows)
        forward = len(layers) * (attention_half[0] + mlp_half[0] + attention[0])
        backward = above * (attention_half[1] + mlp_half[1] + attention[1])
        if lowest[0] in layers:
            backward -= sum(self._curves[op].at(rows)[1] for op in _BELOW[lowest[1]])
            if lowest[1] in ("linear_proj", "linear_fc1", "linear_fc2"):
                backward -= attention[1]
        if stage == 0:
            forward += self._curves["entry"].at(rows)[0]
        if last and layers:
            trimmed = self._dense_at("mlp", labels)
            head = self._curves["head"].at(labels)
            forward += trimmed[0] - mlp_half[0] + head[0]
            backward += (trimmed[1] - mlp_half[1]) * (above > 0) + head[1]
        return forward, max(0.0, backward)

    def _dense(self, half: str, rows: float) -> tuple[float, float]:
        ops = _ATTENTION_OPS if half == "attention" else _MLP_OPS
        found = [self._curves[op].at(rows) for op in ops]
        return sum(f for f, _ in found), sum(b for _, b in found)

    def _sequence(self, length: int, past: int) -> Array:
        """Attention of one sequence in one layer: between the grid's lengths and pasts linear."""
        lengths, pasts = self._lengths
        low, high, share = _between(lengths, length)
        found = np.zeros(2)
        for n, weight in ((low, 1 - share), (high, share)):
            if not weight:
                continue
            known = pasts[n]
            a, b, part = _between(known, past)
            for p, w in ((a, 1 - part), (b, part)):
                if w:
                    found += weight * w * self._attention_point(n, p)
        return found

    def _attention_point(self, length: int, past: int) -> Array:
        curve = self._curves[f"attention:{length}:{past}"]
        one = np.array(curve.at(1))
        if self.profile.attention_in_one_call:
            # The launch is paid once a batch; a sequence takes what another one more takes.
            return (np.array(curve.at(8)) - one) / 7 if len(curve.sizes) > 1 else one
        return one

    # -- adapters

    def _adapters_of(self, task: int, rows: float) -> Array:
        """`[2 (alone, times utilisation), 2 (forward, backward), S, ops]` seconds of a task's adapters."""
        found = np.zeros((2, 2, len(self.stages), len(OPS)))
        for (stage, op, kind, size), count in self._sites[task].items():
            alone = np.array(self._adapter(kind, op, size, rows)) * count
            shares = self._curves.get(f"utilisation:{kind}")
            share = np.array(shares.at(rows)) if shares is not None else np.ones(2)
            place = OPS.index(op)
            found[0, :, stage, place] += alone
            found[1, :, stage, place] += alone * share
        return found

    def _adapter(self, kind: str, op: str, size: int, rows: float) -> tuple[float, float]:
        """Seconds of one adapter: linear in its size between and beyond those that were measured."""
        if kind == "PREFIX_TUNING":  # longer keys, counted with attention
            return 0.0, 0.0
        known = sorted(int(n.rpartition(":")[2]) for n in self._curves if n.startswith(f"{kind}:{op}:"))
        if not known:
            return 0.0, 0.0
        if len(known) == 1:
            return self._curves[f"{kind}:{op}:{known[0]}"].at(rows)
        low, high = known[0], known[-1]
        share = (size - low) / (high - low)
        a, b = (self._curves[f"{kind}:{op}:{n}"].at(rows) for n in (low, high))
        return max(0.0, a[0] + share * (b[0] - a[0])), max(0.0, a[1] + share * (b[1] - a[1]))

    # -- equation 5

    def _kept(self, layers: range, rows: float, of_task: Mapping[int, float]) -> float:
        """Bytes that a stage keeps of a batch from its forward to its backward pass."""
        if self.recompute:
            kept = rows * self.shape.hidden * self.itemsize * len(layers)
        else:
            kept = rows * len(layers) * sum(self.profile.activation_bytes.values())
        for task, own in of_task.items():
            for site in self.loads[task].sites:
                if site.layer in layers and not self.recompute:
                    kept += own * site.size * self.itemsize
        return float(kept)

    def resident(self, tasks: Iterable[int] | None = None) -> tuple[float, ...]:
        """`[S]` bytes that are always there: the backbone's part, the tasks' adapters with what trains them."""
        chosen = range(len(self.loads)) if tasks is None else list(tasks)
        shape, found = self.shape, []
        layer = sum(shape.in_features(op) * shape.out_features(op) for op in OPS) / self.tensor
        vocabulary = shape.vocab * shape.hidden / self.tensor
        for stage, layers in enumerate(self.stages):
            elements = layer * len(layers)
            first, last = stage == 0, stage == len(self.stages) - 1
            elements += vocabulary * (first + last - (first and last and shape.tied))
            own = sum(
                self.loads[t].elements
                * sum(site.layer in layers for site in self.loads[t].sites)
                / max(1, len(self.loads[t].sites))
                for t in chosen
            )
            found.append(elements * self.itemsize + own * _OPTIMIZER_BYTES + _LOGITS_BYTES * last)
        return tuple(found)

    # -- besides the passes

    def step_overhead(self, tasks: Iterable[int] | None = None) -> float:
        """Seconds of a step outside its passes: reading, laying out, optimizers."""
        chosen = range(len(self.loads)) if tasks is None else list(tasks)
        profile = self.profile
        return (
            profile.step_seconds
            + sum(
                self.loads[t].tensors * profile.tensor_seconds / len(self.stages)
                + self.loads[t].elements * profile.element_seconds / len(self.stages)
                + len(self.loads[t].tokens) * profile.sequence_seconds
                for t in chosen
            )
            + self._gradients(chosen)
        )

    def _gradients(self, chosen: Iterable[int]) -> float:
        """Seconds to sum the fp32 gradients of adapters over pipelines: as a transfer of as many bytes, twice."""
        if self.data == 1:
            return 0.0
        elements = sum(self.loads[t].elements for t in chosen) / len(self.stages)
        rows = 2 * 4 * elements / (self.shape.hidden * self.itemsize)
        return self._curves["transfer"].at(rows)[0]

    def weights(self) -> Weights:
        """What a token, a pair and a label take of all stages, to balance micro-batches by."""
        layers = self.shape.layers
        most = max(64.0, sum(load.total for load in self.loads) / 4)
        token = sum(sum(self._dense_at(half, most)) for half in ("attention", "mlp")) * layers / most
        lengths, _ = self._lengths
        long = max(n for n in lengths if n <= 1024)
        pair = float(self._attention_point(long, 0).sum()) * layers / (long * (long + 1) / 2)
        head = self._curves["head"]
        label = (head.forward[-1] + head.backward[-1]) / head.sizes[-1]
        return Weights(token, pair, label)


def _by_stage(sites: Sequence[Site], stages: Sequence[range]) -> dict[tuple[int, str, str, int], int]:
    """How many layers of each stage have the same adapter at the same BaseOp."""
    found: dict[tuple[int, str, str, int], int] = {}
    for site in sites:
        for stage, layers in enumerate(stages):
            if site.layer in layers:
                key = (stage, site.op, site.kind, site.size)
                found[key] = found.get(key, 0) + 1
    return found


def _lowest(sites: Sequence[Site], layers: int) -> tuple[int, str]:
    """The lowest layer that has an adapter, and the lowest BaseOp of it that has one."""
    if not sites:
        return layers, "linear_fc2"
    site = min(sites, key=lambda s: (s.layer, OPS.index(s.op)))
    return site.layer, site.op


def _attention_grid(profile: Profile) -> tuple[list[int], dict[int, list[int]]]:
    """Lengths that attention was measured at, and for each the pasts."""
    pasts: dict[int, list[int]] = {}
    for name in profile.curves:
        if name.startswith("attention:"):
            _, length, past = name.split(":")
            pasts.setdefault(int(length), []).append(int(past))
    return sorted(pasts), {length: sorted(known) for length, known in pasts.items()}


def _between(known: Sequence[int], value: float) -> tuple[int, int, float]:
    """The two known points to interpolate between or to extend beyond, and the share of the second."""
    if len(known) == 1 or value <= known[0]:
        return known[0], known[0], 0.0
    i = next((i for i, k in enumerate(known) if k >= value), len(known) - 1)
    low, high = known[i - 1], known[i]
    return low, high, (value - low) / (high - low)
