"""The sides of a row of `gpu_table.py`, one after the other in one process, each on an emptied allocator."""

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

WARM_UP, TURNS, SIZE, PROFILED = 3, 5, 2, 2
"""Steps before the first turn, turns of so many steps, and steps under the profiler."""
STEPS = WARM_UP + TURNS * SIZE + PROFILED
_SLOW = 1.0
"""Seconds of a step from which on turns are fewer, of one step."""

LONGEST = 150.0
"""Seconds after which a side ends the process: what is kept stays, and a further call goes on with the next row."""

Step = Callable[[int], list[float]]
"""Runs the step of a given number on all tasks and returns their losses."""
Adapters = list[dict[str, Tensor] | None]


class Work:
    """Task specs and records of a row, the same on all sides.

    Attributes:
        examples: Of each task the pairs of each step.
        tokens: Of each step.
    """

    def __init__(self, row: Row, only: Sequence[int] | None = None) -> None:
        self.row = row
        self.config = config_of(row.shape, row.layers)
        self.members = list(range(len(row.mix)) if only is None else only)
        shapes = [row.mix[i] for i in self.members]
        self.specs = [
            mux_side.spec(shape, row.targets, STEPS, i, row.dropout, row.parameters)
            for i, shape in zip(self.members, shapes, strict=True)
        ]
        self.records = [
            Records(random_records(shape, shape.batch * STEPS, self.config.vocab_size, i)).as_dataset()
            for i, shape in zip(self.members, shapes, strict=True)
        ]
        made = zip(self.specs, self.records, strict=True)
        self.examples: list[list[list[Pair]]] = [mux_side.examples(*one, STEPS) for one in made]
        self.tokens = [sum(len(ids) for own in self.examples for ids, _ in own[k]) for k in range(STEPS)]

    def step(self, number: int) -> list[list[Pair]]:
        """The pairs of each task in one step."""
        return [own[number] for own in self.examples]


class Meter:
    """Times steps of one side, and records what runs on the GPU meanwhile.

    Args:
        work: The row's.
        device: Where the side computes.
        step: Runs one of its steps.
    """

    def __init__(self, work: Work, device: torch.device, step: Step) -> None:
        self._work, self._device, self._step = work, device, step
        self.next = 0

    def run(self, count: int) -> tuple[float, int, list[list[float]]]:
        """Run some steps; returns their seconds, tokens and losses."""
        numbers = [(self.next + i) % STEPS for i in range(count)]
        self.next += count
        self._wait()
        start = time.perf_counter()
        losses = [self._step(number) for number in numbers]
        self._wait()
        return time.perf_counter() - start, sum(self._work.tokens[n] for n in numbers), losses

    def full(self, last: float) -> dict[str, Any]:
        """Measure turns, then steps under the profiler.

        Args:
            last: Seconds of the last step.

        Returns:
            `seconds` and `tokens` of turns, `tokens_per_second` (median), and `gpu` (see `profiled`).
        """
        turns, size, profiled = (TURNS, SIZE, PROFILED) if last < _SLOW else (3, 1, 1)
        found = [self.run(size)[:2] for _ in range(turns)]
        rate = statistics.median(tokens / seconds for seconds, tokens in found)
        return {
            "seconds": [seconds for seconds, _ in found],
            "tokens": [tokens for _, tokens in found],
            "steps_in_a_turn": size,
            "tokens_per_second": rate,
            "gpu": self.profiled(profiled, rate),
        }

    def profiled(self, count: int, rate: float) -> dict[str, Any]:
        """Record what runs on the GPU in some steps.

        Args:
            count: Number of steps.
            rate: Tokens per second by the clock, without the profiler.

        Returns:
            Of a step: seconds in which kernels run (`busy`: of the union of their intervals, `sum`), by `kinds` and
            `names`; tokens per second of GPU time; and the share of the clock's time in which the GPU idles.
        """
        if self._device.type != "cuda":
            kinds = operator_profile.profile_by_kind(lambda: self.run(count), self._device)
            return {"kinds": kinds, "steps": count}
        tokens = 0

        def run() -> None:
            nonlocal tokens
            tokens = self.run(count)[1]

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
            "names": operator_profile.by_name(kernels),
        }

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


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
    more = {
        "rival": "padded" if rival == "padded" else "packed",
        "head": row.heads[0],
        "dropout": row.dropout,
        "parameters": row.parameters,
        "liger_experts": rival == "liger-experts",
    }
    return [
        peft_side.PeftTask(
            peft_side.share_weights(model),
            row.mix[i].rank,
            list(row.targets),
            LEARNING_RATE,
            STEPS,
            **more,  # type: ignore[arg-type]
        )
        for i in work.members
    ]


