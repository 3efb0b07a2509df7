"""What a micro-batch of a hybrid task costs on each stage: equation 3 of MuxTune, from a profile.

Equation 3 has a term for the BaseOps, which depends on all rows together, and one for the adapters at each BaseOp,
`max(sum of u_a t_a, max of t_a)`. Here the first is written out: products, norms and the rest by rows, attention by
sequence, the loss head and the last MLP by labels, what lies below the lowest adapter without a backward pass. What it
keeps and takes of memory, equation 5, is in `step_memory`.

Shapes: S stages, K tasks; arrays `[2, ...]` hold forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_mux.footprint.memory import Taken
from megatron_mux.fusion.alignment import Chunk, Weights
from megatron_mux.fusion.contents import contents_of
from megatron_mux.fusion.graphs.launch_order import Interleave, Overlap
from megatron_mux.fusion.planner.adapter_seconds import AdapterSeconds
from megatron_mux.fusion.planner.backbone_time import BackboneTimeModel
from megatron_mux.fusion.planner.cost import Hybrid, HybridCost
from megatron_mux.fusion.planner.load import TaskLoad
from megatron_mux.fusion.planner.messages import LayerParallelism, Messages
from megatron_mux.fusion.planner.step_memory import StepMemory
from megatron_mux.fusion.profiler.core_attention import StageAttention
from megatron_mux.fusion.profiler.layer_operators import ORDER
from megatron_mux.fusion.profiler.profile import Profile
from megatron_mux.fusion.step import Lengths
from megatron_mux.memory.forms.method import ParallelConfig
from megatron_mux.optimizers.registry import OPTIMIZERS

Array = npt.NDArray[np.float64]

_MOST_ENTRIES = 1 << 18
"""Batches times tasks that are priced at once: 2 MiB of a table of numbers, of which there are some dozens."""


class StageCosts:
    """A `CostModel` of tasks on a backbone divided into stages.

    Args:
        method: How the step is divided among ranks, and what is computed again.
        interleave: How hybrid tasks of one bucket hide each other's messages. `off`: these are part of every pass.
        memory: What they keep and take; None: costs have none.
    """

    def __init__(
        self,
        profile: Profile,
        shape: Any,
        loads: Sequence[TaskLoad],
        stages: Sequence[range],
        method: ParallelConfig = ParallelConfig(),  # noqa: B008 (frozen)
        itemsize: int = 4,
        interleave: Interleave = "off",
        exchanges: bool = False,
        memory: StepMemory | None = None,
    ) -> None:
        self.memory = memory
        self.profile = profile
        self.shape = shape
        self.loads = list(loads)
        self.stages = list(stages)
        self.data = method.data
        self.itemsize = itemsize
        self.recomputes = method.recompute == "full"
        self._index = {load.name: i for i, load in enumerate(self.loads)}
        self._curves = profile.curves
        self._depths = np.array([float(len(layers)) for layers in stages])
        self._cores = StageAttention(profile.curves, shape.windows, self.stages)
        self._adapters = AdapterSeconds(profile, self.loads, self.stages)
        self._lowest = np.array([_lowest(load, shape.layers) for load in self.loads], dtype=np.int64)
        self._count = np.array([load.records for load in self.loads])
        self._refers = np.array([float(load.refers) for load in self.loads])
        self._total = np.array([float(load.total) for load in self.loads])
        self._labels = np.array([float(sum(load.labels)) for load in self.loads])
        # `[K, 2, S]` seconds of attention of a task's whole step in a layer of each stage.
        self._attention_of = lru_cache(maxsize=None)(self._cores.of)
        self._attention = np.array(
            [
                np.sum([self._attention_of(n, load.virtual_tokens) for n in load.tokens], axis=0)
                for load in self.loads
            ]
        ).reshape(-1, 2, len(self.stages))
        stepped = _stepped(self.loads, self.stages, method)
        self._values = stepped[:, :, 0]
        # `[K, ranks]` seconds of each task's optimizer step; `[K]` those that a bucket has once.
        prices = [profile.updates[OPTIMIZERS[load.adapter.optimizer].names[0]] for load in self.loads]
        of_one = np.array([(p.value, p.tensor, p.run) for p in prices]).reshape(-1, 1, 3)
        once = np.array([p.task * p.together for p in prices])
        self._updates = (stepped * of_one).sum(axis=2) + (np.array([p.task for p in prices]) - once)[:, None]
        self._once = once
        self._frozen = BackboneTimeModel(profile, shape, self.stages)
        layout = LayerParallelism(method.tensor > 1, method.sequence_parallel, exchanges, self.recomputes)
        self._messages = Messages(self._frozen, shape, layout)
        self.interleaving: Overlap | None = None
        if interleave != "off" and self._messages.any:
            kinds = tuple(tuple(self._frozen.kinds[i] for i in layers) for layers in self.stages)
            self.interleaving = Overlap(interleave, kinds, profile.message_share)

    # -- equation 3

    def hybrid(self, tasks: Hybrid, micro_batches: int) -> HybridCost:
        """One of `micro_batches` equal parts of a step of `tasks` together; see `CostModel`."""
        return self.hybrids([tasks], micro_batches)[0]

    def hybrids(self, sets: Sequence[Hybrid], micro_batches: int) -> list[HybridCost]:
        """The same of many hybrid tasks, so many at a time that their tables stay small; see `CostModel`."""
        most = max(1, _MOST_ENTRIES // len(self.loads))
        return [
            cost
            for i in range(0, len(sets), most)
            for cost in self._hybrids(sets[i : i + most], micro_batches)
        ]

    def _hybrids(self, sets: Sequence[Hybrid], micro_batches: int) -> list[HybridCost]:
        member = np.zeros((len(sets), len(self.loads)))
        for i, tasks in enumerate(sets):
            member[i, list(tasks)] = 1.0
        # There are no more micro-batches than records.
        parts = np.maximum(1, np.minimum(micro_batches * self.data, member @ self._count))
        rows, labels = member * self._total / parts[:, None], member @ self._labels / parts
        attention = np.tensordot(member, self._attention, 1) / parts[:, None, None]
        taken = None if self.memory is None else self.memory.of_parts(member, parts)
        return self._combine(rows, labels, attention, np.ceil(parts / self.data), taken)

    def chunks(self, chunks: Sequence[Chunk]) -> list[HybridCost]:
        """Seconds of exactly these chunks of hybrid tasks, their sequences' lengths and pasts as they are."""
        return self._combine(*self._laid_out(chunks), np.ones(len(chunks)), None)

    def _laid_out(self, chunks: Sequence[Chunk]) -> tuple[Array, Array, Array]:
        """Rows, labels and attention of chunks as for `_combine`."""
        lengths = {load.name: Lengths(load.tokens, load.labels) for load in self.loads}
        contents = contents_of(
            chunks, lengths, self._index, len(self.loads), "cuda"
        )  # attention is priced below
        attention = np.zeros((len(chunks), 2, len(self.stages)))
        for i, chunk in enumerate(chunks):
            for piece in chunk:
                past = self.loads[self._index[piece.task]].virtual_tokens + piece.start
                attention[i] += self._attention_of(piece.tokens, past)
        return contents.rows, contents.labels.sum(axis=1), attention

    def _combine(
        self, rows: Array, labels: Array, attention: Array, parts: Array, taken: Taken | None
    ) -> list[HybridCost]:
        """Costs of B batches.

        Args:
            rows: `[B, K]` of each task.
            labels: `[B]`.
            attention: `[B, 2, S]` seconds in a layer of each stage.
            parts: `[B]` micro-batches like it on a pipeline.
            taken: What they keep and take; None: not asked for.
        """
        total = rows.sum(axis=1)
        nothing = len(ORDER) * self.shape.layers
        lowest = np.where(rows > 0, self._lowest, nothing).min(axis=1)
        of_ops = self._adapters.of(rows)  # [B, 2, S, ops]
        adapters = of_ops.sum(axis=3)
        if self.recomputes:
            adapters[:, 1] += adapters[:, 0]
        launched = attention + self._cores.launch
        outside = self._frozen.outside(total, labels)
        seconds = self._frozen.seconds(total, labels, launched, lowest, self.recomputes) + adapters + outside
        referred = rows @ self._refers
        if referred.any():
            share = referred / np.maximum(total, 1e-9)
            seconds[:, 0] += self._of_references(referred, labels * share, attention * share[:, None, None])
        messages = np.zeros((len(rows), 2, 0))
        if self._messages.any:
            messages = self._messages.seconds(total, labels, lowest)
            if self.interleaving is None:
                seconds += messages
                messages = messages[:, :, :0]
        once = self._curves["transfer"].many(total + referred)[0]
        transfer = np.repeat(once[:, None], len(self.stages) - 1, axis=1)
        kept, working = (transfer[:, :0],) * 2 if taken is None else (taken.kept, taken.working)
        columns = (*seconds.swapaxes(0, 1), kept, working, transfer, *messages.swapaxes(0, 1))
        listed = zip(parts.astype(int).tolist(), *(map(tuple, col.tolist()) for col in columns), strict=True)
        costs = [
            HybridCost(count, forward, backward, 1, kept, working, sent, (), ahead, back)
            for count, forward, backward, kept, working, sent, ahead, back in listed
        ]
        if self.interleaving is None:
            return costs
        average = launched @ self._depths / self._depths.sum()
        kinds = self._messages.layers(total, average, of_ops.sum(axis=2))
        extended = zip(costs, kinds, outside.tolist(), strict=True)
        return [
            replace(part, overlap=self.interleaving, kinds=layers, outside=both)
            for part, layers, both in extended
        ]

    def _of_references(self, rows: Array, labels: Array, attention: Array) -> Array:
        """`[B, S]` seconds of rows that are computed a second time, forward only; a frozen copy's adapter left out."""
        nothing = np.full(len(rows), len(ORDER) * self.shape.layers)
        layers = self._frozen.seconds(rows, labels, attention + self._cores.launch, nothing, False)
        seconds: Array = layers[:, 0] + self._frozen.outside(rows, labels)[:, 0]
        return seconds * (rows > 0)[:, None]

    # -- besides the passes

    def step_overhead(self, buckets: Sequence[Sequence[int]]) -> float:
        """Seconds of a step of the tasks of these buckets outside its passes: reading, laying out, optimizers, sums of
        gradients over pipelines, the passes that steps begin with.
        """
        tasks = [task for bucket in buckets for task in bucket]
        updates = self._updates[tasks].sum(axis=0)  # [ranks]
        updates += sum(self._once[list(bucket)].max(initial=0.0) for bucket in buckets)
        return (
            self.profile.step_seconds
            + sum(len(self.loads[t].tokens) for t in tasks) * self.profile.sequence_seconds
            + float(updates.max())
            + self._gradients(tasks)
            + sum(self._opening(t) for t in tasks if self.loads[t].opening_passes)
        )

    def _opening(self, task: int) -> float:
        """Seconds of the passes that a step of the task begins with, stage after stage."""
        cost = self.hybrid((task,), 1)
        seconds = sum(cost.forward) + sum(cost.communication_forward)  # which nothing hides
        return self.loads[task].opening_passes * seconds

    def _gradients(self, tasks: Sequence[int]) -> float:
        """Seconds to sum the fp32 gradients of adapters over pipelines: as a transfer of as many bytes, twice."""
        if self.data == 1:
            return 0.0
        values = self._values[list(tasks)].sum(axis=0).max()
        return self._curves["transfer"].at(2 * 4 * values / (self.shape.hidden * self.itemsize))[0]

    def weights(self) -> Weights:
        """What a token, a pair and a label take of all stages, to balance micro-batches by."""
        most = max(64.0, sum(load.total for load in self.loads) / 4)
        token = self._frozen.dense_seconds(most) / most
        long = self._cores.longest
        pair = float((self._cores.of(long, 0) @ self._depths).sum()) / (long * (long + 1) / 2)
        head = self._curves["head"]
        label = (head.forward[-1] + head.backward[-1]) / head.sizes[-1]
        return Weights(token, pair, label)


def _stepped(loads: Sequence[TaskLoad], stages: Sequence[range], method: ParallelConfig) -> Array:
    """`[K, ranks, 3]` values that each rank trains of a task, parameters and groups of them that are stepped as one."""
    seconds = np.array(
        [
            [(load.adapter.values(at, method.tensor), *load.updates(at, method.tensor)) for at in stages]
            for load in loads
        ]
    )
    ranks = method.pipeline
    summed: Array = seconds.reshape(len(loads), len(stages) // ranks, ranks, 3).sum(axis=1)
    return summed


def _lowest(load: TaskLoad, layers: int) -> int:
    """The lowest BaseOp that has an adapter: layer times BaseOps of a layer, and its index.

    All of them: none has. -1: rows of the embedding are trained, which need the gradient of all that is above.
    """
    if load.adapter.embeds:
        return -1
    return min(
        (site.layer * len(ORDER) + ORDER.index(site.op) for site in load.ops),
        default=layers * len(ORDER),
    )
