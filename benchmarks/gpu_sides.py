"""The sides of a row of `gpu_table.py`, one after the other in one process, each on an emptied allocator.

A turn is what a user's run does again and again: the training loop takes bursts of 4 to 16 steps, which roll into each
other, and reads results after each burst. Here a turn is one burst, of as many steps as makes ours last about a second
(the loop's last up to ten), and waits for the GPU at its end. The rivals' turns have as many steps, launched one after
the other without waiting, and their losses are read at the end, too. So no side waits for its host where it need not.
"""

from __future__ import annotations

import faulthandler
import gc
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mux_side
import operator_profile
import peft_side
import random_model
import torch
from gpu_rows import Row
from torch import Tensor, nn
from workload import LEARNING_RATE, Pair, config_of, random_records

from megatron_mux.engine import Planning
from megatron_mux.runtime import Parallel
from tests.reference.records import Records

WARM_UP, TURNS = 6, 3
"""Steps before the first turn, and turns, each of as many steps as the row's `burst`."""
_SLOW = 0.5
"""Seconds of a step from which on two steps are enough to warm up, and two turns to measure."""
PROFILED_BURSTS = 2
"""Bursts of our engine under the profiler; one if its steps are slow. PEFT has many more kernels: one step."""
_OF_MEMORY = 3
"""Steps of which the peak of memory is taken."""
_TRIED = 2
"""Steps of PEFT with each head before the fastest is measured."""

LONGEST = 90.0
"""Seconds after which a side ends the process: what is kept stays, and a further call goes on with the next row."""

Burst = Callable[[Sequence[int]], list[list[float]]]
"""Runs the steps of given numbers on all tasks, one after the other; then reads their losses, of each step and task."""
Adapters = list[dict[str, Tensor] | None]


class Work:
    """Task specs and records of a row, the same on all sides.

    Attributes:
        steps: Number of steps that there are records for.
        examples: Of each task the pairs of each step.
        tokens: Of each step.
    """

    def __init__(self, row: Row, only: Sequence[int] | None = None) -> None:
        self.row = row
        self.config = config_of(row.shape, row.layers)
        self.steps = WARM_UP + (TURNS + PROFILED_BURSTS) * row.burst
        self.members = list(range(len(row.mix)) if only is None else only)
        shapes = [row.mix[i] for i in self.members]
        self.specs = [
            mux_side.spec(shape, row.targets, self.steps, i, row.dropout, row.parameters)
            for i, shape in zip(self.members, shapes, strict=True)
        ]
        self.records = [
            Records(random_records(shape, shape.batch * self.steps, self.config.vocab_size, i)).as_dataset()
            for i, shape in zip(self.members, shapes, strict=True)
        ]
        made = zip(self.specs, self.records, strict=True)
        self.examples: list[list[list[Pair]]] = [mux_side.examples(*one, self.steps) for one in made]
        self.tokens = [sum(len(ids) for own in self.examples for ids, _ in own[k]) for k in range(self.steps)]

    def step(self, number: int) -> list[list[Pair]]:
        """The pairs of each task in one step."""
        return [own[number] for own in self.examples]


