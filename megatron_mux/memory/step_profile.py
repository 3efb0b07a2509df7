"""What a full fine-tuning step allocates in its forward and backward pass, layer by layer, as functions of the batch.

Read from traced steps of `transformers` with few layers, few sequences and lengths near the one in question, which are
extended to the model's depth, to the length and to any batch. Bytes of every block are a constant and so many per
sequence. A single sequence is traced by itself: its step makes fewer copies.

Shapes: L layers, N samples (events at which memory may be at its highest).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_mux.errors import UserError
from megatron_mux.memory.batches import BatchFamily, Steps
from megatron_mux.memory.lengths import Length
from megatron_mux.memory.question import Question
from megatron_mux.memory.stream.events import CATEGORIES, Category, Moment, Stream, StreamError
from megatron_mux.memory.traced_estimate import NOT_TRACED, check_layers, itemsize
from megatron_mux.memory.worker import WorkerError

Array = npt.NDArray[np.float64]

FORWARD, LOSS, BACKWARD, EMBEDDING = range(4)
"""Sections of a step: the last layer's forward pass, the loss, a layer's backward pass, the embedding's."""
_PASSES = ("forward", "backward")
_TRANSIENT = (Category.ACTIVATIONS, Category.LOGITS, Category.WORKSPACE)
ACTIVATIONS, LOGITS, WORKSPACE = range(3)
"""Columns of `Samples.bytes`."""


@dataclass(frozen=True)
class Samples:
    """Events at which memory may be at its highest.

    Attributes:
        section: `[N]` section of the step.
        layer: `[N]` layer whose pass it is; L outside layers before the backward pass, 0 after it.
        bytes: `[N, 3, 2]` activations, logits and workspace beside what the layers below keep: constant, per sequence.
        gradients: `[N]` share of all bytes of gradients that exist.
        new_gradient: `[N]` bytes of the gradient that is just allocated.
    """

    section: npt.NDArray[np.int64]
    layer: npt.NDArray[np.int64]
    bytes: Array
    gradients: Array
    new_gradient: Array

    def __getitem__(self, chosen: Any) -> Samples:
        return Samples(
            self.section[chosen],
            self.layer[chosen],
            self.bytes[chosen],
            self.gradients[chosen],
            self.new_gradient[chosen],
        )


@dataclass(frozen=True)
class StepProfile:
    """A forward and a backward pass without weights, gradients and optimizer states.

    Attributes:
        kept: `[L, 2]` bytes that each layer keeps from its forward to its backward pass: constant, per sequence.
        scores: `[L, 2]` those of `kept` that are attention scores.
        buffers: Bytes that the model loads besides its weights.
        samples: The events that may be the peak.
    """

    length: int
    kept: Array
    scores: Array
    buffers: int
    samples: Samples


Profiles = Callable[[bool, bool], StepProfile]
"""The profile of a step, by whether all layers are recomputed, and whether there is one sequence alone."""


class StepProfiles:
    """The profiles of one model and sequence length, each traced once: with layers recomputed or not, of a single
    sequence or of several.

    Args:
        question: The model, the length and how it is trained.
        autocast: Whether weights are fp32 and autocast computes; else weights are in the precision.
        steps: Traces steps; None for those that are cached, and for the question's tracer.
    """

    def __init__(self, question: Question, autocast: bool, steps: Steps | None = None) -> None:
        self._question = question
        options = replace(
            question.options,
            master_weights=autocast,
            optimizer="sgd",
            adapter=None,
            clip=None,
            accumulate=False,
        )
        skeleton = question.skeleton
        case = options.case(skeleton.raw, skeleton.tensors, question.length)
        self._case = replace(case, steps=1)
        self._length = Length.of(question.length, steps or question.tracer.steps, skeleton.tensors.positions)
        self._family = cache(self._trace_family)
        self._profile = cache(self._read)

    def __call__(self, recompute: bool, single: bool) -> StepProfile:
        """The profile of a step.

        Raises:
            UserError: The model's step cannot be traced, or is no linear function of the batch.
        """
        return self._profile(recompute, single)

    def _trace_family(self, recompute: bool) -> BatchFamily:
        return self._length.family(replace(self._case, recompute=recompute))

    def _read(self, recompute: bool, single: bool) -> StepProfile:
        case = replace(self._case, recompute=recompute)
        tensors = self._question.skeleton.tensors
        try:
            family = self._family(recompute)
            stream, sizes = family.streams[0], _sizes(family)
            if single:
                fixed = {block for block, size in zip(_blocks(stream), sizes, strict=True) if not size[1]}
                (stream,) = self._length([replace(case, batch=1)])
                sizes = np.array(
                    [(s, 0) if (m, s) in fixed else (0, s) for m, s in _blocks(stream)], np.float64
                )
            buffers = check_layers(stream, itemsize(case) * tensors.total)
            # Heads' own tensors have as many bytes as so many scores where sequences are short.
            tells = case.length > 4 * tensors.hidden // tensors.heads
            scores = tensors.heads * case.length**2 if tells else None
            return _Reader(stream, sizes, case.layers).profile(case.length, scores, buffers)
        except (WorkerError, StreamError) as error:
            said = f"ours: {tensors.model_type}: {NOT_TRACED}: {error}"
            raise UserError(said) from None


def _sizes(family: BatchFamily) -> Array:
    """`[K, 2]` bytes of a family's blocks: constant, per sequence."""
    few, many = (np.array(stream.sizes, np.float64) for stream in family.streams)
    each = (many - few) / (family.batches[1] - family.batches[0])
    return np.stack([few - each * family.batches[0], each], axis=1)


