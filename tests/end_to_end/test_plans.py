"""`tools/plan.py`, `--mux-plan` and `--mux-policy auto`, as a user meets them."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_mux.backbone.registry import read_backbone_info
from megatron_mux.fusion.plan import Plan
from megatron_mux.fusion.profiler.profile_store import about_run, save_profile
from megatron_mux.fusion.profiler.roofline import roofline
from tests.end_to_end.complaints import complaints
from tests.end_to_end.forked import ROOT, Server
from tests.end_to_end.workplace import TASKS, Workplace

pytestmark = pytest.mark.usefixtures("warm_workers")

Call = Callable[..., tuple[int, str, str]]
PLAIN = {**TASKS["lora"], "adapter": {**TASKS["lora"]["adapter"], "lora_dropout": 0.0}}
"""Without dropout, whose masks take most of a dry run's time."""


def tool(name: str) -> ModuleType:
    """A script of `tools/`, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def caller(place: Workplace, capsys: pytest.CaptureFixture[str], threads: int) -> Call:
    """Runs tools/plan.py on a workplace's tasks: status, output, errors."""

    def call(*more: str | Path) -> tuple[int, str, str]:
        usual = ["--backbone", place.backbone, "--tasks", place.tasks, "--threads", threads]
        capsys.readouterr()
        status = tool("plan").main([str(part) for part in [*usual, *more]])
        said = capsys.readouterr()
        return status, said.out, said.err

    return call


@pytest.fixture(scope="module")
def predicted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache, in which the memory of a kind is predicted once for all plans."""
    return tmp_path_factory.mktemp("predicted")


@pytest.fixture
def plan(
    workplace: Workplace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, predicted: Path
) -> Call:
    monkeypatch.setenv("MEGATRON_MUX_CACHE", str(predicted))
    return caller(workplace, capsys, threads=2)


@pytest.fixture
def one_kind(workplace: Workplace) -> Path:
    """A file with a single task: each kind that memory is predicted for takes seconds."""
    return workplace.write_tasks("one.yaml", {"lora": PLAIN})


def without_progress(errors: str) -> list[str]:
    """What a call complains of."""
    return [line for line in errors.splitlines() if not line.startswith("dry runs to predict memory")]


def test_what_programs_read(plan: Call) -> None:
    status, output, _ = plan("--json", "--stages", "2")
    found = json.loads(output)
    assert status == 0
    names = [name for b in found["buckets"] for h in b["hybrid_tasks"] for name in h["tasks"]]
    assert sorted(names) == sorted(TASKS)
    assert set(found["alternatives"]) == {"serial", "spatial", "temporal", "padded"}
    assert 0 < found["predicted_latency_s"] <= found["alternatives"]["serial"]
    assert 0 < found["planning_s"] < 5
    assert found["flags"] == "--pipeline-model-parallel-size 2 "


def test_what_people_read(plan: Call, one_kind: Path) -> None:
    gpu = ("--device", "H100", "--bf16", "--tasks", one_kind)
    status, output, errors = plan("--stages", "2", *gpu, "--memory-limit", "4GiB")
    assert status == 0 and not without_progress(errors)
    for word in (
        "lora",
        "zero-padded",
        "temporal",
        "share of padding",
        "of 4.00 GiB",
        "roofline",
        "megatron-mux train",
    ):
        assert word in output, word


def test_settings_of_a_sweep_are_shown(plan: Call, workplace: Workplace) -> None:
    swept = workplace.write_tasks("swept.yaml", {"lora": {**PLAIN, "sweep": {"adapter.r": [2, 4]}}})
    status, output, _ = plan("--tasks", swept)
    rows = [line.split() for line in output.splitlines()]
    assert status == 0 and "lora: 2 configurations".split() in rows
    assert ["task", "r"] in rows and ["lora-r2", "2"] in rows and ["lora-r4", "4"] in rows
    assert json.loads(plan("--tasks", swept, "--json")[1])["sweeps"]["lora"] == {
        "lora-r2": {"adapter.r": 2},
        "lora-r4": {"adapter.r": 4},
    }


def test_a_profile_that_stands_in_is_said(
    plan: Call, workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another number of busy processes; one that is damaged is passed over. Programs read nothing of it."""
    monkeypatch.setenv("MEGATRON_MUX_CACHE", str(tmp_path / "cache"))
    shape = read_backbone_info(workplace.backbone).shape
    about = about_run(shape, "cpu", "torch.float32", 1, threads=2, busy=1)
    profile = replace(roofline(shape, about, 4, 1), about=about, source="measured")
    file = save_profile(profile, tmp_path / "cache" / "profiles")
    said = "no profile was measured with 2 process(es) busy: using the one with 1"
    status, output, errors = plan("--json", "--stages", "2", "--device", "cpu")
    assert status == 0 and profile.key in json.loads(output)["costs"] and said in errors
    assert plan("--gpus", "2", "--device", "cpu")[2].count(said) == 1, "not for each way to divide the ranks"
    file.write_text("{")
    status, output, errors = plan("--json", "--stages", "2", "--device", "cpu")
    assert status == 0 and "roofline" in json.loads(output)["costs"]
    assert f"{file}: is no profile" in errors and "going on without it" in errors


