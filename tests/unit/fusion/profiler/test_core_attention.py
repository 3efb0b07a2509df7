"""Core attention of long sequences and of chunks with long pasts, between and beyond what was measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from megatron_mux import runtime
from megatron_mux.adapters.registry import KINDS
from megatron_mux.backbone.model import Backbone
from megatron_mux.engine import Engine, Planning, Task
from megatron_mux.fusion.mesh import Mesh
from megatron_mux.fusion.planner.load import TaskLoad
from megatron_mux.fusion.planner.planner import Planner
from megatron_mux.fusion.planner.planning_context import PlanningContext
from megatron_mux.fusion.profiler import adapter_probes
from megatron_mux.fusion.profiler import measure as module
from megatron_mux.fusion.profiler.core_attention import AttentionCosts, widest_window
from megatron_mux.fusion.profiler.profile import Curve, points
from tests.end_to_end.harness import make_spec
from tests.reference.records import Records
from tests.tiny_models import make
from tests.unit.fusion import backbone

LENGTHS, CHUNKS, PASTS = (64, 128, 256, 512, 1024), (64, 256, 1024), (0, 16, 256, 1024)
NO_LAUNCH = {"attention_launch": Curve((1,), (0.0,), (0.0,))}


def curves(window: int | None = None) -> dict[str, Curve]:
    """Of a device that takes a second for each pair of tokens, two backward."""

    def seconds(length: int, past: int) -> float:
        return float(length * min(length + past, window or length + past))

    return NO_LAUNCH | {
        f"attention:{length}": points(
            {p: (seconds(length, p), 2 * seconds(length, p)) for p in (PASTS if length in CHUNKS else (0,))}
        )
        for length in LENGTHS
    }


@given(st.integers(64, 1 << 17))
def test_seconds_grow_with_the_square_of_the_length(length: int) -> None:
    assert AttentionCosts(curves()).of(length, 0) == pytest.approx([length**2, 2 * length**2])


@given(st.sampled_from(CHUNKS), st.integers(16, 1 << 17))
def test_seconds_of_a_chunk_grow_with_its_past(length: int, past: int) -> None:
    assert AttentionCosts(curves()).of(length, past)[0] == pytest.approx(length * (length + past))


@given(st.integers(64, 1 << 14), st.integers(16, 1 << 17))
def test_chunks_of_other_lengths_are_near_their_pairs(length: int, past: int) -> None:
    assert AttentionCosts(curves()).of(length, past)[0] == pytest.approx(length * (length + past), rel=0.13)


def test_behind_a_window_seconds_grow_with_the_length() -> None:
    costs = AttentionCosts(curves(window=256), window=256, measured=256)
    assert costs.of(16384, 0)[0] == pytest.approx(16384 * 256)
    assert costs.of(1024, 1 << 17)[0] == pytest.approx(1024 * 256)


@given(st.sampled_from(CHUNKS), st.integers(1, 256))
def test_short_pasts_have_the_kernel_of_long_ones(length: int, past: int) -> None:
    """On a device with two: half of the pairs without a past, all of them behind one, as behind a prefix."""
    device = {
        name: replace(curve, forward=(curve.forward[0] / 2, *curve.forward[1:]))
        for name, curve in curves().items()
    }
    found = AttentionCosts(device)
    assert found.of(length, 0)[0] == pytest.approx(length**2 / 2)
    assert found.of(length, past)[0] == pytest.approx(length * (length + max(past, 16)))


@pytest.mark.parametrize("past", [0, 16, 1024, 4096])
def test_beyond_the_last_point_pairs_are_those_of_the_kernel(past: int) -> None:
    """A roofline counts a sequence's own pairs half, behind a past too."""
    known = backbone.profile().curves
    found = AttentionCosts({name: curve for name, curve in known.items() if name != "attention:8192"})
    assert found.of(8192, past) == pytest.approx(known["attention:8192"].at(past), rel=0.02)


def test_a_narrower_window_than_the_measured_one_takes_its_part() -> None:
    everything, narrow = AttentionCosts(curves()), AttentionCosts(curves(), window=128)
    assert narrow.of(256, 0) == pytest.approx(everything.of(256, 0)), (
        "half of the pairs, as many as the window has"
    )
    assert narrow.of(4096, 0) == pytest.approx(everything.of(4096, 0) * 128 / 2048)
    assert narrow.of(256, 1024) == pytest.approx([256 * 128, 2 * 256 * 128])
    assert widest_window([None, 512]) is None and widest_window([128, 512]) == 512


class Products(TorchDispatchMode):
    """A clock of which every operation of a product takes a microsecond; a look at it, next to nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-9
        return self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "flash_attention_for_cpu" in str(func):
            backward = "backward" in str(func)  # it has the gradient before query, key and value
            (*batch, length, width), seen = args[backward].shape, args[1 + backward].shape[2]
            causal = 7 if backward else 4
            pairs = length * seen / (2 if len(args) > causal and args[causal] else 1)
            self.now += 1e-6 * math.prod(batch) * pairs * width * (10 if backward else 4)
        elif func._overloadpacket in flop_registry:
            self.now += 1e-6 * flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Products]:
    with Products() as counted:
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=counted))
        yield counted


def test_products_of_long_passes_are_predicted(
    tmp_path: Path, clock: Products, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From rows up to 128 and sequences up to 1,024, by counted products: whole ones and chunks with long pasts."""
    monkeypatch.setattr(module, "_TURN_SECONDS", 1e-12)  # each probe once
    monkeypatch.setattr(module, "_LONGEST_PASS", math.inf)
    monkeypatch.setattr(adapter_probes, "adapter_samples", KINDS["LORA"].samples)
    path = make(tmp_path, "llama", max_position_embeddings=16384)
    parallel = runtime.initialize(device="cpu")
    errors = []
    try:
        loaded = Backbone.load(path, parallel, torch.float32)
        about = {"device": "made-up", "kind": "cpu", "threads": 1}
        profile = module.measure(loaded, about, 128, rounds=1)
        lora = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj", "v_proj"]}
        spec = make_spec("long", lora, {"per_device_train_batch_size": 1, "max_steps": 9})
        for tokens, chunk in ((1500, None), (4096, None), (4096, 1024), (3000, 500)):
            records = Records([(torch.ones(tokens, dtype=torch.int64), torch.arange(tokens) >= tokens // 2)])
            context = PlanningContext(profile, loaded.info, Mesh(), 4, interleave="off", chunk=chunk)
            load = TaskLoad.of(spec, records.lengths, records.label_counts, loaded.shape)
            plan = Planner(context).fixed("spatial", {"long": load})
            engine = Engine(loaded, parallel, Planning("spatial", 1, chunk=chunk))
            engine.register_tasks([Task(spec, records.as_dataset())])
            before = clock()
            engine.step()
            assert plan.predicted_latency_s is not None
            errors.append(abs(plan.predicted_latency_s / (clock() - before) - 1))
            engine.remove_task("long")
    finally:
        runtime.shutdown()
    assert statistics.median(errors) < 0.01 and max(errors) < 0.1, errors
