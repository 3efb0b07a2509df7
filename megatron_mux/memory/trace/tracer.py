"""Streams of cases: kept from an earlier run, or traced and kept. Without torch, unless something has to be traced."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path

from megatron_mux.errors import UserError
from megatron_mux.memory.store import Store
from megatron_mux.memory.stream.events import Stream
from megatron_mux.memory.tensors import ModelTensors, Skeleton
from megatron_mux.memory.trace import depth
from megatron_mux.memory.trace.case import Case
from megatron_mux.memory.worker import Worker, WorkerError


class Tracer(Worker):
    """Traces steps and measures models in its process.

    Args:
        kept: Where streams of few layers are kept; None for the user's cache.
    """

    def __init__(self, seconds: float = 120.0, kept: Store | None = None) -> None:
        super().__init__(seconds)
        self._kept = kept or Store("traces")
        self._begun: dict[str, Future[Stream]] = {}

    def begin(self) -> None:
        """Import what tracing needs while the caller goes on."""
        self.start("transformers.modeling_utils")

    def sizes(self, config: Path) -> ModelTensors:
        """The tensors and sizes of a model.

        Raises:
            UserError: It is not the config of a causal language model, or the process failed.
        """
        try:
            return self.submit(_measured, config).result()
        except WorkerError as error:
            raise UserError(f"{config}: its sizes cannot be told: {error}") from None

    def step(self, case: Case) -> Stream:
        """The stream of a case of any depth.

        Raises:
            WorkerError: A trace failed.
            StreamError: Traces of few layers do not line up.
        """
        return depth.step(case, self.traced)

    def steps(self, cases: Sequence[Case]) -> list[Stream]:
        """The streams of cases of any depth; some are traced while others are extended."""
        for case in cases:
            for few in depth.few(case):
                if self._read(few) is None:
                    self._submit(few)
        return [self.step(case) for case in cases]

    def traced(self, cases: Sequence[Case]) -> Iterator[Stream]:
        """The streams of cases as they are; the next are traced while the caller uses one.

        Raises:
            WorkerError: A trace failed.
        """
        found = [self._read(case) for case in cases]
        for case, stream in zip(cases, found, strict=True):
            if stream is None:
                self._submit(case)
        for case, stream in zip(cases, found, strict=True):
            if stream is None:
                try:
                    stream = self._begun.pop(json.dumps(asdict(case))).result()
                except WorkerError:
                    self._begun.clear()  # the others' process may be lost, too
                    raise
                self._kept.write({"case": asdict(case)}, stream.to_json())
            yield stream

    def _submit(self, case: Case) -> None:
        key = json.dumps(asdict(case))
        if key not in self._begun:
            self._begun[key] = self.submit(_traced, case)

    def _read(self, case: Case) -> Stream | None:
        text = self._kept.read({"case": asdict(case)})
        return None if text is None else Stream.from_json(text)


def _traced(case: Case) -> Stream:
    """In the process: the stream of a case."""
    from megatron_mux.memory.trace.training import trace

    return trace(case)


def _measured(config: Path) -> ModelTensors:
    """In the process: a model's sizes."""
    return Skeleton(config).tensors
