"""A rank of `communication_gpus.py`."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from engine_bench import SwitchablePlanning, environment, random_backbone, spec_of
from overlap_sides import in_turn, one_after_another
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from workload import RANK, TaskShape, random_records

from megatron_mux.backbone.communication import GroupExchange, MulticastExchange, make_exchange
from megatron_mux.backbone.exchange import Exchange, PendingResult
from megatron_mux.backbone.model import Backbone
from megatron_mux.backbone.pieces import Message
from megatron_mux.engine import Engine, Task
from megatron_mux.fusion.plan import Plan
from megatron_mux.process_groups import bounded_tensor_group
from megatron_mux.runtime import Parallel, initialize
from tests.reference.records import Records

MESSAGES = 20
"""Messages that are timed one after another."""
PRODUCTS = 20
"""Products that are timed beside messages."""
SLICES = 50
"""Parts of a step of which the JSON has shares."""
LENGTH = 256
"""`max_length` of the tasks."""

Interval = tuple[float, float]


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the sweep and the steps; returns the result on rank 0 and {} on the others."""
    parallel = initialize(arguments.ranks, device="cpu" if arguments.dry else None)
    dtype = torch.float32 if arguments.dry else torch.bfloat16
    path = random_backbone(arguments.backbone_shape, dtype, parallel.rank, arguments.layers)
    backbone = Backbone.load(path, parallel, dtype)
    chosen, line = make_exchange(parallel)
    hidden, ffn = backbone.shape.hidden, backbone.shape.ffn // parallel.tp_size
    products = Products(min(arguments.tokens, 4096), hidden, ffn, dtype, parallel.device)
    sweep = [
        swept(parallel, exchange, products, int(size * 1e6), hidden, dtype) | {"way": way, "ctas": ctas}
        for way, ctas, exchange in exchanges(parallel, arguments.ctas, chosen)
        for size in arguments.megabytes
    ]
    steps = timed_steps(backbone, chosen, arguments.tokens)
    if parallel.rank:
        return {}
    where = {"ranks": parallel.tp_size, "device": parallel.device.type, "line": line}
    return {**environment(backbone, 1), **where, "sweep": sweep, "steps": steps}


def exchanges(
    parallel: Parallel, ctas: Sequence[int], chosen: Exchange
) -> Iterator[tuple[str, int | str, Exchange]]:
    """The ways to compare, with their CTAs. A collective."""
    if parallel.device.type == "cpu":
        yield "gloo", "", chosen
        return
    for count in ctas:
        yield "NCCL", count, GroupExchange(bounded_tensor_group(parallel, count))
    if isinstance(chosen, MulticastExchange):
        yield "NVLink SHARP", 8, chosen


class Products:
    """Products like those of an MLP."""

    def __init__(self, rows: int, hidden: int, ffn: int, dtype: torch.dtype, device: torch.device) -> None:
        self._x = torch.randn(rows, hidden, dtype=dtype, device=device)
        self._weight = torch.randn(hidden, ffn, dtype=dtype, device=device)
        self._out = torch.empty(rows, ffn, dtype=dtype, device=device)

    def compute(self) -> None:
        """All of them."""
        for _ in range(PRODUCTS):
            torch.mm(self._x, self._weight, out=self._out)