class Meter:
    """Times steps of one side, and records what runs on the GPU meanwhile.

    Args:
        work: The row's.
        device: Where the side computes.
        burst: Runs steps of the side.
    """

    def __init__(self, work: Work, device: torch.device, burst: Burst) -> None:
        self.work, self.device, self._burst = work, device, burst
        self._next = 0

    def run(self, count: int) -> tuple[float, int, list[list[float]]]:
        """Run a burst of steps; returns its seconds, tokens and losses."""
        numbers = [(self._next + i) % self.work.steps for i in range(count)]
        self._next += count
        self._wait()
        start = time.perf_counter()
        losses = self._burst(numbers)
        self._wait()
        return time.perf_counter() - start, sum(self.work.tokens[n] for n in numbers), losses

    def warm_up(self) -> tuple[float, list[list[float]]]:
        """Run the first steps; returns seconds of a step, and the first losses."""
        losses = self.run(1)[2]
        seconds = self.run(1)[0]
        if seconds < _SLOW:
            left = WARM_UP - 2
            seconds = self.run(left)[0] / left
        return seconds, losses

    def turns(self, seconds: float) -> dict[str, Any]:
        """Measure turns.

        Args:
            seconds: Of a step.

        Returns:
            `seconds` and `tokens` of each turn, its number of steps, and `tokens_per_second` (median).
        """
        found = [self.run(self.work.row.burst)[:2] for _ in range(TURNS if seconds < _SLOW else 2)]
        return {
            "seconds": [seconds for seconds, _ in found],
            "tokens": [tokens for _, tokens in found],
            "steps_in_a_turn": self.work.row.burst,
            "tokens_per_second": statistics.median(tokens / seconds for seconds, tokens in found),
        }

    def profiled(self, sizes: Sequence[int], rate: float) -> dict[str, Any]:
        """Record what runs on the GPU in some bursts.

        Args:
            sizes: Steps of each burst.
            rate: Tokens per second by the clock, without the profiler.

        Returns:
            Of a step: seconds in which kernels run (`busy`: of the union of their intervals, `sum`), and by `kinds`;
            tokens per second of GPU time; and the share of the clock's time in which the GPU idles.
        """
        count, tokens = sum(sizes), 0

        def run() -> None:
            nonlocal tokens
            tokens = sum(self.run(size)[1] for size in sizes)

        if self.device.type != "cuda":
            return {"steps": count}
        kernels = operator_profile.record_kernels(run)
        if not kernels:  # the profiler does not work here
            return {"steps": count}
        busy = operator_profile.busy_seconds(kernels)
        return {
            "steps": count,
            "tokens": tokens,
            "busy": busy / count,
            "sum": sum(kernel.duration for kernel in kernels) / 1e9 / count,
            "tokens_per_second": tokens / busy,
            "idle": 1 - busy / (tokens / rate),
            "kinds": operator_profile.kernels_by_kind(kernels),
        }

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def empty_allocator(device: torch.device) -> None:
    """Return the memory of the last side to the GPU."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def attempt(measure: Callable[[], dict[str, Any]], device: torch.device) -> dict[str, Any]:
    """Measure a side on an emptied allocator; if it fails, the result says why, and the next side goes on."""
    empty_allocator(device)
    start = time.monotonic()
    faulthandler.dump_traceback_later(LONGEST, exit=True)  # one that hangs must not take the sitting with it
    try:
        found = measure()
    except Exception:  # whatever fails on one side must not cost the sitting the others
        found = {"failed": traceback.format_exc()[-3000:]}
    finally:
        faulthandler.cancel_dump_traceback_later()
    if device.type == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    return {**found, "took": time.monotonic() - start}


def peft_tasks(work: Work, model: nn.Module, rival: str) -> list[peft_side.PeftTask]:
    """Set up each task of a row as a model of PEFT that shares the backbone's weights."""
    row, device = work.row, next(model.parameters()).device
    model.set_attn_implementation(  # type: ignore[operator]
        peft_side.attention_of(rival, next(model.parameters()).dtype, device)
    )
    more: dict[str, Any] = {"rival": rival, "dropout": row.dropout, "parameters": row.parameters}
    return [
        peft_side.PeftTask(
            peft_side.share_weights(model),
            row.mix[i].rank,
            list(row.targets),
            LEARNING_RATE,
            work.steps,
            **more,
        )
        for i in work.members
    ]


def peft_burst(work: Work, tasks: Sequence[peft_side.PeftTask]) -> Burst:
    """Steps of PEFT: in each, one task after the other; batches are collated before."""
    batches = [
        [task.collate(pairs) for task, pairs in zip(tasks, work.step(number), strict=True)]
        for number in range(work.steps)
    ]

    def burst(numbers: Sequence[int]) -> list[list[float]]:
        losses = [
            torch.stack([task.step_on(batch) for task, batch in zip(tasks, batches[number], strict=True)])
            for number in numbers
        ]
        return _read(losses)

    return burst


def _read(losses: Sequence[Tensor]) -> list[list[float]]:
    """Losses of each step, each `[tasks]` on the device, as numbers."""
    return [[float(loss) for loss in own] for own in torch.stack(list(losses)).tolist()]


