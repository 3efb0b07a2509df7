"""The script that holds predictions against a GPU, as far as it can be run without one."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_mux.dry_run.run_spec import RunSpec, TaskRecords
from megatron_mux.fusion.plan import plan_for
from megatron_mux.gpus import Gpu
from megatron_mux.memory.trace.case import Case
from megatron_mux.runtime import Parallel
from tests.unit.memory.traced import ADAPTERS, CONFIGS

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_memory
    import gpu_memory_cases
    import gpu_memory_worker

    return gpu_memory, gpu_memory_cases, gpu_memory_worker


@pytest.mark.parametrize(
    ("adapter", "more"),
    [("full", {"weights": "float32", "autocast": "bfloat16"}), ("lora", {}), ("prefix", {})],
)
def test_what_is_measured_trains(scripts: Any, adapter: str, more: dict[str, Any]) -> None:
    _, _, worker = scripts
    recompute = adapter != "prefix"  # transformers drops a prefix where layers are recomputed
    case = Case(
        CONFIGS["llama"], 2, 2, 16, ADAPTERS[adapter], padded=adapter == "lora", recompute=recompute, **more
    )
    worker.train(asdict(case), torch.device("cpu"))


@pytest.mark.parametrize("name", ["all kinds", "in four parts", "offloaded"])
def test_what_is_measured_together_trains(scripts: Any, name: str, parallel: Parallel) -> None:
    _, cases, worker = scripts
    (run_spec,) = (
        one for known, (_, one) in cases.run_specs(Gpu()).items() if known.endswith(f"together: {name}")
    )
    tasks = [
        replace(one, lengths=[16] * len(one.lengths), labels=[8] * len(one.labels)) for one in run_spec.tasks
    ]
    config = {**CONFIGS["llama"], "max_position_embeddings": 64}
    tiny = replace(run_spec, config=config, tasks=tasks, device="cpu", dtype="float32")
    worker.train_together(asdict(tiny), parallel.device)


def test_a_history_that_is_replayed_otherwise_is_found(scripts: Any) -> None:
    _, _, worker = scripts
    mib = 1 << 20
    trace = [
        {"action": "segment_alloc", "addr": 1 << 30, "size": 2 * mib, "stream": 0},
        {"action": "alloc", "addr": 1 << 30, "size": 512, "stream": 0},
        {"action": "alloc", "addr": (1 << 30) + 512, "size": 512, "stream": 0},
    ]
    assert worker.replay_history(trace) == {"events": 2, "first_event_replayed_otherwise": None}
    more = {"action": "segment_alloc", "addr": 2 << 30, "size": 2 * mib, "stream": 0}
    assert worker.replay_history([*trace[:2], more, trace[2]])["first_event_replayed_otherwise"] == 1


def task(name: str, adapter: dict[str, Any]) -> dict[str, Any]:
    training = {"per_device_train_batch_size": 2, "max_steps": 8}
    return {
        "name": name,
        "adapter": adapter,
        "data": {"path": "none", "max_length": 16},
        "training": training,
    }


def test_predictions_are_written_down_and_compared(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, cases, _ = scripts
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tiny = Case(CONFIGS["llama"], 2, 2, 16)
    known = {"tiny full": ("tiny", tiny), "tiny LoRA": ("tiny", replace(tiny, adapter=ADAPTERS["lora"]))}
    monkeypatch.setattr(cases, "cases", lambda _: known)
    tasks = [TaskRecords(task("a", {"peft_type": "LORA", "target_modules": ["q_proj"]}), [16, 16], [8, 8])]
    together = RunSpec(CONFIGS["llama"], tasks, plan_for("spatial", {"a": 1}, 1))
    monkeypatch.setattr(cases, "run_specs", lambda _: {"tiny together": ("tiny", together)})
    monkeypatch.setattr(cases, "LIMITS", {1: ("tiny full",)})
    path = tmp_path / "predicted.json"
    script.main(["predict", "--output", str(path)])
    predicted = json.loads(path.read_text())
    full = predicted["cases"]["tiny full"]
    assert full["peak_allocated"] <= full["peak_reserved"] < full["process"]
    assert predicted["limits"][0]["largest"] > 100
    ours = predicted["cases"]["tiny together"]
    assert ours["peak_allocated"] <= ours["peak_reserved"] < ours["process"]

    def run(asked: Any, name: str) -> dict[str, Any]:
        """A GPU on which everything takes 4% more than was predicted."""
        if asked["limit"] is not None:
            return {"fits": asked["case"]["batch"] <= predicted["limits"][0]["largest"]}
        one = predicted["cases"][name]
        peaks = {key: one[key] * 1.04 for key in ("peak_allocated", "peak_reserved")}
        return {**peaks, "outside": 512 << 20, "fits": True, "first_event_replayed_otherwise": 7}

    monkeypatch.setattr(script, "run", run)
    monkeypatch.setattr(script, "machine_info", lambda: {"gpu": "made up"})
    script.main(["measure", "--predicted", str(path), "--output", str(tmp_path / "measured.json")])
    said = (tmp_path / "measured.md").read_text()
    assert "median 3.85% (goal 1%), worst 3.85% (goal 3%) of 3 cases; 0 histories" in said
    assert "not event 7" in said and "| runs | does not fit |" in said
    partial = json.loads((tmp_path / "measured.partial.json").read_text())
    assert partial["cases"].keys() == predicted["cases"].keys() and len(partial["limits"]) == 1
