"""The memory of full fine-tuning by closed forms: every parameter is trained, by the code of `transformers`.

A step has a few phases at which memory may be at its highest: while the loss is computed; when a stage's last layer
goes backward; when its first one does, with all gradients there; in the optimizer's step. In each of them every part of
the memory is a constant and so many bytes a row of the micro-batch.

Shapes: T rows (tokens) of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from megatron_mux.memory.forms import trained_layer
from megatron_mux.memory.forms.phases import TRANSIENT, Phase, StepMemory, in_flight
from megatron_mux.memory.forms.saved import Pass, Saved, total
from megatron_mux.memory.forms.stages import Stage, stages
from megatron_mux.memory.invisible import MANY_TOKENS, SMALL_INDEX, embedding

_ROW_INPUTS = 40
"""Bytes of a row's token, position, label, weight and place among labels."""

_in_flight = lru_cache(maxsize=256)(in_flight)


class Term(NamedTuple):
    """A part's bytes in a phase: `fixed + per_row * T`, the second only for more than `few` rows."""

    part: str
    fixed: float
    per_row: float = 0.0
    few: int = 0

    def bytes(self, rows: float) -> float:
        """For so many rows."""
        return self.fixed + self.per_row * rows * (rows > self.few)


@dataclass(frozen=True)
class _PhaseForm:
    """A phase for any number of rows; a part may have several terms."""

    name: str
    stage: int
    terms: tuple[Term, ...]

    def bytes(self, rows: float) -> float:
        """Bytes of all parts."""
        fixed, per_row, others = self._sums
        return fixed + per_row * rows + sum(term.bytes(rows) for term in others)

    @cached_property
    def _sums(self) -> tuple[float, float, list[Term]]:
        """The terms as one, and those that begin at some row: a batch is searched for by many questions."""
        always = [term for term in self.terms if not term.few]
        others = [term for term in self.terms if term.few]
        return sum(term.fixed for term in always), sum(term.per_row for term in always), others

    def of(self, rows: int) -> Phase:
        """For so many rows."""
        found: dict[str, float] = {}
        for term in self.terms:
            found[term.part] = found.get(term.part, 0.0) + term.bytes(rows)
        return Phase(self.name, self.stage, found)