def measure_peft(work: Work, model: nn.Module, rival: str, initial: Adapters) -> dict[str, Any]:
    """Measure PEFT with each head for a moment, then in full with the fastest.

    Args:
        work: The row's.
        model: The backbone.
        rival: `packed` or `padded`.
        initial: Is filled with the tasks' initial adapters, in the order of tasks.
    """
    device = next(model.parameters()).device
    tasks = peft_tasks(work, model, rival)
    if not work.row.parameters:  # whose keys differ between versions of peft
        initial[:] = [task.tensors() for task in tasks]
    meter = Meter(work, device, peft_burst(work, tasks))
    seconds, losses = meter.warm_up()
    heads: dict[str, Any] = {}
    for head in peft_side.HEADS:
        for task in tasks:
            task.head = head
        meter.run(1)
        taken, tokens, _ = meter.run(_TRIED)
        heads[head] = {"tokens_per_second": tokens / taken, "gpu": meter.profiled([1], tokens / taken)}
    fastest = max(heads, key=lambda head: float(heads[head]["tokens_per_second"]))
    for task in tasks:
        task.head = fastest
    found = meter.turns(seconds)
    gpu = dict(heads[fastest]["gpu"])
    if "busy" in gpu:
        gpu["idle"] = 1 - found["tokens_per_second"] / gpu["tokens_per_second"]
    return {**found, "gpu": gpu, "head": fastest, "heads": heads, "losses": losses}


def measure_mux(work: Work, model: nn.Module, parallel: Parallel, initial: Adapters) -> dict[str, Any]:
    """Measure our engine, all tasks in one hybrid task."""
    row = work.row
    backbone = random_model.backbone_of(model, parallel, next(model.parameters()).dtype, row.quantise)
    planning = None if row.chunk is None else Planning("spatial", 1, chunk=row.chunk)
    engine = mux_side.make_engine(backbone, parallel, work.specs, work.records, initial, planning)

    def burst(numbers: Sequence[int]) -> list[list[float]]:
        results: list[list[float]] = []
        while len(results) < len(numbers):
            found = engine.steps(len(numbers) - len(results), next_steps=row.burst)
            results += [[one[spec.name].loss for spec in work.specs] for one in found]
        return results

    meter = Meter(work, parallel.device, burst)
    seconds, losses = meter.warm_up()
    found = meter.turns(seconds)
    bursts = [row.burst] * (PROFILED_BURSTS if seconds < _SLOW else 1)
    gpu = meter.profiled(bursts, found["tokens_per_second"])
    engine.close()
    return {**found, "gpu": gpu, "losses": losses}


def measure_memory(work: Work, model: nn.Module, parallel: Parallel) -> dict[str, Any]:
    """Measure the peak of many tasks together, and those of processes of PEFT with one task each.

    Returns:
        Bytes: `together`, and `apart` (by task of the mix, the weights included).
    """
    device, count = parallel.device, work.row.memory
    weights = sum(own.numel() * own.element_size() for own in model.parameters())
    apart = {}
    for i in {task.max_length: k for k, task in enumerate(work.row.mix)}.values():
        one = Work(work.row, [i])
        apart[str(i)] = weights + _peak(device, partial(_one_of_peft, one, model))
    kinds = {task.max_length: k for k, task in enumerate(work.row.mix)}
    replicas = sum(apart[str(kinds[work.row.mix[k % len(work.row.mix)].max_length])] for k in range(count))
    together = _peak(device, partial(_many, work, model, parallel, count))
    return {"tasks": count, "together": together, "apart": apart, "replicas": replicas}


def _peak(device: torch.device, run: Callable[[], object]) -> int:
    """Peak of allocated bytes while a function runs, beyond what was allocated before; 0 on a CPU."""
    empty_allocator(device)
    if device.type != "cuda":
        run()
        return 0
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device) - before)


def _one_of_peft(work: Work, model: nn.Module) -> None:
    (task,) = peft_tasks(work, model, "packed")
    task.head = "labelled"
    for number in range(_OF_MEMORY):
        task.step(work.examples[0][number])


def _many(work: Work, model: nn.Module, parallel: Parallel, count: int) -> None:
    backbone = random_model.backbone_of(model, parallel, next(model.parameters()).dtype)
    chosen = [k % len(work.specs) for k in range(count)]
    specs = [work.specs[i].model_copy(update={"name": f"task-{k}"}) for k, i in enumerate(chosen)]
    records = [work.records[i] for i in chosen]
    engine = mux_side.make_engine(backbone, parallel, specs, records, [None] * count)
    for _ in range(_OF_MEMORY):
        engine.step()
    engine.close()
