"""A case for any number of sequences, and the largest that fits, without a trace for each."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from megatron_mux.memory.caching.replay import replay
from megatron_mux.memory.caching.settings import Settings
from megatron_mux.memory.estimate import Prediction, outside, prediction
from megatron_mux.memory.invisible import SMALL_INDEX
from megatron_mux.memory.largest_batch import MAX_SEQUENCES, largest_batch
from megatron_mux.memory.trace.case import Case
from megatron_mux.memory.trace.symbolic import Family, UnlikeError
from megatron_mux.memory.trace.symbolic import family as varied
from megatron_mux.memory.trace.traces import Traces


class Batches:
    """A case by its number of sequences.

    Args:
        case: Its batch is not looked at.
        traces: Answer with streams.
        settings: The allocator's options.
        gpus: On how many GPUs with plain data parallelism.
        weights: Bytes of the model's weights, where they are known: if they alone are too many, nothing fits.
    """

    def __init__(
        self,
        case: Case,
        traces: Traces,
        settings: Settings | None = None,
        gpus: int = 1,
        weights: int | None = None,
    ) -> None:
        self._case = case
        self._traces = traces
        self._settings = settings or Settings()
        self._gpus = gpus
        self._weights = weights
        # Few tokens change how an embedding's gradient is made: such batches are no guide to larger ones.
        self._least = 2 if case.adapter is not None else max(2, SMALL_INDEX // case.length + 1)
        self._known: dict[int, Prediction] = {}

    def prediction(self, batch: int) -> Prediction:
        """What a step takes.

        Raises:
            TraceError, StreamError: A trace failed.
        """
        if batch not in self._known:
            case = replace(self._case, batch=batch)
            family = self._family if batch >= self._least else None
            stream = self._traces.step(case) if family is None else family.at(batch=batch)
            self._known[batch] = prediction(stream, case, self._settings, self._gpus)
        return self._known[batch]

    def fits(self, batch: int, memory: int) -> bool:
        """Whether a step runs on a GPU of so many bytes: the allocator may return what it does not need."""
        settings, stream = self._on(memory), self.prediction(batch).stream
        if max(stream.live()) > (settings.capacity or 0):
            return False
        return replay(stream, settings).out_of_memory is None

    def within(self, batch: int, memory: int) -> Prediction:
        """What a step that fits takes of a GPU of so many bytes.

        Raises:
            TraceError, StreamError: A trace failed.
        """
        found = self.prediction(batch)
        return found if found.process <= memory else replace(found, settings=self._on(memory))

    def _on(self, memory: int) -> Settings:
        """The allocator's options on a GPU of so many bytes."""
        return replace(self._settings, capacity=memory - outside(int(self._gpus > 1)))

    def largest(self, memory: int) -> int:
        """The most sequences that fit; 0 if not even one does."""
        # One sequence is traced for itself: only where it is likely to be all that is needed.
        if self._weights is None:
            if not self.fits(1, memory):
                return 0
        elif self._weights > memory:
            return 0

        def lacks(batch: int) -> int:
            return int(not self.fits(batch, memory))

        if self._family is None:
            return largest_batch(lacks, 0)
        if not self.fits(self._least, memory):
            return largest_batch(lambda batch: 1 if batch >= self._least else lacks(batch), 0)
        high = self._bound(memory) + 1  # does not fit
        step, low = 1, high - 1
        while low > self._least and lacks(low):
            high, low, step = low, low - step, 2 * step
        low = max(low, self._least)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if lacks(middle) else (middle, high)
        return low

    @cached_property
    def _family(self) -> Family | None:
        """The case for any batch; None if it is none."""
        try:
            return varied(replace(self._case, batch=self._least), ("batch",), self._traces.steps, self._least)
        except UnlikeError:
            return None

    def _bound(self, memory: int) -> int:
        """The most sequences of which all that is live at once would fit, if nothing were lost to fragments."""
        capacity = memory - outside(int(self._gpus > 1))
        one, two = (self.prediction(self._least + more).stream.live() for more in (0, 1))
        found = MAX_SEQUENCES
        for few, more in zip(one, two, strict=True):
            if more > few:
                found = min(found, (capacity - few) // (more - few))
        return self._least + found
