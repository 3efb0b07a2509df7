"""Predictions of a case for any number of sequences, and the largest that fits, from a few traces."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from megatron_mux.memory.caching.replay import replay
from megatron_mux.memory.caching.settings import Settings
from megatron_mux.memory.estimate import Prediction, prediction, process_overhead
from megatron_mux.memory.largest_batch import MAX_SEQUENCES, largest_batch
from megatron_mux.memory.trace.case import Case
from megatron_mux.memory.trace.symbolic import Family, UnlikeError
from megatron_mux.memory.trace.symbolic import family as varied
from megatron_mux.memory.trace.tracer import Tracer
from megatron_mux.memory.untraced import SMALL_INDEX


class Batches:
    """Predictions of a case by its number of sequences.

    Args:
        case: Case to trace; its batch is ignored.
        tracer: Source of streams.
        settings: Allocator options.
        gpus: Number of data-parallel GPUs.
        weights: Bytes of the model's weights if known; nothing fits if they alone do not.
    """

    def __init__(
        self,
        case: Case,
        tracer: Tracer,
        settings: Settings | None = None,
        gpus: int = 1,
        weights: int | None = None,
    ) -> None:
        self._case = case
        self._tracer = tracer
        self._settings = settings or Settings()
        self._gpus = gpus
        self._weights = weights
        # Few tokens change how an embedding's gradient is made: such batches are no guide to larger ones.
        self._least = 2 if case.adapter is not None else max(2, SMALL_INDEX // case.length + 1)
        self._known: dict[int, Prediction] = {}

    def prediction(self, batch: int) -> Prediction:
        """Predict a step's memory.

        Raises:
            WorkerError, StreamError: A trace failed.
        """
        if batch not in self._known:
            case = replace(self._case, batch=batch)
            family = self._family if batch >= self._least else None
            stream = self._tracer.step(case) if family is None else family.at(batch=batch)
            self._known[batch] = prediction(stream, case, self._settings, self._gpus)
        return self._known[batch]

    def fits(self, batch: int, memory: int) -> bool:
        """Whether a step runs on a GPU of `memory` bytes, where the allocator may release cached blocks."""
        settings, stream = self._on(memory), self.prediction(batch).stream
        if max(stream.live()) > (settings.capacity or 0):
            return False
        return replay(stream, settings).out_of_memory is None

    def within(self, batch: int, memory: int) -> Prediction:
        """Predict a step that fits on a GPU of `memory` bytes.

        Raises:
            WorkerError, StreamError: A trace failed.
        """
        found = self.prediction(batch)
        return found if found.process <= memory else replace(found, settings=self._on(memory))

    def _on(self, memory: int) -> Settings:
        """Allocator options on a GPU of `memory` bytes."""
        return replace(self._settings, capacity=memory - process_overhead(int(self._gpus > 1)))

    def largest(self, memory: int) -> int:
        """The largest batch that fits; 0 if none does."""
        # One sequence is traced for itself: only where it is likely to be all that is needed.
        if self._weights is None:
            if not self.fits(1, memory):
                return 0
        elif self._weights > memory:
            return 0

        def does_not_fit(batch: int) -> int:
            return int(not self.fits(batch, memory))

        if self._family is None:
            return largest_batch(does_not_fit, 0)
        if not self.fits(self._least, memory):
            return largest_batch(lambda batch: 1 if batch >= self._least else does_not_fit(batch), 0)
        high = self._bound(memory) + 1  # does not fit
        step, low = 1, high - 1
        while low > self._least and does_not_fit(low):
            high, low, step = low, low - step, 2 * step
        low = max(low, self._least)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if does_not_fit(middle) else (middle, high)
        return low

    @cached_property
    def _family(self) -> Family | None:
        """The case for any batch; None if streams are no function of it."""
        try:
            return varied(replace(self._case, batch=self._least), ("batch",), self._tracer.steps, self._least)
        except UnlikeError:
            return None

    def _bound(self, memory: int) -> int:
        """Upper bound of the batch, without fragmentation."""
        capacity = memory - process_overhead(int(self._gpus > 1))
        one, two = (self.prediction(self._least + more).stream.live() for more in (0, 1))
        found = MAX_SEQUENCES
        for few, more in zip(one, two, strict=True):
            if more > few:
                found = min(found, (capacity - few) // (more - few))
        return self._least + found
