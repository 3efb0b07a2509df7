"""From measured seconds to a profile: what whole modules take is told apart into what the cost model adds up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_mux import runtime
from megatron_mux.adapters.registry import KINDS
from megatron_mux.backbone.model import Backbone
from megatron_mux.base_ops import BASE_OPS
from megatron_mux.fusion.planner.stage_cost import StageCosts
from megatron_mux.fusion.profiler import adapter_probes
from megatron_mux.fusion.profiler import measure as module
from megatron_mux.fusion.profiler.core_attention import AttentionCosts
from megatron_mux.fusion.profiler.probed_stage import SEGMENT, STACK, Probe
from megatron_mux.fusion.profiler.probes import Probes
from megatron_mux.fusion.profiler.profile import Curve, Profile, points
from megatron_mux.kernels.groups import RowGroups
from megatron_mux.kernels.low_rank import choice as low_rank_choice
from megatron_mux.kernels.low_rank.reference import LoopKernels
from megatron_mux.kernels.low_rank.terms import TermTable
from megatron_mux.memory.forms.method import ParallelConfig
from tests.tiny_models import make
from tests.unit.fusion import backbone

LAYERS = 4
ENDS = {"linear_proj", "linear_fc2"}
"""Where a bottleneck can be."""


def timed(profile: Profile) -> dict[str, Curve]:
    """What probes of this device would give: layers stacked, core attention by sequences."""
    curves = {
        name: curve for name, curve in profile.curves.items() if not name.startswith(("util", "attention"))
    }
    cores = AttentionCosts(profile.curves)
    halves = {name: profile.curves[name] for name in ("attention_half", "mlp_half")}
    for name, half in halves.items():
        found = {}
        for n in half.sizes:
            length = min(SEGMENT, int(n))
            core = (
                cores.of(length, 0) * n / length + cores.launch if name == "attention_half" else np.zeros(2)
            )
            found[n] = tuple(STACK * (np.array(half.at(n)) + core))
        curves[name] = points(found)
    for length, over_past in cores.over_past.items():
        for past in over_past.sizes:
            one = np.array(over_past.at(past))
            curves[f"attention:{length}:{past:.0f}"] = points(
                {n: tuple(n * one + cores.launch) for n in (1, 8)}
            )
    there = curves["transfer"]
    curves["transfer"] = Curve(there.sizes, tuple(2 * s for s in there.forward), there.backward)
    return curves


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_layer_takes_what_was_measured(tensor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device = backbone.profile(LAYERS, tensor_parallel=tensor)
    parallel = SimpleNamespace(tp_size=tensor, world_size=tensor)
    bench: Any = module._Bench.__new__(module._Bench)
    offload = SimpleNamespace(groups={})
    bench.backbone = SimpleNamespace(shape=backbone.shape(LAYERS), parallel=parallel, offload=offload)
    bench.device, bench.dtype, bench.rounds = torch.device("cpu"), torch.float32, 1
    stacks = dict.fromkeys(("attention", "mlp"), [None] * STACK)
    stage = SimpleNamespace(shape=bench.backbone.shape, most_tokens=2048, stacks=stacks, divided=1)
    bench.probes = SimpleNamespace(stage=stage, adapters=SimpleNamespace(chosen=()))
    monkeypatch.setattr(module, "measured_updates", lambda *arguments: {})
    monkeypatch.setattr(module._Bench, "_median", lambda bench, run: 0.0)
    monkeypatch.setattr(module._Bench, "_message_share", lambda bench: 0.1)
    curves = timed(device)
    found = bench.profile(dict(device.about), curves)

    def seconds(profile: Profile) -> tuple[float, ...]:
        loads = [backbone.load("a", [SEGMENT] * 4, layers=LAYERS)]
        model = StageCosts(
            profile, backbone.shape(LAYERS), loads, [range(LAYERS)], ParallelConfig(tensor=tensor), itemsize=4
        )
        return model.hybrid((0,), 1).alone()

    assert seconds(found) == pytest.approx(seconds(device), rel=1e-6)


class PlayedProcessor:
    """A played processor: a product takes a second, a message so many, and of the processor its share meanwhile."""

    def __init__(self, message: float, share: float) -> None:
        self._message, self._share = message, share
        self._now = self._arrives = 0.0

    def perf_counter(self) -> float:
        return self._now

    def t(self) -> torch.Tensor:
        """The weight of a product, which takes its time here."""
        busy = max(0.0, self._arrives - self._now)
        self._now += min(1 / (1 - self._share), 1 + self._share * busy)
        return torch.zeros(4, 4)

    def all_reduce(self, *_: Any, **__: Any) -> SimpleNamespace:
        self._arrives = self._now + self._message
        return SimpleNamespace(wait=self.wait)

    def wait(self) -> None:
        self._now = max(self._now, self._arrives)


@pytest.mark.parametrize("message", [0.1, 3.0, 50.0])
def test_what_a_message_takes_from_computation(message: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = PlayedProcessor(message, 0.25)
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(torch.distributed, "all_reduce", clock.all_reduce)
    bench: Any = module._Bench.__new__(module._Bench)
    bench.rounds, bench.device, bench.dtype = 3, torch.device("cpu"), torch.float32
    bench.probes = SimpleNamespace(stage=SimpleNamespace(rows=[2]))
    ops = [SimpleNamespace(module=SimpleNamespace(weight=clock))]
    parallel = SimpleNamespace(tp_size=2, tp_group=None, most=lambda values: values)
    bench.backbone = SimpleNamespace(parallel=parallel, shape=SimpleNamespace(hidden=4), base_ops=lambda: ops)
    assert bench._message_share() == pytest.approx(0.25)


class PlayedGpu:
    """A played GPU, which computes what the host has launched, one pass after another.

    Args:
        launching: Seconds of the host for a pass.
        forward, backward: Seconds of the device.
    """

    type = "cuda"

    def __init__(self, launching: float, forward: float, backward: float) -> None:
        self.launching, self.forward, self.backward = launching, forward, backward
        self.host = self.free = 0.0
        self.waits = 0

    def launch(self, seconds: float) -> None:
        self.host += self.launching
        self.free = max(self.free, self.host) + seconds

    def synchronize(self, _: Any) -> None:
        self.waits += 1
        self.host = max(self.host, self.free)

    def event(self, _: Any, enable_timing: bool) -> Any:
        made: Any = SimpleNamespace(at=0.0, record=lambda: setattr(made, "at", max(self.free, self.host)))
        made.elapsed_time = lambda other: 1e3 * (other.at - made.at)
        return made

    def run(self) -> tuple[torch.Tensor, tuple[torch.Tensor]]:
        """A pass."""
        self.launch(self.forward)
        x = torch.zeros(1, requires_grad=True)
        output = x * 1
        output.register_hook(lambda _: self.launch(self.backward))
        return output, (x,)


@pytest.mark.parametrize(
    ("launching", "forward", "backward"),
    [(1e-4, 3e-3, 5e-3), (2e-3, 1e-4, 1e-4)],
    ids=["computing", "launching"],
)
def test_a_gpu_is_timed_by_its_own_events(
    launching: float, forward: float, backward: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes longer counts, to launch a pass or to compute it, and the host waits twice a turn however often."""
    gpu = PlayedGpu(launching, forward, backward)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    monkeypatch.setattr(torch, "Event", gpu.event)
    monkeypatch.setattr(module, "_TURN_SECONDS", 0.1)
    bench: Any = module._Bench.__new__(module._Bench)
    bench.device = gpu
    bench.backbone = SimpleNamespace(parallel=SimpleNamespace(most=lambda values: values))
    found = bench.time(Probe("half", 1, lambda: gpu.run))
    expected = (max(launching, forward), max(launching, backward))
    assert found == pytest.approx(expected, rel=0.06), "but for the last of the pass, which nothing follows"
    assert gpu.waits == 2
    assert bench.time(Probe("half", 1, lambda: gpu.run, base=lambda: gpu.run)) == pytest.approx(
        (0, 0), abs=1e-9
    )