def test_a_plan_keeps_subgraphs(plan: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = tmp_path / "plan.json", tmp_path / "subgraphs.svg"
    flags = ["--tensor-parallel", "2", "--sequence-parallel", "--subgraphs"]
    status, output, _ = plan(*flags, "--output", file, "--json")
    assert status == 0
    made = Plan.from_json(json.loads(file.read_text()))
    (layers,) = made.layers
    messages = [own.message for own in layers.forward if own.message]
    assert layers.tensor == 2 and messages == ["all_gather", "reduce_scatter"] * 2
    assert json.loads(output)["alternatives"]["interleave_off"] > 0
    assert tool("draw_schedule").main(["--subgraphs", "--plan", str(file), "--output", str(picture)]) == 0
    assert str(layers) in capsys.readouterr().out and picture.exists()
    status, _, errors = plan("--subgraphs")
    assert status == 2 and "needs --tensor-parallel of at least 2" in errors


def test_ranks_are_divided(plan: Call, one_kind: Path) -> None:
    status, output, _ = plan("--gpus", "4", "--device", "H100", "--bf16", "--tasks", one_kind, "--json")
    found = json.loads(output)
    meshes = {(m["tensor"], m["pipeline"], m["data"]) for m in found["mesh"]}
    assert status == 0 and {(1, 1, 4), (1, 4, 1), (2, 2, 1), (4, 1, 1)} <= meshes
    seconds = [m["predicted_latency_s"] for m in found["mesh"]]
    assert seconds == sorted(seconds) and seconds[0] == found["predicted_latency_s"]


def test_layers_are_recomputed_on_a_gpu_where_a_run_would(plan: Call, one_kind: Path) -> None:
    """Where a task does not fit otherwise, unless a flag says what is recomputed."""

    gpu = ("--device", "H100", "--bf16", "--tasks", one_kind)

    def fits(kib: int, *more: str) -> bool:
        return plan(*gpu, "--memory-limit", f"{kib}KiB", "--json", *more)[0] == 0

    low, least = 64, 1 << 20
    while least - low > 1:
        middle = math.isqrt(low * least) if least > 1.03 * low else (low + least) // 2
        low, least = (low, middle) if fits(middle) else (middle, least)
    full, selective = (("--recompute-granularity", what) for what in ("full", "selective"))
    assert fits(least, *full) and not fits(least - 1, *full), "the least of a run that recomputes all layers"
    assert not fits(least, *selective)
    given = ("--memory-limit", f"{least}KiB")
    status, output, errors = plan(*gpu, *given)
    assert status == 0 and "layers are recomputed (--recompute-granularity full)" in errors
    assert "--recompute-granularity full --save" in output
    for more in (["--json"], ["--gpus", "1", "--json"]):
        assert json.loads(plan(*gpu, *given, *more)[1])["flags"].startswith("--recompute")
    assert "--recompute" not in plan(*gpu, "--memory-limit", "1GiB")[1]
    status, _, errors = plan(*gpu, *given, "--recompute-granularity", "selective")
    assert status == 2 and "recompute layers (--recompute-granularity full)" in errors


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--gpus", "4", "--stages", "2"], "--gpus: chooses how ranks are divided: leave out --stages"),
        (["--stages", "9"], "its 4 layers cannot fill 9 pipeline stages"),
        (["--device", "abacus"], "--device abacus: is not known"),
        (
            ["--device", "H100", "--bf16", "--recompute-granularity", "full", "--memory-limit", "100KiB"]
            + ["--tasks", "one.yaml"],
            "the memory limit of 100 KiB is less than the",
        ),
        (["--output", "/proc/nowhere/plan.json"], "cannot be written"),
        (["--tasks", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    plan: Call, one_kind: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], said: str
) -> None:
    monkeypatch.chdir(one_kind.parent)
    status, output, errors = plan(*more)
    assert status == 2 and not output
    (line,) = without_progress(errors)
    assert line.startswith("plan.py: ") and said in line


def test_a_planned_run_follows_its_plan(
    plan: Call, workplace: Workplace, server: Server, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    assert plan("--output", file, "--chunk-size", "8", "--micro-batches", "2")[0] == 0
    kernels = [["linear_qkv", "loop"]]
    of_earlier = {k: v for k, v in json.loads(file.read_text()).items() if k != "pointwise"}
    file.write_text(json.dumps({**of_earlier, "kernels": kernels}))
    run = server.run(workplace.arguments("--mux-plan", file, "--save", tmp_path / "run"))
    assert run.status == 0, run.errors
    assert f"following {file}" in run.output and "element-wise kernels: torch" in run.output
    kept = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert {(b["micro_batches"], b["chunk"]) for b in kept["buckets"]} == {(2, 8)}
    assert kept["kernels"] == kernels, "also once the planner has planned for the tasks that are left"
    assert kept["pointwise"] == "torch"


def test_the_default_is_planned(workplace: Workplace, server: Server, tmp_path: Path) -> None:
    run = server.run(workplace.arguments("--save", tmp_path / "run"))
    assert run.status == 0, run.errors
    assert "plan: auto, 1 stage" in run.output and "roofline" in run.output
    assert Plan.from_json(json.loads((tmp_path / "run" / "plan.json").read_text())).policy == "auto"


def _set(**entries: Any) -> Callable[[dict[str, Any]], None]:
    return lambda plan: plan.update(entries)


def _drop(plan: dict[str, Any]) -> None:
    (hybrid,) = [h for b in plan["buckets"] for h in b["hybrid_tasks"] if "lora" in h["tasks"]]
    hybrid["tasks"].remove("lora")


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (_set(backbone="f" * 64), "backbone: the plan is for another backbone (ffffffffffff, not "),
        (_set(stages=2), "stages: the plan is for 2, this run has 1"),
        (_set(format=4), "format: must be 6, got 4: plan anew"),
        (_drop, "'lora'"),
    ],
)
def test_a_plan_that_is_not_for_this_run(
    edit: Callable[[dict[str, Any]], None],
    said: str,
    plan: Call,
    workplace: Workplace,
    server: Server,
    tmp_path: Path,
) -> None:
    file = tmp_path / "plan.json"
    assert plan("--output", file)[0] == 0
    value = json.loads(file.read_text())
    edit(value)
    file.write_text(json.dumps(value))
    lines = complaints(server, workplace.arguments("--mux-plan", file, "--save", tmp_path / "run"))
    assert str(file) in lines[0]
    assert any(said in line for line in lines), lines
    assert not list((tmp_path / "run").rglob("checkpoint-*"))


