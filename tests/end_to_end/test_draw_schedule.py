"""`tools/draw_schedule.py`, as a user meets it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
from pydantic import TypeAdapter

from megatron_mux.base_ops import BASE_OPS
from megatron_mux.cli import draw as draw_command
from megatron_mux.fusion.graphs.subgraphs import LayerSubgraphs
from megatron_mux.fusion.plan import Bucket, HybridTask, Plan, dumps, plan_for
from megatron_mux.pipeline.action import TimedAction
from megatron_mux.pipeline.trace import from_trace, to_trace
from tests import tiny_models
from tests.end_to_end.forked import ROOT

Call = Callable[..., tuple[int, str, str]]

PLAN = Plan(
    "auto",
    2,
    (
        Bucket(
            (HybridTask(("a", "c")), HybridTask(("d",))),
            micro_batches=2,
            chunk=8,
            chunks=(2, 1),
            forward=(0.02, 0.03),
            backward=(0.04, 0.05),
            transfer=(0.001,),
        ),
        Bucket((HybridTask(("b",)),), micro_batches=1, forward=(0.01, 0.01), backward=(0.02, 0.02)),
    ),
    predicted_latency_s=0.5,
)


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """The script, which is in no package."""
    spec = importlib.util.spec_from_file_location("draw_schedule", ROOT / "tools" / "draw_schedule.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def draw(
    tool: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Call:
    """Runs it in an empty directory: status, output, errors."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        status = tool.main([str(word) for word in words])
        said = capsys.readouterr()
        return status, said.out, said.err

    return call


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    """A plan with costs."""
    file = tmp_path / "plan.json"
    file.write_text(dumps(PLAN))
    return file


def slower(tool: ModuleType, factor: float, steps: int = 1) -> list[TimedAction]:
    """What a run of the plan might measure: a part of a bucket here and there, in another order."""
    simulated = draw_command.simulated(PLAN, Path("plan.json"), steps)
    renamed = [
        replace(t, start=t.start * factor, stop=t.stop * factor, label="c" if t.action.chunk else t.label)
        for t in simulated
    ]
    return sorted(renamed, key=lambda t: -t.start)


def test_a_plan_is_drawn(draw: Call, plan_file: Path, tmp_path: Path) -> None:
    status, output, errors = draw("--plan", plan_file)
    assert status == 0 and not errors
    for word in (
        "stage",
        "simulated busy s",
        "bubble %",
        "predicted latency",
        "0.5 s a step",
        "schedule.svg",
    ):
        assert word in output, word
    texts = [e.text for e in ElementTree.parse(tmp_path / "schedule.svg").iter()]
    assert "simulated" in texts and "a+c | d" in texts and "measured" not in texts
    assert list(from_trace((tmp_path / "schedule.trace.json").read_text())) == ["simulated"]
    assert not list(tmp_path.glob(".partial*"))


@pytest.mark.parametrize("steps", [1, 2])
def test_a_run_is_drawn_below_its_plan(
    draw: Call, tool: ModuleType, plan_file: Path, tmp_path: Path, steps: int
) -> None:
    (tmp_path / "schedule.json").write_text(to_trace(slower(tool, 2.0, steps)))
    files: list[str | Path] = ["--output", tmp_path / "out" / "both.svg"]
    files += ["--trace", tmp_path / "out" / "both.json"]
    status, output, errors = draw("--run", tmp_path, *files, "--json")
    found = json.loads(output)
    assert status == 0 and not errors
    assert found["steps"] == steps and found["predicted_latency_s"] == 0.5
    assert found["measured_latency_s"] == pytest.approx(2 * found["simulated_latency_s"])
    for row in found["stages"]:
        assert row["measured"]["bubble"] == pytest.approx(row["simulated"]["bubble"])
        assert row["measured"]["busy_s"] == pytest.approx(2 * row["simulated"]["busy_s"])
    texts = [e.text for e in ElementTree.parse(files[1]).iter()]
    assert "simulated" in texts and "measured" in texts

    trace = json.loads(Path(files[3]).read_text())["traceEvents"]
    colours: dict[str, set[str]] = {}
    for event in trace:
        if "colour" in event.get("args", {}):
            colours.setdefault(event["name"][2:], set()).add(event["args"]["colour"])
    assert colours["c"] == colours["a+c | d"] != colours["b"]
    assert all(len(own) == 1 for own in colours.values())

    # The same by name, the measured schedule taken out of what was just written; and for people.
    status, output, _ = draw("--plan", plan_file, "--measured", files[3])
    assert status == 0 and "2.00x the predicted one" in output and f"{steps} step(s)" in output


def test_tasks_that_came_or_went_are_named(
    draw: Call, tool: ModuleType, plan_file: Path, tmp_path: Path
) -> None:
    actions = [replace(t, label=t.label.replace("b", "new")) for t in slower(tool, 1.0)]
    (tmp_path / "schedule.json").write_text(to_trace(actions))
    status, _, errors = draw("--run", tmp_path)
    assert status == 0
    plan_lacks, trace_lacks = errors.splitlines()
    assert plan_lacks.endswith("has tasks that the plan lacks: new") and trace_lacks.endswith("plan: b")