def test_samples_of_every_kind_run(tmp_path: Path) -> None:
    """But where the backbone cannot have them."""
    parallel = runtime.initialize(device="cpu")
    try:
        found = Probes(Backbone.load(make(tmp_path, "llama"), parallel), 32)
        made = found.adapters.all()
        kinds = {probe.name.partition(":")[0].removesuffix("_DROPOUT") for probe in made}
        assert kinds == {name for name, kind in KINDS.items() if kind.samples()} | {"LORA_DORA"}
        for probe in made:
            assert probe.base is not None
            for run in (probe.make(), probe.base()):
                output, wanted = run()
                torch.autograd.grad(output, wanted, torch.ones_like(output), allow_unused=True)
        assert {probe.name.split(":")[1] for probe in made if probe.name.startswith("BOTTLENECK")} == ENDS
    finally:
        runtime.shutdown()


class Clock:
    """Seconds that only kernels of `slow` and looks at the clock take, however busy the machine is."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-3
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock by which probes are timed."""
    made = Clock()
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=made))
    return made


def slow(clock: Clock, seconds: Callable[[RowGroups], float]) -> type[LoopKernels]:
    """The reference, taking longer."""

    class Slow(LoopKernels):
        @staticmethod
        def down(x: torch.Tensor, table: TermTable, groups: RowGroups) -> torch.Tensor:
            clock.now += seconds(groups)
            return LoopKernels.down(x, table, groups)

    return Slow


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Backbone]:
    """A tiny backbone on a CPU."""
    parallel = runtime.initialize(device="cpu")
    try:
        yield Backbone.load(make(tmp_path, "llama"), parallel, torch.float32)
    finally:
        runtime.shutdown()


