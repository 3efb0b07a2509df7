"""In a steady step the host never waits for the GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_mux.dry_run.run_spec import RunSpec
from megatron_mux.fusion.plan import Plan, plan_for
from megatron_mux.memory.worker import Worker
from tests.unit.dry_run.recordings import KINDS, task_of
from tests.unit.engine.waits import HARMLESS, OFFENDERS, waits_of_all
from tests.unit.memory.traced import LLAMA

STEPS = 4
ADAPTERS = KINDS | {
    "lora": {**KINDS["lora"], "target_modules": "all-linear"},
    "vera": {"peft_type": "VERA", "r": 4, "target_modules": ["q_proj", "v_proj"]},
}
TRAINING = {"per_device_train_batch_size": 2, "max_steps": STEPS}


def run_of(plan: Plan, dtype: str) -> RunSpec:
    tasks = [task_of(name, ADAPTERS[name], TRAINING, [32, 24]) for name in plan.tasks]
    return RunSpec({**LLAMA, "num_hidden_layers": 2}, tasks, plan, dtype=dtype, steps=STEPS)  # type: ignore[arg-type]


PLANS: dict[str, tuple[Plan, int]] = {
    "one stage": (plan_for("spatial", dict.fromkeys(ADAPTERS, 1), 1, 2), 0),
    "last of two stages": (plan_for("temporal", dict.fromkeys(ADAPTERS, 1), 2, 2), 1),
    "chunks": (plan_for("spatial", {"lora": 1, "prefix": 1}, 1, 1, 16), 0),
    "data parallel": (replace(plan_for("spatial", {"lora": 1, "sparse": 1}, 1), data=2), 0),
}


CASES = [*((name, "bfloat16") for name in PLANS), ("one stage", "float32")]
Found = tuple[list[list[str]], dict[str, bool]]


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str], Found]:
    """For each plan and dtype, see `waits_of`."""
    parts = [(run_of(PLANS[name][0], dtype), PLANS[name][1]) for name, dtype in CASES]
    with Worker(300) as worker:
        return dict(zip(CASES, worker.submit(waits_of_all, parts).result(), strict=True))


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_no_operator_of_a_steady_step_waits(
    name: str, dtype: str, found: dict[tuple[str, str], Found]
) -> None:
    bursts, noted = found[name, dtype]
    assert noted == dict.fromkeys(OFFENDERS, True) | dict.fromkeys(HARMLESS, False)
    assert len(bursts) == STEPS
    # The first step makes what later ones use again, such as masks of attention.
    assert all(waits == [] for waits in bursts[1:]), bursts
