"""The main table on a GPU: its rows, the weights that all sides share, and what it says of the best rival."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_mux import runtime
from megatron_mux.batch.micro_batch import activate
from megatron_mux.batch.pack import PackedSequence, pack
from megatron_mux.runtime import Parallel

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def parallel() -> Iterator[Parallel]:
    """This process alone, with Megatron-Core's groups, which experts need."""
    yield runtime.initialize(device="cpu")
    runtime.shutdown()


@pytest.mark.parametrize("shape", ["tiny", "tiny-experts"])
def test_our_backbone_has_the_weights_of_the_rivals_model(shape: str, parallel: Parallel) -> None:
    import random_model

    device = torch.device("cpu")
    model = random_model.make(shape, 2, torch.float32, device)
    backbone = random_model.backbone_of(model, parallel, torch.float32)
    tokens = torch.randint(3, 500, (12,), generator=torch.Generator().manual_seed(0))
    batch = pack(
        [PackedSequence("a", 0, tokens, torch.ones(12, dtype=torch.bool), 1.0)], ("a",), {"a": 0}
    ).to(device)
    with torch.no_grad(), activate(batch):
        total, _ = backbone.loss(backbone.forward(batch), batch)
    logits = model(input_ids=tokens.unsqueeze(0)).logits[0]
    wanted = torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="sum")
    assert float(total) == pytest.approx(float(wanted), rel=1e-5)