Kernels = dict[str, type[LoopKernels]]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Kernels], list[str]]:
    """Makes kernels the alternatives, the default first; returns the list of those that are used from then on."""

    def of(kernels: Kernels) -> list[str]:
        used: list[str] = []

        def named(name: str) -> type[LoopKernels]:
            used.append(name)
            return kernels[name]

        for owner in (adapter_probes, low_rank_choice):
            monkeypatch.setattr(owner, "alternatives", lambda device, dtype: tuple(kernels))
        monkeypatch.setattr(low_rank_choice, "_kernels", named)
        return used

    return of


def test_kernels_are_chosen_by_measurement(
    stage: Backbone, clock: Clock, install: Callable[[Kernels], list[str]]
) -> None:
    """Of two, the fastest at each BaseOp; the profile keeps them, its adapters are timed with them."""
    assert module._Bench(stage, 32, 1).probes.adapters.kernels() == [], "on a CPU there is one"
    used = install({"triton": slow(clock, lambda groups: 5e-3), "loop": LoopKernels})
    bench = module._Bench(stage, 32, 1)
    bench.choose_kernels()
    assert dict(bench.probes.adapters.chosen) == dict.fromkeys(BASE_OPS, "loop") and set(used) == {
        "triton",
        "loop",
    }
    used.clear()
    adapted = bench.probes.adapters.of(KINDS["LORA"].samples()[0], "linear_qkv", [16], 1)
    bench.measure_in_rounds(adapted)
    assert set(used) == {"loop"}


@pytest.mark.parametrize("slow_for_many", [False, True])
def test_default_kernels_stay_unless_others_are_always_faster(
    slow_for_many: bool, stage: Backbone, clock: Clock, install: Callable[[Kernels], list[str]]
) -> None:
    def seconds(groups: RowGroups) -> float:
        return 20e-3 if (len(groups.slots) > 1) == slow_for_many else 0.0

    install({"triton": slow(clock, lambda groups: 5e-3), "loop": slow(clock, seconds)})
    bench = module._Bench(stage, 32, 1)
    bench.choose_kernels()
    assert dict(bench.probes.adapters.chosen) == dict.fromkeys(BASE_OPS, "triton")
