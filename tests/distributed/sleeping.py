"""Pipelines of processes that sleep as long as a pass would take: what the simulator predicts, and what they take."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import mean

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.pipeline.action import Action, TimedAction
from megatron_mux.pipeline.bucket import BucketCost
from megatron_mux.pipeline.communicate import Communicator
from megatron_mux.pipeline.execute import execute
from megatron_mux.pipeline.simulate import simulate
from megatron_mux.pipeline.structured import descending, structured
from megatron_mux.pipeline.template import Template, one_f_one_b, with_updates
from megatron_mux.runtime import Parallel

ELEMENTS = 256
"""Of what travels between stages."""


@dataclass(frozen=True)
class Pipeline:
    """A bucket set and its template.

    Attributes:
        name: `structured` or `1F1B`.
        buckets: Their costs, in seconds.
        sizes: Of all steps.
        template: With the ends of steps.
        latency: What the simulator says, in seconds.
    """

    name: str
    buckets: list[BucketCost]
    sizes: list[list[int]]
    template: Template
    latency: float


def random_pipeline(seed: int, stages: int, seconds: float) -> Pipeline:
    """Two to four buckets, unequal stages, F != B, chunks, one to three steps; it should take so many `seconds`.

    A stage has 20 to 60 passes.
    """
    r = Random(seed)
    skew = [r.uniform(0.7, 1.3) for _ in range(stages)]
    buckets = []
    for _ in range(r.randint(2, 4)):
        forward = r.uniform(0.5, 2.0)
        ratio = r.choice([1.0, r.uniform(0.7, 2.0)])
        buckets.append(
            BucketCost(
                micro_batches=4,
                forward=tuple(forward * own for own in skew),
                backward=tuple(forward * ratio * own for own in skew),
                update=(r.uniform(0.0, 0.3),) * stages,
            )
        )
    buckets = [buckets[i] for i in descending(buckets)]
    sizes: list[list[int]] = []
    while not 10 <= sum(map(sum, sizes)) <= 30:
        entries = len(buckets) * r.randint(1, 3)
        sizes = [[r.randint(1, 2) for _ in range(r.randint(1, 4))] for _ in range(entries)]
    name = "1F1B" if seed % 3 == 1 else "structured"
    if name == "1F1B":
        passes = one_f_one_b(stages, sizes, len(buckets))
    else:
        passes = structured(buckets, None, sizes)
    template = with_updates(passes, sizes, len(buckets))
    scale = seconds / simulate(template, buckets, sizes=sizes).latency
    buckets = [_scaled(bucket, scale) for bucket in buckets]
    return Pipeline(name, buckets, sizes, template, simulate(template, buckets, sizes=sizes).latency)


def _scaled(bucket: BucketCost, scale: float) -> BucketCost:
    def times(seconds: Sequence[float]) -> tuple[float, ...]:
        return tuple(scale * own for own in seconds)

    return replace(
        bucket, forward=times(bucket.forward), backward=times(bucket.backward), update=times(bucket.update)
    )


class Sleeping:
    """A stage that sleeps."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.buckets = pipeline.buckets

    def shape(self, action: Action) -> tuple[int, ...]:
        return (ELEMENTS,) if action.is_pass else (1,)

    def needs_gradient(self, action: Action) -> bool:
        return True

    def label(self, action: Action) -> str:
        return str(action)

    def forward(self, action: Action, hidden: Tensor | None) -> Tensor:
        self._sleep(action)
        return torch.zeros(ELEMENTS)

    def backward(self, action: Action, output: Tensor, gradient: Tensor | None) -> None:
        self._sleep(action)

    def norm(self, action: Action, others: Tensor | None) -> Tensor:
        return torch.zeros(1, dtype=torch.float64)

    def update(self, action: Action, whole: Tensor | None) -> Tensor:
        self._sleep(action)
        return torch.zeros(1, dtype=torch.float64)

    def _sleep(self, action: Action) -> None:
        time.sleep(self.buckets[action.bucket % len(self.buckets)].seconds(action))


@dataclass(frozen=True)
class Turn:
    """One execution.

    Attributes:
        seconds: From the moment at which all processes are ready to the last one's end.
        asked: Simulated on what passes are asked to sleep.
        slept: Simulated on what they did sleep, the mean of a bucket's passes of one kind on a stage.
    """

    seconds: float
    asked: float
    slept: float


def turn(pipeline: Pipeline, parallel: Parallel) -> Turn:
    """Execute a pipeline; every rank calls it, and gets the same."""
    communicator = Communicator(parallel)
    done: list[TimedAction] = []
    dist.barrier()
    # One machine, one clock: it begins when the last process is ready, and ends when the last one is done.
    start = time.perf_counter()
    sleeping = Sleeping(pipeline)
    execute(pipeline.template, parallel.pp_rank, sleeping, communicator, torch.float32, done.append)
    began, ended = parallel.most([start, time.perf_counter()])
    return Turn(ended - began, pipeline.latency, _simulated_on(pipeline, done, parallel))


def _simulated_on(pipeline: Pipeline, done: Sequence[TimedAction], parallel: Parallel) -> float:
    taken: dict[tuple[int, str, int], list[float]] = defaultdict(list)
    for timed in done:
        bucket = timed.action.bucket % len(pipeline.buckets)
        taken[bucket, timed.action.kind, timed.action.stage].append(timed.stop - timed.start)
    everyone: list[dict[tuple[int, str, int], float]] = [{} for _ in range(parallel.world_size)]
    dist.all_gather_object(everyone, {key: mean(own) for key, own in taken.items()})
    found = {key: seconds for own in everyone for key, seconds in own.items()}

    def each(bucket: int, kind: str) -> tuple[float, ...]:
        return tuple(found.get((bucket, kind, stage), 0.0) for stage in range(parallel.pp_size))

    buckets = [
        replace(bucket, forward=each(b, "F"), backward=each(b, "B"), update=each(b, "U"))
        for b, bucket in enumerate(pipeline.buckets)
    ]
    return simulate(pipeline.template, buckets, sizes=pipeline.sizes).latency