def swept(
    parallel: Parallel, exchange: Exchange, products: Products, size: int, hidden: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Messages of one size by themselves, and beside products.

    Args:
        parallel: Where this rank stands.
        exchange: Carries them.
        products: What is computed meanwhile.
        size: Bytes of a message, about.
        hidden, dtype: Of its rows.
    """
    rows = max(1, size // (hidden * dtype.itemsize))
    tensor = torch.zeros(rows, 1, hidden, dtype=dtype, device=parallel.device)

    def issue(count: int) -> list[PendingResult]:
        return [exchange.issue(Message("all_reduce", tensor)) for _ in range(count)]

    def send(count: int) -> None:
        for pending in issue(count):
            pending.wait()

    def seconds(run: Callable[[], None], before: Callable[[], Any] = list) -> float:
        return parallel.most([_seconds(parallel, run, before)])[0]

    send(2)
    products.compute()
    message = seconds(lambda: send(MESSAGES)) / MESSAGES
    alone = seconds(products.compute)
    count = min(
        256, math.ceil(1.5 * alone / message) + 1
    )  # on their way for as long as products are computed
    beside = seconds(products.compute, lambda: issue(count))
    ranks = parallel.tp_size
    return {
        "bytes": tensor.nbytes,
        "message_s": message,
        "bus_bytes_per_s": tensor.nbytes * 2 * (ranks - 1) / ranks / message,
        "product_s": alone / PRODUCTS,
        "product_slowdown": beside / alone - 1,
    }


def _seconds(parallel: Parallel, run: Callable[[], object], before: Callable[[], Any] = list) -> float:
    """Seconds of `run` on the current stream; what `before` began goes on meanwhile, and has ended afterwards."""
    parallel.most([0.0])  # a barrier
    if parallel.device.type == "cpu":
        begun = before()
        start = time.perf_counter()
        run()
        taken = time.perf_counter() - start
        for pending in begun:
            pending.wait()
        return taken
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    begun = before()
    events[0].record()
    run()
    events[1].record()
    for pending in begun:
        pending.wait()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) / 1e3


# -- steps


def timed_steps(backbone: Backbone, exchange: Exchange, tokens: int) -> list[dict[str, Any]]:
    """A step of two tasks one after another, and in turns."""
    parallel, planning = backbone.parallel, SwitchablePlanning()
    engine = Engine(backbone, parallel, planning, exchange=exchange)
    engine.register_tasks(_tasks(tokens, backbone.shape.vocab))
    alone = replace(one_after_another(engine.tasks), tensor=parallel.tp_size)
    plans = {"one after another": alone, "in turns": in_turn(alone, backbone.shape.layers)}
    return [{"order": order, **_timed_step(engine, planning, plan)} for order, plan in plans.items()]


def _tasks(tokens: int, vocab: int) -> list[Task]:
    adapter = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    batch = max(1, round(tokens / 2 / (0.625 * LENGTH)))
    shape = TaskShape("", batch, LENGTH)
    return [
        Task(
            spec_of(f"task-{i}", adapter, batch, LENGTH), Records(random_records(shape, batch, vocab, seed=i))
        )
        for i in range(2)
    ]


def _timed_step(engine: Engine, planning: SwitchablePlanning, plan: Plan) -> dict[str, Any]:
    """Seconds of a step, and the shares of a further one, by the profiler."""
    planning.plan = plan
    parallel = engine.parallel
    on_gpu = parallel.device.type == "cuda"
    for _ in range(2):
        engine.step()
    seconds = parallel.most([_seconds(parallel, engine.step)])[0]
    parallel.most([0.0])
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]) as profiler:
        engine.step()
    compute, links = intervals(profiler.events() or [], on_gpu)
    return {"seconds": seconds, **shares(compute, links)}


def intervals(events: Sequence[Any], on_gpu: bool) -> tuple[list[Interval], list[Interval]]:
    """When something was computed, and when a message was on its way, in microseconds.

    Args:
        events: The profiler's.
        on_gpu: Kernels count; on a CPU, operators.
    """
    compute, links = [], []
    for event in events:
        name, span = event.name.lower(), (event.time_range.start, event.time_range.end)
        if on_gpu and event.device_type.name != "CUDA":
            continue
        if any(word in name for word in ("nccl", "multimem", "gloo:")):
            links.append(span)
        elif on_gpu or name in ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear"):
            compute.append(span)
    return compute, links


def shares(compute: Sequence[Interval], links: Sequence[Interval]) -> dict[str, Any]:
    """Shares of the time in which something is computed, a message is on its way, or both; also slice by slice."""
    everything = [*compute, *links]
    start, end = min(span[0] for span in everything), max(span[1] for span in everything)
    ticks = torch.linspace(start, end, 200 * SLICES + 1, dtype=torch.float64)
    ticks = (ticks[1:] + ticks[:-1]) / 2
    busy = {"compute": _covered(ticks, compute), "links": _covered(ticks, links)}
    busy["both"] = busy["compute"] & busy["links"]
    means: dict[str, Any] = {kind: float(own.double().mean()) for kind, own in busy.items()}
    slices = {kind: own.view(SLICES, -1).double().mean(1).tolist() for kind, own in busy.items()}
    return {**means, "slices": slices}


def _covered(ticks: Tensor, spans: Sequence[Interval]) -> Tensor:
    """For each tick, whether it lies in one of the spans."""
    starts, ends = (torch.tensor(sorted(edge), dtype=torch.float64) for edge in zip(*spans, strict=True))
    return torch.searchsorted(starts, ticks, right=True) > torch.searchsorted(ends, ticks, right=True)