def test_a_run_is_drawn_with_the_plan_of_its_timed_steps(
    draw: Call, tool: ModuleType, tmp_path: Path
) -> None:
    last = replace(PLAN, buckets=PLAN.buckets[:1])
    (tmp_path / "plan.json").write_text(dumps(last))
    (tmp_path / "schedule.json").write_text(to_trace(slower(tool, 2.0), plan=PLAN.to_json()))
    (tmp_path / "task" / "checkpoint-3").mkdir(parents=True)
    (tmp_path / "manifests").mkdir()
    (tmp_path / "manifests" / "manifest-00000001.json").touch()
    status, output, errors = draw(tmp_path / "task")
    assert status == 0 and not errors and "2.00x the predicted one" in output
    assert (tmp_path / "schedule.svg").is_file()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--plan FILE or --run DIR: one of them is needed"),
        (["--plan", "plan.json", "--run", "."], "--run: replaces --plan and --measured"),
        (["--plan", "nowhere.json"], "nowhere.json: cannot be read: No such file"),
        (["--run", "."], "schedule.json: cannot be read"),
        (["--plan", "text.json"], "text.json: is no JSON"),
        (["--plan", "list.json"], "list.json: is no plan"),
        (
            ["--plan", "spatial.json"],
            "has no predicted costs for bucket 0: make a plan with megatron-mux plan",
        ),
        (["--plan", "empty.json"], "has no buckets"),
        (["--plan", "uneven.json"], "uneven.json: buckets[1].forward: has 1 entries, 2 are needed"),
        (["--plan", "plan.json", "--measured", "nowhere.json"], "nowhere.json: cannot be read"),
        (["--plan", "plan.json", "--measured", "text.json"], "text.json: is no JSON"),
        (["--plan", "plan.json", "--measured", "binary.json"], "binary.json: 'utf-8'"),
        (["--plan", "plan.json", "--measured", "deep.json"], "deep.json: "),
        (["--plan", "plan.json", "--measured", "spatial.json"], "spatial.json: is no trace"),
        (
            ["--plan", "plan.json", "--measured", "odd.json"],
            "traceEvents[0]: is no action of a schedule: '0Q0.0'",
        ),
        (["--plan", "plan.json", "--measured", "none.json"], "has no measured actions"),
        (["--plan", "plan.json", "--measured", "one.json"], "one.json: has 1 stage(s), but the plan has 2"),
        (["--plan", "plan.json", "--measured", "far.json"], "stage(s), but the plan has 2"),
        (["--plan", "plan.json", "--output", "plan.json"], "--output plan.json: is an input"),
        (["--plan", "plan.json", "--trace", "./schedule.svg"], "is the same file as --output"),
        (
            ["--plan", "plan.json", "--output", "/proc/nowhere/a.svg"],
            "/proc/nowhere/a.svg: cannot be written",
        ),
        (
            ["--plan", "plan.json", "--trace", "/proc/nowhere/a.json"],
            "/proc/nowhere/a.json: cannot be written",
        ),
        (["--plan", ""], "--plan: must be a path"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    draw: Call, plan_file: Path, tmp_path: Path, words: list[str], said: str
) -> None:
    def event(action: str) -> dict[str, Any]:
        return {"name": "F a", "ph": "X", "ts": 0, "dur": 1, "pid": 0, "args": {"action": action}}

    uneven = (PLAN.buckets[0], replace(PLAN.buckets[1], forward=(0.01,)))
    for name, text in {
        "text": "{",
        "list": "[]",
        "deep": "[" * 100_000,
        "spatial": dumps(plan_for("spatial", {"a": 1, "b": 2}, 2)),
        "empty": dumps(replace(PLAN, buckets=())),
        "uneven": dumps(replace(PLAN, buckets=uneven)),
        "odd": json.dumps({"traceEvents": [event("0Q0.0")]}),
        "none": json.dumps({"traceEvents": []}),
        "one": json.dumps({"traceEvents": [event("0F0.0")]}),
        "far": json.dumps({"traceEvents": [event("99999999999F0.0")]}),
    }.items():
        (tmp_path / f"{name}.json").write_text(text)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    status, output, errors = draw(*words)
    assert status == 2 and not output
    (line,) = errors.splitlines()
    assert line.startswith("draw_schedule.py: ") and said in line
    assert plan_file.read_text() == dumps(PLAN), "the plan is left as it is"


def test_subgraphs(draw: Call, tmp_path: Path) -> None:
    backbone = tiny_models.make(tmp_path, "gemma3_text")
    arguments = ["--subgraphs", "--backbone", str(backbone), "--sequence-parallel", "--rows", "16"]
    status, output, errors = draw(*arguments, "--json")
    assert status == 0, errors
    found = TypeAdapter(list[LayerSubgraphs]).validate_json(output, strict=True)
    assert [own.layers for own in found] == [(0, 2), (1, 3)]  # windows in every other one
    for own in found:
        forward, backward = (
            [subgraph.message for subgraph in subgraphs if subgraph.message]
            for subgraphs in own.passes.values()
        )
        assert forward == backward == ["all_gather", "reduce_scatter"] * 2
        adapters = [s.modules for s in own.forward if s.kind == "adapter"]
        assert adapters == [(f"{op}.adapter",) for op in BASE_OPS]
    ElementTree.parse(tmp_path / "schedule.svg")


def test_subgraphs_of_what_cannot_be_divided(draw: Call, tmp_path: Path) -> None:
    backbone = tiny_models.make(tmp_path, "llama")
    assert draw("--subgraphs")[0] == 2
    status, _, errors = draw("--subgraphs", "--backbone", str(backbone), "--tensor-parallel", "3")
    assert status == 2 and "3" in errors
    status, _, errors = draw(
        "--subgraphs", "--backbone", str(backbone), "--sequence-parallel", "--rows", "15"
    )
    assert status == 2 and "15 rows" in errors
