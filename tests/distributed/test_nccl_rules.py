"""The whole engine on four ranks under NCCL's rules: no scenario hangs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_mux import checkpoint
from megatron_mux.backbone.model import load_stages
from megatron_mux.backbone.split import Split
from megatron_mux.backbone.weight_offload import Kind
from megatron_mux.engine import Engine, Task
from megatron_mux.pipeline import execute as execution
from megatron_mux.pipeline.action import TimedAction
from megatron_mux.runtime import Parallel
from megatron_mux.training.saving import Saver
from tests import tiny_models
from tests.budget import failing
from tests.distributed.rendezvous import run_under_the_rules
from tests.distributed.test_engine_layouts import planning_of
from tests.end_to_end.harness import Case, random_records
from tests.unit.pipeline.orders import receives_two_ahead
from tests.unit.training.test_saving import save

VIRTUAL: Split = (1, 1, 1, 1)


@dataclass(frozen=True)
class Scenario:
    """What four ranks do.

    Attributes:
        policy: See `planning_of`.
        tensor, pipeline: How the ranks are divided; the rest is data parallel.
        split, residence, sequence_parallel: See `load_stages`.
        steps: Steps of each call: several roll into each other.
        targets: Modules with an adapter.
        tries_plans: Whether plans are tried first.
        then: What happens after each call.
    """

    policy: str
    tensor: int = 1
    pipeline: int = 4
    split: Split = ()
    residence: Kind = "resident"
    sequence_parallel: bool = False
    steps: tuple[int, ...] = (1, 2)
    targets: tuple[str, ...] = ("q_proj", "v_proj")
    tries_plans: bool = False
    then: str = ""


# What happens between calls happens to plans that are not tested without it as well: each call is one by itself.
SCENARIOS = {
    "rolling": Scenario("spatial"),
    "flushed": Scenario("temporal", steps=(1, 1)),
    "gpipe": Scenario("gpipe"),
    "side by side": Scenario("side by side"),
    "planned": Scenario("auto", pipeline=2),
    "sequence parallel, chunks": Scenario("chunks", tensor=2, pipeline=2, sequence_parallel=True),
    "interleaved": Scenario("interleaved", tensor=2, pipeline=2, split=VIRTUAL),
    "evaluation with shards": Scenario("temporal", pipeline=2, residence="sharded", then="evaluate"),
    "sharded, virtual stages": Scenario("spatial", pipeline=2, split=VIRTUAL, residence="sharded"),
    "offloaded": Scenario("temporal", residence="sharded-offloaded"),
    "adapters at the top": Scenario("temporal", targets=("layers.3.mlp.up_proj",)),
    "evaluation on pipelines": Scenario("temporal", pipeline=2, then="evaluate"),
    "saves": Scenario("temporal", tensor=2, pipeline=2, then="save"),
    "joins on pipelines": Scenario("spatial", pipeline=2, then="join"),
    "out of memory": Scenario("temporal", then="fail"),
    "out of memory on pipelines": Scenario("temporal", pipeline=2, then="fail"),
    "trials": Scenario("temporal", pipeline=2, tries_plans=True),
    "timed": Scenario("spatial", then="time"),
}


def case_of(name: str, targets: tuple[str, ...], records: int) -> Case:
    training = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "max_steps": 8, "seed": 3}
    adapter = {"peft_type": "LORA", "r": 4, "target_modules": list(targets)}
    return Case(name, adapter, training, random_records(records, 96, 3, 10, seed=records))


@pytest.fixture
def path(once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    return once("models", lambda directory: tiny_models.make(directory, "llama")) / "llama"


def run(scenario: Scenario, parallel: Parallel, path: Path) -> None:
    """Train four tasks, and do what the scenario says in between."""
    stages = load_stages(
        path, parallel, torch.float32, split=scenario.split or None, residence=scenario.residence
    )
    cases = [case_of(name, scenario.targets, 4 + i) for i, name in enumerate("abcd")]
    planning = planning_of(scenario.policy, stages[0], parallel, cases, scenario.split)
    engine = Engine(stages, parallel, planning, tries_plans=scenario.tries_plans)
    held_out = random_records(7, 96, 3, 10, seed=7).as_dataset()
    engine.register_tasks([Task(case.spec, case.records.as_dataset(), held_out) for case in cases])
    left = int(scenario.then == "fail" and parallel.rank == 3)

    def is_short(batch: Any) -> bool:
        nonlocal left
        left -= 1
        return left == 0

    # Its thread exchanges over gloo, which NCCL's rules do not concern; what the main thread does, they do.
    saver = Saver(path.parent / "run", "backbone", None, None, parallel) if scenario.then == "save" else None
    timed: list[TimedAction] = []
    with failing(stages, is_short):
        for steps in scenario.steps:
            assert engine.steps(steps, timed.append if scenario.then == "time" else None)
            if scenario.then == "evaluate":
                assert engine.evaluate("b") is not None
            elif saver is not None:
                saver.wait()
                save(engine, saver)  # goes on during the next steps
            elif scenario.then == "join":
                engine.remove_task("b")
                engine.register_tasks([case_of("b", scenario.targets, 9).task])
    if saver is not None:
        saver.wait()
        saver.close()
        manifest = checkpoint.load(saver.directory, "backbone")
        assert manifest is not None and [task.step for task in manifest.tasks] == [sum(scenario.steps)] * 4
    if scenario.then == "fail":
        assert any("out of memory (rank 3" in line for line in engine.planning.log_lines)
    assert scenario.then != "time" or len(timed) > 2 * sum(scenario.steps)


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_scenario_hangs(name: str, path: Path, joined: Callable[..., Parallel]) -> None:
    scenario = SCENARIOS[name]
    parallel = joined(scenario.tensor, scenario.pipeline, scenario.sequence_parallel)
    rules, problem = run_under_the_rules(lambda: run(scenario, parallel, path))
    assert not problem, problem
    assert rules.met["send"] + rules.met["recv_"] > 4


def test_receives_issued_too_early_hang(
    path: Path, joined: Callable[..., Parallel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "issue_order", receives_two_ahead)
    parallel = joined(1, 4)
    _, problem = run_under_the_rules(lambda: run(Scenario("spatial"), parallel, path))
    assert problem.startswith("Hang: every rank waits:")
    for rank in range(4):
        assert f"rank {rank} waits in a transfer of" in problem


def test_ranks_that_meet_in_different_operations_are_told(joined: Callable[..., Parallel]) -> None:
    joined(1, 4)

    def work() -> None:
        if dist.get_rank() == 0:
            dist.barrier()
        else:
            dist.all_reduce(torch.ones(1))

    assert "these meet: ['allreduce_', 'barrier']" in run_under_the_rules(work)[1]