@pytest.mark.parametrize("shape", ["tiny", "tiny-experts"])
def test_operations_are_counted_for_the_weights_that_a_token_meets(shape: str) -> None:
    import gpu_rows
    import random_model

    model: Any = random_model.make(shape, 2, torch.float32, torch.device("meta"))
    layers, head = gpu_rows.parameters_of(model.config)
    experts = getattr(model.config, "num_experts", 1)
    used = getattr(model.config, "num_experts_per_tok", 1)
    matrices = [(name, own.numel()) for name, own in model.model.layers.named_parameters() if own.dim() > 1]
    wanted = sum(size * used // experts if ".experts." in name else size for name, size in matrices)
    assert (layers, head) == (wanted, model.lm_head.weight.numel())


def test_rows_are_what_is_to_be_shown() -> None:
    from gpu_rows import ROWS

    named = {row.name: row for row in ROWS}
    assert len(named) == len(ROWS)
    assert all(4 <= row.burst <= 16 for row in ROWS), "bursts of the training loop"
    for sequences in (8, 32, 128):
        own = named[f"q v, {sequences} sequences"]
        assert {task.batch for task in own.mix} == {sequences} and len(own.mix) == 8
        assert {task.rank for task in own.mix} == {8, 16, 32, 64}
    equal = [named[f"q v, {text} sequences"] for text in ("1 x 64", "8 x 8", "64 x 1")]
    assert {sum(task.batch * task.max_length for task in row.mix) for row in equal} == {64 * 128}
    assert {row.layers for row in ROWS} == {4, 8, 32} and named["32 tasks' memory"].memory == 32


def test_a_turn_is_a_burst_of_the_training_loop_on_all_sides(parallel: Parallel) -> None:
    import gpu_rows
    import gpu_sides
    import peft_side
    import random_model

    row = replace(gpu_rows.tiny(gpu_rows.ROWS[0]), mix=gpu_rows.ROWS[0].mix[:1])
    row = replace(row, mix=tuple(replace(task, batch=1, max_length=16, min_length=None) for task in row.mix))
    work = gpu_sides.Work(row)
    model = peft_side.prepared(random_model.make(row.shape, 2, torch.float32, torch.device("cpu")))
    initial: gpu_sides.Adapters = [None]
    sides = [
        gpu_sides.measure_peft(work, model, "packed", initial),
        gpu_sides.measure_mux(work, model, parallel, initial),
        gpu_sides.measure_ceiling(work, model, parallel),
    ]
    for side in sides:
        assert side["steps_in_a_turn"] == row.burst and len(side["seconds"]) == len(side["tokens"])
        assert side["tokens_per_second"] > 0 and side["gpu"]["kinds"]["matrix products"]["calls"] > 0
    peft, mux = (torch.tensor(side["losses"]) for side in sides[:2])
    assert torch.allclose(peft, mux, rtol=1e-4), "the same records from the same adapters"


def test_losses_known_from_another_run_are_not_computed_again(tmp_path: Path) -> None:
    from gpu_cases import add_known

    other = tmp_path / "cases.json"
    kept: dict[str, Any] = {"cpu": {"nf4": {"status": 0, "seconds": 1.0}}}
    add_known(kept, other)
    assert kept == {"cpu": {"nf4": {"status": 0, "seconds": 1.0}}}
    known = {"nf4": {"status": 0, "seconds": 2.0}, "int8": {"status": 0}, "fp8": {"status": -9}}
    other.write_text(json.dumps({"cpu": known}))
    add_known(kept, other)
    assert kept == {"cpu": {"nf4": {"status": 0, "seconds": 1.0}, "int8": {"status": 0}}}


def result() -> dict[str, Any]:
    """Two rivals: one is faster by the clock, a head of the other by GPU time."""

    def side(rate: float, by_gpu: float, **more: Any) -> dict[str, Any]:
        kinds = {"matrix products": {"seconds": 0.75, "calls": 10}, "norms": {"seconds": 0.25, "calls": 2}}
        gpu = {"tokens_per_second": by_gpu, "idle": 1 - rate / by_gpu, "kinds": kinds, "steps": 2}
        if rate == 1000.0:
            sizes = {
                "to 10 us": (20.0, 3.0),
                "to 50 us": (0.0, 0.0),
                "to 1 ms": (1100.0, 2.0),
                "more": (0.0, 0.0),
            }
            classes = {size: {"us": us, "gaps": count} for size, (us, count) in sizes.items()}
            largest = [{"before": "first", "after": "second", "us": 1100.0, "gaps": 2.0}]
            gpu["gaps"] = {"classes": classes, "largest": largest}
        return {"tokens_per_second": rate, "gpu": gpu, "took": 1.0, **more}

    heads = {"labelled": side(100.0, 500.0), "whole": side(90.0, 800.0)}
    sides = {
        "packed": side(100.0, 500.0, head="labelled", heads=heads),
        "processes": {"tokens_per_second": 250.0, "head": "whole", "peak_bytes": 1 << 30},
        "mux": side(1000.0, 1600.0, peak_bytes=1 << 30),
        "ceiling": {"failed": "Traceback\nRuntimeError: no\n"},
    }
    of_memory = {"together": 1 << 30, "replicas": 6 << 30, "tasks": 32}
    rest = {"product": 4e12, "done": True}
    rows = {
        "a row": {"sides": sides, "operations_a_token": {"counted": 1e9, "done": 2e9}, **rest},
        "32 tasks": {"sides": {"memory": of_memory}, "operations_a_token": {}, **rest},
        "cut off": {"sides": {}, "operations_a_token": {}, **rest, "done": False},
    }
    return {"rows": rows}


def test_the_table_names_the_best_rival_by_clock_and_by_gpu_time() -> None:
    from gpu_table_text import markdown

    text = markdown(
        result(), {"versions": {"torch": "2"}, "machine": {"gpu": "G", "cpu": "C", "dtype": "bf16"}}
    )
    assert (
        "| a row | PEFT, a process a task at once, whole head | 250 | 1000 | **4.00x** | 2.00x | - | 37.5% |"
        in text
    )
    assert "| 1 (2) | 25% (50%) |" in text
    assert "| 32 tasks | 1.0 | 6.0 | 1/6.0 |" in text
    assert "| a row | ceiling | RuntimeError: no |" in text
    assert "| cut off | - | it was not measured to its end |" in text
    assert "75.0%, 375.0 ms, 5" in text
    assert "| a row | PEFT, packed, whole head | 90 | 800 |" in text
    assert "| a row | PEFT, packed, labelled head | 100 | 500 |" in text
    assert "| a row | PEFT, a process a task at once, whole head | 250 | - | - | - |" in text
    assert "| a row | megatron-mux | 0.02 ms, 3.0 | 0.00 ms, 0.0 | 1.10 ms, 2.0 | 0.00 ms, 0.0 |" in text
    assert "| a row | first | second | 1100 | 2.00 |" in text


def test_a_side_that_fails_costs_the_others_nothing() -> None:
    from gpu_sides import attempt

    def fail() -> dict[str, Any]:
        raise RuntimeError("out of memory")

    assert "out of memory" in attempt(fail, torch.device("cpu"))["failed"]
    assert attempt(lambda: {"x": 1}, torch.device("cpu"))["x"] == 1


def test_losses_on_two_devices_are_held_against_the_bound_of_their_precision(tmp_path: Path) -> None:
    from gpu_case_list import cases
    from gpu_cases import compared

    chosen = cases(tmp_path)
    assert len({case.name for case in chosen}) == len(chosen) == 17
    found: dict[str, dict[str, Any]] = {device: {} for device in ("cuda", "cpu")}
    for case in chosen:
        for device, factor in (("cuda", 1 + 1e-6), ("cpu", 1.0)):
            losses = {task["name"]: [factor * k for k in range(8)] for task in case.tasks}
            found[device][case.name] = {"status": 0, "seconds": 1.0, "losses": losses, "eval_losses": {}}
    lines, fine = compared(chosen, json.loads(json.dumps(found)))
    assert fine and len(lines) == 19 and all("| 1.0e-06 |" in line for line in lines[2:])
    found["cuda"]["kinds-fp32"]["losses"]["vera"][3] *= 1 + 1e-4
    assert not compared(chosen, found)[1], "beyond rounding"
    found["cuda"]["kinds-fp32"]["losses"]["vera"].pop()
    assert not compared(chosen, found)[1], "a step is missing"
