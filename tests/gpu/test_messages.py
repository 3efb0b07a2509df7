"""On one GPU: pieces of two hybrid tasks hide messages, whose part a kernel of known length plays on a second stream.

One rank's sum is its own tensor. Until it has arrived the tensor is NaN, so that a piece that did not wait would show.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_mux import runtime
from megatron_mux.backbone.exchange import Exchange, PendingResult
from megatron_mux.backbone.layer_pieces import TensorMessages
from megatron_mux.backbone.model import Backbone
from megatron_mux.backbone.pieces import Message
from megatron_mux.engine import Engine, Planning
from megatron_mux.fusion.graphs.launch_order import LaunchOrder, PieceCost, encode, kahn
from megatron_mux.fusion.plan import Bucket, HybridTask, Plan
from tests import tiny_models
from tests.end_to_end.harness import Case, random_records
from tests.gpu.needs_gpu import NEEDS_GPU

pytestmark = NEEDS_GPU
WIDE: dict[str, Any] = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 2}
"""A backbone whose pieces keep a GPU busy for longer than the host needs to launch them."""
NAMES = ("first", "second")
STEPS = 5


@pytest.fixture(autouse=True)
def as_if_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank has its messages, too."""
    monkeypatch.setattr(Backbone, "_tensor_messages", TensorMessages(True, False))


class StandIn(Exchange):
    """Messages that take a known number of the GPU's cycles.

    Attributes:
        cycles: Of each message.
        issued: How many.
    """

    def __init__(self, cycles: int = 0) -> None:
        self.cycles = cycles
        self.issued = 0
        self._stream = torch.cuda.Stream()

    def issue(self, message: Message) -> PendingResult:
        """See `Exchange.issue`."""
        tensor = message.tensor
        self.issued += 1
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            tensor.record_stream(self._stream)
            arriving = tensor.clone()
            tensor.fill_(float("nan"))
            torch.cuda._sleep(self.cycles)
            tensor.copy_(arriving)
            return PendingResult(tensor, self._stream.record_event())


def cases(sequences: int, longest: int) -> list[Case]:
    """Two LoRA tasks."""
    section = {"peft_type": "LORA", "r": 4, "target_modules": "all-linear"}
    training = {"per_device_train_batch_size": sequences, "learning_rate": 1e-3, "max_steps": 8 * STEPS}
    return [
        Case(name, section, training, random_records(sequences, 90, longest, longest, seed=i))
        for i, name in enumerate(NAMES)
    ]


def plan_of(backbone: Backbone, order: str) -> Plan:
    """One bucket with both tasks: `whole` passes, or pieces `one by one` or `in turns`."""
    bucket = Bucket(tuple(HybridTask((name,)) for name in NAMES), 1, forward=(1.0,), backward=(1.0,))

    def pieces(count: int) -> str:
        chains = [[PieceCost(1.0, 1.0)] * count] * len(NAMES)
        return encode(kahn(chains) if order == "in turns" else [0] * count + [1] * count)

    if order != "whole":
        made = backbone.pieces
        bucket = replace(bucket, launch=(LaunchOrder(pieces(made.forward), pieces(made.backward)),))
    return Plan("auto", 1, (bucket,))


def engine_of(backbone: Backbone, order: str, exchange: Exchange, sequences: int, longest: int) -> Engine:
    """An engine with both tasks."""
    planning = Planning("auto", 1, given=plan_of(backbone, order))
    engine = Engine(backbone, backbone.parallel, planning, tries_plans=False, exchange=exchange)
    engine.register_tasks([case.task for case in cases(sequences, longest)])
    return engine


@pytest.fixture
def repeatable() -> Iterator[None]:
    """Operators whose results do not vary from call to call."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("repeatable")
def test_adapters_are_those_of_one_after_another_to_the_bit(tmp_path: Path) -> None:
    parallel = runtime.initialize(device="cuda")
    backbone = Backbone.load(tiny_models.make(tmp_path, "llama"), parallel, torch.float32)
    found: dict[str, list[Tensor]] = {}
    for order, cycles in (("whole", 0), ("one by one", 1 << 20), ("in turns", 1 << 20)):
        exchange = StandIn(cycles)
        engine = engine_of(backbone, order, exchange, 4, 24)
        for _ in range(2):
            engine.step()
        assert bool(exchange.issued) == (order != "whole")
        found[order] = [value for name in NAMES for value in (engine.adapter_tensors(name) or {}).values()]
        for name in NAMES:
            engine.remove_task(name)
    assert all(value.isfinite().all() for value in found["in turns"])
    for order in ("one by one", "in turns"):
        assert all(map(torch.equal, found[order], found["whole"])), order


def test_messages_are_hidden(tmp_path: Path) -> None:
    parallel = runtime.initialize(device="cuda")
    backbone = Backbone.load(tiny_models.make(tmp_path, "llama", **WIDE), parallel, torch.float32)
    exchange = StandIn()
    alone = seconds_of_step(backbone, "one by one", exchange)
    per_step = exchange.issued // (STEPS + 1)
    exchange.cycles = int(cycles_per_second() * alone / 2 / per_step)  # a third of a step with messages
    one_by_one = seconds_of_step(backbone, "one by one", exchange)
    in_turns = seconds_of_step(backbone, "in turns", exchange)
    print(f"a step: {alone:.4f} s without messages, {one_by_one:.4f} s one by one, {in_turns:.4f} s in turns")
    assert in_turns < (alone + one_by_one) / 2, "most of the messages' time is hidden"


def seconds_of_step(backbone: Backbone, order: str, exchange: StandIn) -> float:
    """The median over steps, after one to warm up."""
    engine = engine_of(backbone, order, exchange, 32, 128)
    seconds = []
    for _ in range(STEPS + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        engine.step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    for name in NAMES:
        engine.remove_task(name)
    return statistics.median(seconds[1:])


def cycles_per_second() -> float:
    """Of this GPU's clock, as `torch.cuda._sleep` counts it."""
    cycles = 1 << 28
    torch.cuda._sleep(cycles)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    torch.cuda._sleep(cycles)
    stop.record()
    stop.synchronize()
    milliseconds: float = start.elapsed_time(stop)
    return cycles / milliseconds * 1e3
