"""Streams and predictions of a case for any number of sequences, from a few traces, and the largest batch that fits.

Events do not depend on the number of sequences as long as the same kernels are chosen; every size is a constant and so
many bytes per sequence.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_mux.memory.caching.settings import Settings
from megatron_mux.memory.estimate import Prediction, predict, process_overhead
from megatron_mux.memory.kernel_scratch import MANY_TOKENS, SMALL_INDEX
from megatron_mux.memory.largest_batch import MAX_SEQUENCES, largest_batch
from megatron_mux.memory.stream.events import Stream, StreamError
from megatron_mux.memory.stream.insertion import buckets
from megatron_mux.memory.trace.case import Case
from megatron_mux.memory.trace.tracer import Tracer

_APART = 256
"""Difference of the traced numbers of sequences."""

Steps = Callable[[Sequence[Case]], Sequence[Stream]]
"""Traces steps of any depth, `Tracer.steps` for instance."""


class UnlikeError(StreamError):
    """Sizes are no linear function of the number of sequences, or events depend on it."""


@dataclass(frozen=True)
class BatchFamily:
    """The streams of a case for any number of sequences.

    Attributes:
        batches: The two numbers of sequences that were traced.
    """

    batches: tuple[int, int]
    streams: tuple[Stream, Stream]

    @classmethod
    def of(cls, case: Case, trace: Steps) -> BatchFamily:
        """Trace a case with two numbers of sequences, and with a third one for comparison.

        Args:
            case: Its batch is the smaller number. One sequence is a case of its own: a dimension of one element is
                contiguous with its neighbours, which saves copies.

        Raises:
            UnlikeError: The streams are not alike, or sizes are not linear.
            WorkerError, StreamError: A trace failed.
        """
        few = case.batch
        # Beyond `MANY_TOKENS`, further kernels take a few MiB.
        many = max(few + 3, min(few + _APART, MANY_TOKENS // case.length))
        between = few + max(1, (many - few) // 3)
        small, large, check = trace([replace(case, batch=batch) for batch in (few, many, between)])
        for stream in (large, check):
            if replace(stream, sizes=small.sizes) != small:
                raise UnlikeError("events depend on the batch")
        found = cls((few, many), (small, large))
        sizes = found.at(between).sizes
        if sizes != check.sizes:
            block = next(i for i, size in enumerate(sizes) if size != check.sizes[i])
            raise UnlikeError(
                f"block {block} has {check.sizes[block]} bytes with {between} sequences, not {sizes[block]}"
            )
        return found

    def at(self, batch: int) -> Stream:
        """The stream for a number of sequences.

        Raises:
            UnlikeError: A size would be negative or no whole number.
        """
        (few, many), (small, large) = self.batches, self.streams
        span, sizes = many - few, array("q")
        for one, other in zip(small.sizes, large.sizes, strict=True):
            size, rest = divmod((other - one) * (batch - few), span)
            size += one
            if rest or size < 0:
                raise UnlikeError(f"block {len(sizes)} would have {size} + {rest} / {span} bytes")
            sizes.append(size)
        return replace(small, sizes=sizes)


def least_batch(case: Case) -> int:
    """The fewest sequences whose step resembles those of larger batches."""
    # Few tokens change how an embedding's gradient is made.
    return 2 if case.adapter is not None else max(2, SMALL_INDEX // case.length + 1)


class Batches:
    """Predictions of a case by its number of sequences.

    Args:
        case: Case to trace; its batch is ignored.
        weights: Bytes of the model's weights; nothing fits if they alone do not.
    """

    def __init__(
        self,
        case: Case,
        tracer: Tracer,
        settings: Settings | None = None,
        gpus: int = 1,
        weights: int = 0,
    ) -> None:
        self._case = case
        self._tracer = tracer
        self._settings = settings or Settings()
        self._gpus = gpus
        self._weights = weights
        self._least = least_batch(case)
        self._known: dict[int, Prediction] = {}

    def prediction(self, batch: int) -> Prediction:
        """Predict a step's memory.

        Raises:
            WorkerError, StreamError: A trace failed.
        """
        if batch not in self._known:
            family = self._family if batch >= self._least else None
            stream = (
                self._tracer.step(replace(self._case, batch=batch)) if family is None else family.at(batch)
            )
            parallel = self._gpus > 1
            blocks = buckets(stream) if parallel else ()
            self._known[batch] = predict(stream, self._case.gpu, self._settings, int(parallel), blocks)
        return self._known[batch]

    def within(self, batch: int, memory: int) -> Prediction:
        """Predict a step that fits on a GPU of `memory` bytes.

        Raises:
            WorkerError, StreamError: A trace failed.
        """
        found = self.prediction(batch)
        return found if found.process <= memory else found.limited(memory)

    def largest(self, memory: int) -> int:
        """The largest batch that fits on a GPU of `memory` bytes; 0 if none does."""
        if self._weights > memory:
            return 0

        def fits(batch: int) -> bool:
            return self.prediction(batch).fits(memory)

        if self._family is None:
            return largest_batch(fits)
        if not fits(self._least):
            return largest_batch(lambda batch: batch < self._least and fits(batch))
        high = self._bound(memory) + 1
        low, step = high - 1, 1
        while low > self._least and not fits(low):
            high, low, step = low, low - step, 2 * step
        return largest_batch(fits, max(low, self._least), high)

    @cached_property
    def _family(self) -> BatchFamily | None:
        """The case for any batch; None if streams are no function of it."""
        try:
            return BatchFamily.of(replace(self._case, batch=self._least), self._tracer.steps)
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