class FullTrainingMemory(StepMemory):
    """See `StepMemory`; the recipe has no adapters."""

    def phases(self, rows: int) -> list[Phase]:
        """See `StepMemory.phases`."""
        return [form.of(rows) for form in self._forms]

    def worst(self, rows: int) -> Phase:
        """See `StepMemory.worst`."""
        return max(self._forms, key=lambda form: form.bytes(rows)).of(rows)

    @property
    def host(self) -> int:
        """See `StepMemory.host`: the optimizer's states, and gradients to step with."""
        if not self.method.offload:
            return 0
        return round(
            max(
                self._all_states(stage) + self._stepped(stage) * self.recipe.gradient_size
                for stage in self._stages
            )
        )

    @cached_property
    def _stages(self) -> list[Stage]:
        return stages(self.architecture, self.method)

    @cached_property
    def _run(self) -> Pass:
        recipe = self.recipe
        return Pass(recipe.size, recipe.length, recipe.attention, self.device, self.gpu, recipe.autocast)

    @cached_property
    def _forms(self) -> list[_PhaseForm]:
        found = []
        for stage in self._stages:
            lasting = Term("workspace", self.overhead.blas), Term("communication", self._buckets(stage))
            for form in self._of_stage(stage):
                fragments = (
                    Term(
                        "fragmentation",
                        self.fragmentation * term.fixed,
                        self.fragmentation * term.per_row,
                        term.few,
                    )
                    for term in form.terms
                    if term.part in TRANSIENT
                )
                found.append(_PhaseForm(form.name, form.stage, (*form.terms, *fragments, *lasting)))
        return found

    # -- what lasts

    def _of_stage(self, stage: Stage) -> Iterator[_PhaseForm]:
        lasting = [
            Term("context", self.context),
            self._weights(stage),
            Term("optimizer", 0.0 if self.method.offload else self._all_states(stage)),
        ]
        gradients = self._gradients(stage)
        # Buffers of gradients that outlive a pass: they are summed over micro-batches or over ranks.
        stays = self.method.micro_batches > 1 or self.recipe.has_master
        stays = stays or (self.method.data > 1 and not self._has_buckets)
        yield from self._passes(stage, lasting, gradients if stays else [])
        rest = self._activations(stage, self._in_flight(stage) - 1)
        late = [*gradients, *([] if stays else self._embeddings_gradient(stage))]
        late += [
            *self._brought(stage.two_in_use),
            rest,
            *self._first_layer(),
            *self._backward(),
            self._inputs(),
        ]
        yield _PhaseForm("the first layer's backward pass", stage.index, (*lasting, *late))
        if stage.first:
            terms = (*lasting, *gradients, rest, *self._embedded(stage))
            yield _PhaseForm("the embedding's backward pass", stage.index, terms)
        step = Term("workspace", self._step(stage))
        yield _PhaseForm("the optimizer's step", stage.index, (*lasting, *gradients, step))

    def _embeddings_gradient(self, stage: Stage) -> list[Term]:
        """Gradients that are not there before a backward pass has come to the embedding, as less than none."""
        if not stage.first or self._shares_head(stage):
            return []
        return [Term("gradients", -stage.units[0].total * self.recipe.gradient_size)]

    def _embedded(self, stage: Stage) -> Iterator[Term]:
        """What the embedding's gradient takes: that of hidden states, sorted tokens; where the output layer shares its
        weights, their gradient twice more: by itself, and their sum (in one buffer for all gradients, by itself alone).
        """
        a, size = self.architecture, self._run.size
        tokens = MANY_TOKENS
        on_gpu = self.device == "cuda"
        scratch = sum(one.size for one in embedding(tokens, a.hidden)) / tokens if on_gpu else 0.0
        shared = self._shares_head(stage) and stage.last
        weights = -(-a.embedding.divided // self.method.tensor) if shared else 0
        again = weights * (size if self.recipe.has_master else 2 * self.recipe.gradient_size)
        yield Term("workspace", again, a.hidden * self._run.hidden)
        yield Term("workspace", 0, scratch, few=SMALL_INDEX)

    def _weights(self, stage: Stage) -> Term:
        """Weights between uses."""
        values = stage.divided(self.method) if self.method.zero == 3 else stage.values
        return Term("parameters", values * self.recipe.weight_size)

    def _brought(self, values: int) -> list[Term]:
        """Weights in use, where they are gathered for it."""
        return [Term("communication", values * self.recipe.size)] if self.method.zero == 3 else []

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

    def _gradients(self, stage: Stage) -> list[Term]:
        size = self.recipe.gradient_size
        if self.method.zero < 2:
            return [Term("gradients", stage.values * size)]
        # A unit's are whole until they have been summed over ranks.
        return [
            Term("gradients", stage.divided(self.method) * size),
            Term("communication", stage.largest * size),
        ]

    def _step(self, stage: Stage) -> float:
        """Bytes that the optimizer's step makes anew."""
        if self.method.offload:
            return 0.0
        share = self._stepped(stage) / stage.values
        return share * self.recipe.step(stage.values, stage.shapes)

    # -- what passes keep

    def _passes(
        self, stage: Stage, lasting: Sequence[Term], gradients: Sequence[Term]
    ) -> Iterator[_PhaseForm]:
        """The loss, where it is computed, and the last layer's backward pass."""
        base = (*lasting, *gradients, self._activations(stage, self._in_flight(stage)), self._inputs())
        if stage.last:
            # Of the layers' weights none is in use.
            in_use = self._brought(stage.units[-1].total)
            yield _PhaseForm("the loss", stage.index, (*base, *in_use, *self._loss()))
            if self._has_copies and self.method.recompute == "full":
                terms = (*base, *in_use, *self._forward_end())
                yield _PhaseForm("the end of the forward pass", stage.index, terms)
        terms = (*base, *self._brought(stage.two_in_use), *self._backward())
        if stage.last and not gradients:
            head = stage.units[-1].total + (stage.units[0].total if self._shares_head(stage) else 0)
            terms += (Term("gradients", head * self.recipe.gradient_size),)
        yield _PhaseForm("the last layer's backward pass", stage.index, terms)

    def _shares_head(self, stage: Stage) -> bool:
        """Whether the output layer is the embedding, on this very stage: another one has a copy."""
        return self.architecture.tied and stage.first

    def _in_flight(self, stage: Stage) -> int:
        """Micro-batches between their forward and backward pass."""
        return _in_flight(stage.count, self.method.micro_batches)[stage.index]

    def _activations(self, stage: Stage, count: int) -> Term:
        """What so many micro-batches keep."""
        layers = len(stage.layers)
        layer_input = self._bytes([Saved("input", "rows", self.architecture.hidden, self._run.hidden)])
        if self.method.recompute == "full":
            per_row, fixed = layer_input * layers, 0.0
        else:
            per_row, fixed = self._layer * layers, self._copies * layers
        if not stage.last:
            per_row += layer_input  # what was sent to the next stage
        return Term("activations", count * fixed, count * per_row)

    def _first_layer(self) -> list[Term]:
        """What a layer keeps, unless it is computed anew."""
        if self.method.recompute == "full":
            return []
        return [Term("activations", self._copies, self._layer)]

    def _backward(self) -> Iterator[Term]:
        """What a layer's backward pass takes beside what is kept: all that it computes anew, and gradients."""
        yield Term("workspace", 0, self._bytes(trained_layer.workspace(self.architecture, self._run)))
        if self.method.recompute == "full":
            yield Term("activations", self._copies, self._layer)
        elif self.method.recompute == "selective":
            whole = self._bytes(trained_layer.kept(self.architecture, self._run))
            yield Term("activations", 0, whole - self._layer)

    @cached_property
    def _layer(self) -> float:
        """Bytes of a row that a layer keeps when it is not computed again."""
        selective = self.method.recompute == "selective"
        return self._bytes(trained_layer.kept(self.architecture, self._run, selective))

    @property
    def _copies(self) -> float:
        """Bytes of weights of a layer as its products take them, with autocast."""
        if not self._has_copies:
            return 0.0
        unit = self.architecture.layers[0]
        return self.recipe.size * (unit.divided + unit.experts)

    @property
    def _has_copies(self) -> bool:
        """Whether autocast copies weights; those that are gathered from all ranks come in its precision (FSDP)."""
        return self.recipe.autocast and self.method.zero < 3

    def _bytes(self, saved: Sequence[Saved]) -> float:
        return total(saved, self.method.tensor, self.method.sequence_parallel)

    def _inputs(self) -> Term:
        angles = self.architecture.head_dim * self._run.hidden if self.architecture.rotary else 0
        return Term("activations", 0, _ROW_INPUTS + angles)

    def _loss(self) -> Iterator[Term]:
        """Logits and what is made of them, and the final norm's."""
        a, size = self.architecture, self._run.size
        vocabulary = -(-a.vocabulary // self.method.tensor)
        yield Term("logits", 0, 12 * vocabulary)  # of the log-softmax, its gradient, and the logits' gradient
        between = self._run.hidden
        norm = between + size
        if a.rms_norm:
            norm += between + (4 if between < 4 else 0)  # normalised, and an fp32 copy
        copy = size * (a.head.divided + a.tied * a.embedding.divided) if self._has_copies else 0
        yield Term("activations", copy, a.hidden * norm)

    def _forward_end(self) -> Iterator[Term]:
        """What of the loss is there before it goes backward, and the copies of weights that autocast has until then."""
        logits, norm = self._loss()
        copies = self._copies * len(self.architecture.layers)
        yield logits._replace(per_row=(8 + self._run.size) * self.architecture.vocabulary)
        output = 4 * self.architecture.hidden  # the norm's, which the model's results hold
        yield norm._replace(fixed=norm.fixed + copies, per_row=norm.per_row + output)
