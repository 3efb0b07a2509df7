"""Streams of a sequence length that is not traced, calculated from traces of two others.

Events depend on the length only where kernels, masks or sliding windows begin, and every size is a constant, linear or
quadratic (scores, masks). Where a third length does not agree, the length itself is traced. The others are fractions of
a power of two, so that questions about many lengths need few traces.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from megatron_mux.memory.batches import BatchFamily, Steps, UnlikeError, least_batch
from megatron_mux.memory.stream.events import Stream
from megatron_mux.memory.trace.case import Case

_SHORT = 512
"""Up to this length, kernels' rounding to blocks of 128 tokens counts: it is traced itself."""


@dataclass(frozen=True)
class Length:
    """A sequence length, whose steps are calculated from traces of two others.

    Called with cases, as `Steps` are, it gives their streams at this length, whatever the cases' own.

    Attributes:
        low, high: The lengths that are traced, multiples of 128; the length itself if they are equal.
    """

    tokens: int
    trace: Steps
    low: int
    high: int

    @classmethod
    def of(cls, tokens: int, trace: Steps, positions: int | None) -> Length:
        """Choose the lengths to trace."""
        high = 1 << (tokens - 1).bit_length()
        if tokens <= _SHORT or (positions is not None and high > positions):
            return cls(tokens, trace, tokens, tokens)
        return cls(tokens, trace, 5 * high // 8, high)

    def family(self, case: Case) -> BatchFamily:
        """The streams of a case with this length for any number of sequences.

        Raises:
            UnlikeError, WorkerError, StreamError: See `BatchFamily.of`.
        """
        batch = least_batch(replace(case, length=min(self.low, self.tokens)))
        return BatchFamily.of(replace(case, length=self.high, batch=batch), self)

    def __call__(self, cases: Sequence[Case]) -> list[Stream]:
        """The streams of cases with this length.

        Raises:
            WorkerError, StreamError: A trace failed.
        """
        if self.low < self.high:
            with suppress(UnlikeError):
                return self._extended(cases)
        return list(self.trace([replace(case, length=self.tokens) for case in cases]))

    def _extended(self, cases: Sequence[Case]) -> list[Stream]:
        """The same from other lengths.

        Raises:
            UnlikeError: Events depend on the length, or the first case has other sizes at a third length.
        """
        middle = (self.low + 2 * self.high) // 3
        around = [replace(case, length=length) for case in cases for length in (self.low, self.high)]
        *found, check = self.trace([*around, replace(cases[0], length=middle)])
        pairs = list(zip(found[::2], found[1::2], strict=True))
        if self._at(middle, *pairs[0]) != check:
            raise UnlikeError(f"sizes with {middle} tokens do not follow from {self.low} and {self.high}")
        return [self._at(self.tokens, *pair) for pair in pairs]

    def _at(self, tokens: int, low: Stream, high: Stream) -> Stream:
        """The stream of a length.

        Raises:
            UnlikeError: The two have other events, or a size would be no whole number.
        """
        if replace(high, sizes=low.sizes) != low:
            raise UnlikeError("events depend on the length")
        sizes = array("q")
        for few, many in zip(low.sizes, high.sizes, strict=True):
            if few < many and few * self.high**2 == many * self.low**2:
                size, rest = divmod(few * tokens**2, self.low**2)
            else:
                size, rest = divmod((many - few) * (tokens - self.low), self.high - self.low)
                size += few
            if rest:
                raise UnlikeError(f"block {len(sizes)} would have no whole number of bytes")
            sizes.append(size)
        return replace(low, sizes=sizes)