def _blocks(stream: Stream) -> Iterator[tuple[Moment, int]]:
    """When each block is allocated, and its bytes: what tells blocks that do not depend on the number of sequences."""
    names = stream.moment_names
    moments = (names[at] for code, at in zip(stream.codes, stream.moments, strict=True) if code >= 0)
    return zip(moments, stream.sizes, strict=True)


class _Reader:
    """A step's events as columns.

    Shapes: E events, K blocks.

    Args:
        sizes: `[K, 2]` bytes of its blocks: constant, per sequence.
    """

    def __init__(self, stream: Stream, sizes: Array, layers: int) -> None:
        self._layers, self._size = layers, sizes
        codes = np.array(stream.codes, np.int64)
        self._allocates = codes >= 0
        self._block = np.where(self._allocates, codes, ~codes)
        moments = np.array(stream.moments, np.int64)
        names = stream.moment_names
        self._phase = np.array([name.phase for name in names])[moments]
        self._layer = np.array([-1 if name.layer is None else name.layer for name in names])[moments]
        self._category = np.array(stream.categories, np.int64)
        self._within = np.isin(self._phase, _PASSES)

    def profile(self, length: int, scores: int | None, buffers: int) -> StepProfile:
        """The profile of these events.

        Args:
            scores: Number of attention scores of a sequence, if no other kept tensor's bytes are a multiple of it.

        Raises:
            StreamError: Layers do not follow one another.
        """
        backward = np.flatnonzero((self._phase == "backward") & (self._layer == self._layers - 1))
        if not len(backward):
            raise StreamError("no backward pass through the last layer")
        begin = int(backward[0])
        kept = self._kept(begin)
        lower = np.concatenate([np.zeros((1, 2)), np.cumsum(kept, axis=0)])  # [L + 1, 2] of all layers below
        at = self._places()
        live = np.stack([self._live(category) for category in _TRANSIENT], axis=1)  # [E, 3, 2]
        live[:, ACTIVATIONS] += self._live(Category.OTHER) - lower[at]
        gradients = self._live(Category.GRADIENTS)[:, 0]
        new = np.where(
            self._allocates & (self._category[self._block] == CATEGORIES.index(Category.GRADIENTS)),
            self._size[self._block, 0],
            0.0,
        )
        samples = Samples(
            self._sections(at), at, live, gradients / max(1.0, gradients[self._within].max()), new
        )
        samples = samples[self._within & (samples.section >= 0)]
        of_scores = np.zeros_like(kept) if scores is None else self._kept(begin, scores)
        return StepProfile(length, kept, of_scores, buffers, _highest(samples))

    def _live(self, category: Category) -> Array:
        """`[E, 2]` bytes of a category after each event."""
        own = self._category[self._block] == CATEGORIES.index(category)
        signed = np.where(self._allocates, 1.0, -1.0) * own
        found: Array = np.cumsum(self._size[self._block] * signed[:, None], axis=0)
        return found

    def _kept(self, begin: int, multiple: int = 0) -> Array:
        """`[L, 2]` bytes of each layer's forward pass that are live at an event.

        Args:
            multiple: Count only blocks whose bytes per sequence are a multiple of it.
        """
        alive = np.zeros(len(self._size), bool)
        alive[self._block[:begin][self._allocates[:begin]]] = True
        alive[self._block[:begin][~self._allocates[:begin]]] = False
        made = np.flatnonzero(self._allocates & (self._phase == "forward") & (self._layer >= 0))
        made = made[alive[self._block[made]]]
        if multiple:
            each = self._size[self._block[made], 1]
            made = made[(each > 0) & (each % multiple == 0)]
        found = np.zeros((self._layers, 2))
        np.add.at(found, self._layer[made], self._size[self._block[made]])
        return found

    def _places(self) -> npt.NDArray[np.int64]:
        """`[E]` the layer of each event: L outside layers behind the forward pass, 0 elsewhere outside."""
        forward = np.maximum.accumulate(np.where(self._phase == "forward", self._layer, -1))
        backward = np.maximum.accumulate((self._phase == "backward") & (self._layer >= 0))
        outside = np.where((forward >= 0) & ~backward, self._layers, 0)
        found: npt.NDArray[np.int64] = np.where(self._layer >= 0, self._layer, outside)
        return found

    def _sections(self, at: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """`[E]` the section of each event; -1 of those that cannot be the peak."""
        inside, backward = self._layer >= 0, self._phase == "backward"
        found = np.full(len(at), -1)
        found[(self._phase == "forward") & (self._layer == self._layers - 1)] = FORWARD
        found[~inside & (at == self._layers)] = LOSS
        found[inside & backward] = BACKWARD
        found[~inside & backward & (at == 0)] = EMBEDDING
        return found


def _highest(samples: Samples) -> Samples:
    """Of each layer's section the samples that no other exceeds in every respect."""
    key = samples.section * (samples.layer.max() + 1) + samples.layer
    totals = np.concatenate(
        [samples.bytes.sum(axis=1), samples.gradients[:, None], samples.new_gradient[:, None]], axis=1
    )
    chosen = [index for one in np.unique(key) for index in _undominated(np.flatnonzero(key == one), totals)]
    return samples[np.array(chosen)]


def _undominated(indices: npt.NDArray[np.int64], totals: Array) -> Iterator[int]:
    """Those of some rows that are not below another one in all columns."""
    order = indices[np.lexsort(totals[indices].T[::-1])[::-1]]
    front = np.zeros((0, totals.shape[1]))
    for index in order:
        if not (front >= totals[index]).all(axis=1).any():
            front = np.vstack([front, totals[index]])
            yield int(index)
