"""The peak of a step by closed forms: the worst rank's memory, by what it is for.

A step has a few instants at which memory may be at its highest: while the loss is computed; when a stage's last layer
goes backward; when its first one does, with all gradients there; in the optimizer's step. At each of them every part
of the memory is a constant and so many bytes a row of the micro-batch; the peak is the largest sum.

Shapes: T rows (tokens) of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache

from megatron_mux.gpus import Gpu
from megatron_mux.memory.forms import kept, own
from megatron_mux.memory.forms.architecture import Architecture
from megatron_mux.memory.forms.instants import Instant, Line
from megatron_mux.memory.forms.kept import Pass, Recompute, Saved
from megatron_mux.memory.forms.methods import Method, Recipe
from megatron_mux.memory.forms.outside import Outside
from megatron_mux.memory.forms.shards import Stage, stages
from megatron_mux.memory.forms.sites import OPS
from megatron_mux.memory.invisible import MANY_TOKENS, SMALL_INDEX, embedding
from megatron_mux.pipeline.template import most_in_flight, one_f_one_b, plain
from megatron_mux.runtime import GRADIENTS_AT_ONCE

_COMES_AND_GOES = frozenset({"activations", "logits", "workspace", "communication"})
FRAGMENTATION: Mapping[Recompute, float] = {"none": 0.07, "selective": 0.07, "full": 0.26}
"""Of what comes and goes, what the allocator needs in vain: medians of replays of dry-run and traced steps, in the
least memory in which they run (2 to 29% where all is kept, 4 to 88% where layers are computed again, most where there
is little: benchmarks/fragmentation.py). Closed forms do not know better; a replay of the very step does."""
_IN_VAIN: Mapping[Recompute, tuple[float, float]] = {
    "none": (0.02, 0.29),
    "selective": (0.02, 0.29),
    "full": (0.04, 0.88),
}
"""The least and the most of these replays."""
_AHEAD = 2
"""Messages of a neighbour that are received before they are used: as pipeline/communicate.py has it, and how many of
those that were sent it has wait: twice as many as stages, and two."""
ROW_INPUTS = 40
"""Bytes of a row's token, position, label, weight and place among labels."""


