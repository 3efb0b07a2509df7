"""Streams of cases: kept from an earlier run, or traced and kept. Without torch, unless something has to be traced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from megatron_mux.memory.store import Store, versions
from megatron_mux.memory.stream.events import Stream, StreamError
from megatron_mux.memory.trace import depth
from megatron_mux.memory.trace.case import Case
from megatron_mux.memory.trace.process import Tracer

KIND = "traces"


class Traces:
    """Answers with the stream of a case; a context that ends the traced process.

    Args:
        kept: Where streams of few layers are kept.
        tracer: Traces what is not; leaving the context ends it.
    """

    def __init__(self, kept: Store | None = None, tracer: Tracer | None = None) -> None:
        self._kept = kept or Store(KIND)
        self._tracer = tracer or Tracer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._tracer.__exit__(kind, error, where)

    def step(self, case: Case) -> Stream:
        """The stream of a case of any depth.

        Raises:
            TraceError: A trace failed.
            StreamError: Traces of few layers do not line up.
        """
        return depth.step(case, self._few)

    def steps(self, cases: Sequence[Case]) -> list[Stream]:
        """The streams of cases of any depth."""
        for case in cases:  # some are traced while others are extended
            for few in depth.few(case):
                if self._read(few) is None:
                    self._tracer.begin_trace(few)
        return [self.step(case) for case in cases]

    def _few(self, cases: Sequence[Case]) -> list[Stream]:
        """The streams of cases as they are."""
        found = [self._read(case) for case in cases]
        missing = [case for case, stream in zip(cases, found, strict=True) if stream is None]
        traced = iter(self._tracer(missing) if missing else ())
        streams = []
        for case, stream in zip(cases, found, strict=True):
            if stream is None:
                stream = next(traced)
                self._kept.write(_about(case), stream.to_json())
            streams.append(stream)
        return streams

    def _read(self, case: Case) -> Stream | None:
        text = self._kept.read(_about(case))
        try:
            return None if text is None else Stream.from_json(text)
        except StreamError:  # whole, but of another format
            return None


def _about(case: Case) -> Mapping[str, Any]:
    """All that a stream depends on."""
    return {"case": case.to_dict(), "versions": versions()}