def test_memory_is_kept_or_refused(
    workplace: Workplace, one_kind: Path, server: Server, tmp_path: Path
) -> None:
    more = ("--save", tmp_path / "run")
    arguments = workplace.arguments("--mux-memory-limit", "100KiB", *more, tasks=one_kind)
    (line,) = complaints(server, arguments)
    assert "the memory limit of 100 KiB is less than the" in line
    run = server.run(workplace.arguments("--mux-memory-limit", "1GiB", *more, tasks=one_kind))
    assert run.status == 0, run.errors
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["memory_limit_bytes"] == 1 << 30


def test_a_profile_is_measured_kept_and_used(
    workplace: Workplace,
    plan: Call,
    capsys: pytest.CaptureFixture[str],
    parallel: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MEGATRON_MUX_CACHE", str(tmp_path / "cache"))
    profile = tool("profile_backbone")
    flags = ["--backbone", str(workplace.backbone), "--most-tokens", "64", "--rounds", "1", "--json"]
    with pytest.MonkeyPatch.context() as patch:
        # This process's world is not the tool's to leave.
        patch.setattr("megatron_mux.runtime.shutdown", lambda: None)
        assert profile.main(flags) == 0
        first = json.loads(capsys.readouterr().out)
        assert first["source"] == "measured" and first["seconds"] > 0
        assert profile.main(flags) == 0
        again = json.loads(capsys.readouterr().out)
    assert again["path"] == first["path"] and again["seconds"] == 0
    assert again["curves"] == first["curves"]
    for curve in first["curves"].values():
        assert all(value >= 0 for value in (*curve["forward"], *curve["backward"]))
    threads = str(first["about"]["threads"])
    status, output, _ = plan("--threads", threads, "--json")
    assert status == 0 and json.loads(output)["costs"].startswith("profile ")