class Parts:
    """The memory of a method on its worst rank.

    Args:
        architecture: The model.
        recipe: What is trained and how.
        method: How it is divided.
        device: `cuda`, or `cpu`: where nothing but tensors counts.
        outside: What a process takes besides on a GPU; None: what it does on this one.
        gpu: Which kernels compute.
    """

    def __init__(
        self,
        architecture: Architecture,
        recipe: Recipe,
        method: Method,
        device: str = "cuda",
        outside: Outside | None = None,
        gpu: Gpu = Gpu(),  # noqa: B008  (frozen)
    ) -> None:
        self.architecture, self.recipe, self.method = architecture, recipe, method
        self._run = Pass(recipe.size, recipe.length, recipe.attention, device, gpu, recipe.autocast)
        self._besides = (outside or Outside.of(gpu)) if device == "cuda" else Outside.nothing()
        self._outside = self._besides.total(method, trainer=recipe.by_trainer)
        self._in_vain = FRAGMENTATION[method.recompute] if device == "cuda" else 0.0
        self._known: dict[tuple[int, bool], float] = {}

    @cached_property
    def instants(self) -> list[Instant]:
        """Of all stages."""
        found: list[Instant] = []
        for stage in stages(self.architecture, self.method):
            for instant in self._of_stage(stage):
                in_vain = (
                    line._replace(
                        part="fragmentation",
                        fixed=self._in_vain * line.fixed,
                        per_row=self._in_vain * line.per_row,
                    )
                    for line in instant.lines
                    if line.part in _COMES_AND_GOES
                )
                lasting = Line("workspace", self._besides.blas), Line("communication", self._buckets(stage))
                found.append(replace(instant, lines=(*instant.lines, *in_vain, *lasting)))
        return found

    def worst(self, rows: int) -> Instant:
        """The highest of all, for a micro-batch of so many rows."""
        return max(self.instants, key=lambda instant: instant.bytes(rows))

    def peak(self, rows: int) -> int:
        """Bytes of the worst rank, the context included."""
        return sum(self.breakdown(rows).values())

    def interval(self, rows: int) -> tuple[int, int]:
        """The least and the most that `peak` may be, by what is not known of the context, NCCL and fragmentation."""
        found = self.breakdown(rows)
        known = sum(found.values()) - found["fragmentation"] - found["context"]
        moving = found["fragmentation"] / self._in_vain if self._in_vain else 0.0
        ends = []
        for most in (False, True):
            outside = self._besides.total(self.method, most, self.recipe.by_trainer)
            share = _IN_VAIN[self.method.recompute][most] if self._in_vain else 0.0
            ends.append(round(known + share * moving + outside))
        return ends[0], ends[1]

    @property
    def host(self) -> int:
        """Bytes of host memory for what a rank keeps there: of the rank that keeps most."""
        if not self.method.offload:
            return 0
        found = stages(self.architecture, self.method)
        return round(max(self._on_host(stage) for stage in found))

    def breakdown(self, rows: int) -> dict[str, int]:
        """The same by part."""
        return self.worst(rows).breakdown(rows)

    def at(self, stage: int, rows: int) -> dict[str, int]:
        """The peak of one stage's ranks, by part."""
        own = [instant for instant in self.instants if instant.stage == stage]
        return max(own, key=lambda instant: instant.bytes(rows)).breakdown(rows)

    # -- what is always there

    def _of_stage(self, stage: Stage) -> Iterator[Instant]:
        standing = [Line("context", self._outside), *self._kept_weights(stage)]
        if self.recipe.frozen:
            standing += self._adapters(stage)
            gradients = [self._adapter_gradients(stage.layers)]
        else:
            standing.append(Line("optimizer", self._states(stage)))
            gradients = self._gradients(stage)
        # Buffers of gradients that outlive a pass: they are summed over micro-batches or over ranks.
        stays = self.method.micro_batches > 1
        if not self.recipe.frozen:
            stays = stays or self.recipe.has_master or (self.method.data > 1 and not self._has_buckets)
        yield from self._passes(stage, standing, gradients if stays else [])
        working = self._working(stage)
        rest = self._stack(stage, self._in_flight(stage) - 1)
        brought = self._brought(stage.two_in_use)
        not_yet = [] if stays else self._embeddings_gradient(stage)
        late = [*gradients, *not_yet, *brought, *rest, *self._one(stage.layers[0]), *working, self._inputs()]
        yield Instant("the first layer's backward pass", stage.index, (*standing, *late))
        if stage.first and not self.recipe.frozen:
            lines = (*standing, *gradients, *rest, *self._embedded(stage))
            yield Instant("the embedding's backward pass", stage.index, lines)
        step = Line("workspace", self._step(stage))
        yield Instant("the optimizer's step", stage.index, (*standing, *gradients, step))

    def _embeddings_gradient(self, stage: Stage) -> list[Line]:
        """What of a backward pass's gradients is not there before it has come to the embedding."""
        if self.recipe.frozen or not stage.first or self._shares_head(stage):
            return []
        return [Line("gradients", -stage.units[0].total * self.recipe.gradient_size)]

    def _embedded(self, stage: Stage) -> Iterator[Line]:
        """What the embedding's gradient takes: that of hidden states, sorted tokens; where the output layer shares its
        weights, their gradient twice more: by itself, and their sum (in one buffer for all gradients, by itself alone).
        """
        a, size = self.architecture, self._run.size
        tokens = MANY_TOKENS
        on_gpu = self._run.device == "cuda"
        scratch = sum(one.size for one in embedding(tokens, a.hidden)) / tokens if on_gpu else 0.0
        weights = (
            -(-a.embedding.divided // self.method.tensor) if self._shares_head(stage) and stage.last else 0
        )
        again = weights * (size if self.recipe.has_master else 2 * self.recipe.gradient_size)
        yield Line("workspace", again, a.hidden * self._run.hidden)
        yield Line("workspace", 0, scratch, few=SMALL_INDEX)

    @property
    def _brings(self) -> bool:
        """Whether weights are brought for use."""
        return self.method.zero == 3 or (self.recipe.frozen and self.method.offload)

    def _kept_weights(self, stage: Stage) -> list[Line]:
        """Weights between uses."""
        if self.recipe.frozen and self.method.offload:
            return []
        values = stage.divided(self.method) if self.method.zero == 3 else stage.values
        return [Line("parameters", values * self.recipe.weight_size)]

    def _brought(self, values: int) -> list[Line]:
        """Weights in use, where they are brought for it."""
        return [Line("communication", values * self.recipe.size)] if self._brings else []

    def _on_host(self, stage: Stage) -> float:
        """Bytes of a frozen backbone's weights; else of the optimizer's states and of gradients to step with."""
        values = self._stepped(stage)
        if self.recipe.frozen:
            return values * self.recipe.size
        return self._all_states(stage) + values * self.recipe.gradient_size

    def _states(self, stage: Stage) -> float:
        return 0.0 if self.method.offload else self._all_states(stage)

    def _all_states(self, stage: Stage) -> float:
        share = self._stepped(stage) / stage.values
        return share * self.recipe.states(stage.values, stage.shapes)

    def _stepped(self, stage: Stage) -> int:
        """Values of a stage that each data-parallel rank steps."""
        return stage.divided(self.method) if self.method.zero else stage.values

    @property
    def _has_buckets(self) -> bool:
        """Whether torch's `DistributedDataParallel` sums gradients over ranks: in buckets, copies of them all."""
        return self.recipe.by_trainer and self.method.data > 1 and not self.method.zero

    def _buckets(self, stage: Stage) -> int:
        return stage.values * self.recipe.gradient_size if self._has_buckets else 0

    def _gradients(self, stage: Stage) -> list[Line]:
        size = self.recipe.gradient_size
        if self.method.zero < 2:
            return [Line("gradients", stage.values * size)]
        # A unit's are whole until they have been summed over ranks.
        return [
            Line("gradients", stage.divided(self.method) * size),
            Line("communication", stage.largest * size),
        ]

    def _step(self, stage: Stage) -> float:
        """What the optimizer's step makes anew."""
        if self.recipe.frozen:
            return own.scratch(self.recipe.adapters, stage.layers, self.method.tensor)
        if self.method.offload:
            return 0.0
        share = self._stepped(stage) / stage.values
        return share * self.recipe.step(stage.values, stage.shapes)

    def _adapters(self, stage: Stage) -> Iterator[Line]:
        """Of all tasks: fp32 values and moments; and the buffer that gradients are summed over ranks in."""
        total = 0.0
        for task in self.recipe.adapters:
            values = task.values(stage.layers, self.method.tensor)
            yield Line("adapters", 4 * (values + task.fixed_values(stage.layers)))
            yield Line("optimizer", 0 if task.optimizer == "sgd" else 8 * values)
            total += values
        if self.method.data * self.method.tensor > 1:
            yield Line("communication", 4 * min(total, GRADIENTS_AT_ONCE))

    def _adapter_gradients(self, layers: range) -> Line:
        """Of all tasks, in fp32."""
        values = sum(task.values(layers, self.method.tensor) for task in self.recipe.adapters)
        return Line("gradients", 4 * values)

    # -- what passes keep

    def _passes(self, stage: Stage, standing: Sequence[Line], gradients: Sequence[Line]) -> Iterator[Instant]:
        """The loss, where it is computed, and the last layer's backward pass."""
        base = (*standing, *gradients, *self._stack(stage, self._in_flight(stage)), self._inputs())
        if stage.last:
            # Of the layers' weights none is in use.
            in_use = self._brought(stage.units[-1].total)
            yield Instant("the loss", stage.index, (*base, *in_use, *self._loss()))
            if self._has_copies and self.method.recompute == "full":
                yield Instant(
                    "the end of the forward pass", stage.index, (*base, *in_use, *self._forward_end())
                )
        lines = (*base, *self._brought(stage.two_in_use), *self._working(stage))
        if stage.last and not self.recipe.frozen and not gradients:
            head = stage.units[-1].total + (stage.units[0].total if self._shares_head(stage) else 0)
            lines += (Line("gradients", head * self.recipe.gradient_size),)
        if self.recipe.frozen and not gradients:
            lines += (self._adapter_gradients(stage.layers[-1:]),)
        yield Instant("the last layer's backward pass", stage.index, lines)

    def _shares_head(self, stage: Stage) -> bool:
        """Whether the output layer is the embedding, on this very stage: another one has a copy."""
        return self.architecture.tied and stage.first

    def _in_flight(self, stage: Stage) -> int:
        """Micro-batches between their forward and backward pass."""
        return _in_flight(stage.count, self.method.micro_batches)[stage.index]

    def _stack(self, stage: Stage, count: int) -> Iterator[Line]:
        """What so many micro-batches keep."""
        trained = [layer for layer in stage.layers if layer >= self._lowest]
        entry = self._bytes([kept.entry(self.architecture, self._run.hidden)])
        if self.method.recompute == "full":
            per_row, fixed = entry * len(trained), 0.0
        else:
            per_row = sum(self._layer(layer) for layer in trained)
            fixed = sum(self._copies(layer) for layer in trained)
        if trained and not stage.last:
            per_row += entry  # what was sent to the next stage
        yield Line("activations", count * fixed, count * per_row)
        if self.recipe.frozen:
            yield Line("activations", 0, entry * self._at_the_ends(stage, count))

    def _at_the_ends(self, stage: Stage, in_flight: int) -> int:
        """Hidden states of a micro-batch that our engine has at the ends of a stage, beside those kept.

        From a neighbour `_AHEAD` are received before they are used, and what was sent to it stays until so many more
        have been, which for outputs in flight it would do anyway. Weights that are brought for use are tied to a
        layer's input, even to the embedded tokens, which need no gradient.
        """
        window = 2 * (stage.count + 1) + _AHEAD
        most = self.method.micro_batches - 1
        before = 0 if stage.first else min(most, window)
        behind = 0 if stage.last else min(most, window - in_flight)
        return before + behind + (stage.first and self._brings and self.method.recompute != "full")

    def _one(self, layer: int) -> Iterator[Line]:
        """What a layer keeps, unless it is computed anew."""
        if self.method.recompute != "full" and layer >= self._lowest:
            yield Line("activations", self._copies(layer), self._layer(layer))

    def _working(self, stage: Stage) -> Iterator[Line]:
        """What a layer's backward pass takes beside what is kept: all that it computes anew, and gradients."""
        last = stage.layers[-1]
        if last < self._lowest:
            return
        transient = kept.workspace(self.architecture, self._run, self.recipe.frozen)
        masks = own.scratch(self.recipe.adapters, stage.layers, self.method.tensor)
        yield Line("workspace", masks, self._bytes(transient))
        if self.method.recompute == "full":
            yield Line("activations", self._copies(last), self._layer(last))
        elif self.method.recompute == "selective":
            yield Line("activations", 0, self._layer(last, selective=False) - self._layer(last))

    @property
    def _lowest(self) -> int:
        """The first layer that needs anything for its backward pass."""
        return self._begins[0]

    @cached_property
    def _begins(self) -> tuple[int, str | None]:
        """The layer and the BaseOp at which gradients begin; None: before all layers."""
        sites = [(site.layer, OPS.index(site.op)) for task in self.recipe.adapters for site in task.sites]
        if not sites:
            return 0, None
        layer, op = min(sites)
        return layer, OPS[op]

    def _layer(self, layer: int, selective: bool | None = None) -> float:
        """Bytes of a row that a layer keeps when it is not computed again."""
        if selective is None:
            selective = self.method.recompute == "selective"
        key = layer if self.recipe.frozen else 0, selective
        if key not in self._known:
            self._known[key] = self._bytes(self._saved(layer, selective))
        return self._known[key]

    def _saved(self, layer: int, selective: bool) -> list[Saved]:
        """What a layer keeps; of adapters' own, what the tasks' portions of the rows make."""
        tasks = self.recipe.adapters
        if not tasks:
            return kept.trained(self.architecture, self._run, selective)
        inputs, whole = own.inputs(tasks, layer), own.whole(tasks, layer, self.architecture, self._run)
        shares = [
            saved._replace(width=saved.width * portion.share)
            for task, portion in zip(tasks, self.recipe.portions, strict=True)
            for saved in own.rows(task, layer, self.architecture, replace(self._run, length=portion.length))
        ]
        lowest, op = self._begins
        first = op if layer == lowest else None
        return [*kept.engine(self.architecture, self._run, inputs, selective, first), *whole, *shares]

    def _copies(self, layer: int) -> float:
        """Bytes of weights of a layer as its products take them: of the adapters' factors; with autocast of all."""
        if self._has_copies:
            unit = self.architecture.layers[layer]
            return self.recipe.size * (unit.divided + unit.experts)
        tasks = self.recipe.adapters
        return sum(own.factors(t, layer, self._run, self.method.tensor) for t in tasks)

    @property
    def _has_copies(self) -> bool:
        """Whether autocast copies weights; those that are gathered from all ranks come in its precision (FSDP)."""
        return self.recipe.autocast and self.method.zero < 3

    def _bytes(self, saved: Sequence[Saved]) -> float:
        return kept.total(saved, self.method.tensor, self.method.sequence_parallel)

    def _inputs(self) -> Line:
        turns = self.architecture.head_dim * self._run.hidden if self.architecture.rotary else 0
        return Line("activations", 0, ROW_INPUTS + turns)

    def _loss(self) -> Iterator[Line]:
        """Logits and what is made of them, and the final norm's."""
        a, size = self.architecture, self._run.size
        vocabulary = -(-a.vocabulary // self.method.tensor)
        hidden = Saved("final", "all", a.hidden, size)
        if self.recipe.frozen:
            per_row, chunk = kept.logits(a, self._run, self.method.tensor)
            yield Line("logits", 0, per_row, chunk)
            yield Line(
                "activations", 0, self._bytes([hidden] * 4)
            )  # the norm's input and output, two gradients
            return
        yield Line("logits", 0, 12 * vocabulary)  # of the log-softmax, its gradient, and the logits' gradient
        between = self._run.hidden
        norm = between + size
        if a.rms_norm:
            norm += between + (4 if between < 4 else 0)  # normalised, and an fp32 copy
        copy = size * (a.head.divided + a.tied * a.embedding.divided) if self._has_copies else 0
        yield Line("activations", copy, a.hidden * norm)

    def _forward_end(self) -> Iterator[Line]:
        """What of the loss is there before it goes backward, and the copies of weights that autocast has until then."""
        logits, norm = self._loss()
        copies = sum(self._copies(layer) for layer in range(len(self.architecture.layers)))
        yield logits._replace(per_row=(8 + self._run.size) * self.architecture.vocabulary)
        output = 4 * self.architecture.hidden  # the norm's, which the model's results hold
        yield norm._replace(fixed=norm.fixed + copies, per_row=norm.per_row + output)


@lru_cache(maxsize=256)
def _in_flight(count: int, micro_batches: int) -> tuple[int, ...]:
    """`[S]` the most micro-batches of each stage of 1F1B between their forward and backward pass."""
    template = one_f_one_b(count, plain([micro_batches]))
    return tuple(most_in_flight((actions,)) for actions in template)