def peft_step(work: Work, tasks: Sequence[peft_side.PeftTask]) -> Step:
    """A step of PEFT: one task after the other, losses read at its end; batches are collated before."""
    batches = [
        [task.collate(pairs) for task, pairs in zip(tasks, work.step(number), strict=True)]
        for number in range(STEPS)
    ]

    def step(number: int) -> list[float]:
        losses = [task.step_on(batch) for task, batch in zip(tasks, batches[number], strict=True)]
        return [float(loss) for loss in torch.stack(losses).tolist()]

    return step


def measure_peft(work: Work, model: nn.Module, rival: str, initial: Adapters) -> dict[str, Any]:
    """Measure PEFT with each head for a moment, then in full with the fastest.

    Args:
        work: The row's.
        model: The backbone.
        rival: `packed`, `liger-experts` or `padded`.
        initial: Is filled with the tasks' initial adapters, in the order of tasks.
    """
    device = next(model.parameters()).device
    tasks = peft_tasks(work, model, rival)
    if not work.row.parameters:  # whose keys differ between versions of peft
        initial[:] = [task.tensors() for task in tasks]
    meter = Meter(work, device, peft_step(work, tasks))
    heads: dict[str, Any] = {}
    offered = [head for head in work.row.heads if head in peft_side.heads_of(device)]
    losses: list[list[float]] = []
    for head in offered:
        for task in tasks:
            task.head = head
        losses = losses or meter.run(WARM_UP)[2]
        meter.run(1)
        seconds, tokens, _ = meter.run(2)
        heads[head] = {"tokens_per_second": tokens / seconds, "gpu": meter.profiled(1, tokens / seconds)}
    fastest = max(heads, key=lambda head: float(heads[head]["tokens_per_second"]))
    for task in tasks:
        task.head = fastest
    last = meter.run(1)[0]
    return {**meter.full(last), "head": fastest, "heads": heads, "losses": losses}


def measure_mux(
    work: Work, model: nn.Module, parallel: Parallel, initial: Adapters, padded: bool = False
) -> dict[str, Any]:
    """Measure our engine, all tasks in one hybrid task; `padded`: with all sequences as long as the longest."""
    row = work.row
    backbone = random_model.backbone_of(model, parallel, next(model.parameters()).dtype, row.quantise)
    specs, records = mux_side.zero_padded(work.specs, work.examples) if padded else (work.specs, work.records)
    planning = None if row.chunk is None else Planning("spatial", 1, chunk=row.chunk)
    engine = mux_side.make_engine(backbone, parallel, specs, records, initial, planning)

    def step(_: int) -> list[float]:
        results = engine.step()
        return [results[spec.name].loss for spec in specs]

    meter = Meter(work, parallel.device, step)
    losses = meter.run(WARM_UP - 1)[2]
    last, _, more = meter.run(1)
    return {**meter.full(last), "losses": losses + more}


def measure_ceiling(work: Work, model: nn.Module, parallel: Parallel) -> dict[str, Any]:
    """Measure the frozen backbone alone on the same packed tokens."""
    backbone = random_model.backbone_of(model, parallel, next(model.parameters()).dtype)
    ceiling = mux_side.Ceiling(backbone, parallel.device)
    meter = Meter(work, parallel.device, lambda number: [ceiling.step(work.step(number))])
    meter.run(WARM_UP - 1)
    return meter.full(meter.run(1)[0])


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
    task.head = peft_side.heads_of(task.device)[-1]
    for number in range(WARM_UP):
        task.step(work.examples[0][number])


def _many(work: Work, model: nn.Module, parallel: Parallel, count: int) -> None:
    backbone = random_model.backbone_of(model, parallel, next(model.parameters()).dtype)
    chosen = [k % len(work.specs) for k in range(count)]
    specs = [work.specs[i].model_copy(update={"name": f"task-{k}"}) for k, i in enumerate(chosen)]
    records = [work.records[i] for i in chosen]
    engine = mux_side.make_engine(backbone, parallel, specs, records, [None] * count)
    for _ in range(WARM_UP):
        engine.step()
