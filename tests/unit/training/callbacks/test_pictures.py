"""The schedule is drawn after the last timed burst, with the plan of those steps, and when the run ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megatron_mux.training.callbacks.pictures import Pictures
from megatron_mux.training.step_loop import StepLoop


def test_drawn_with_the_plan_of_the_steps_that_were_timed() -> None:
    drawn: list[Any] = []
    engine: Any = SimpleNamespace(
        planning=SimpleNamespace(policy="auto", stages=2),
        last_plan=SimpleNamespace(to_json=lambda: {"plan": 1}),
    )
    experts = SimpleNamespace(holds_rows=True)
    parallel = SimpleNamespace(world_size=1, tp_rank=0, dp_rank=0, pp_size=2, experts=experts)
    reporter = SimpleNamespace(schedule=lambda *what: drawn.append(what))
    registry: Any = SimpleNamespace(engine=engine, parallel=parallel, reporter=reporter)
    step_loop: Any = StepLoop(rolling=True, watching=False)
    step_loop.timed, step_loop.timed_steps = ["action"], (2, 4)
    pictures = Pictures(registry, step_loop, lambda: drawn.append("check"))
    pictures.after_first_steps(is_last=False)
    assert drawn == []
    pictures.after_first_steps(is_last=True)
    title = "auto, 2 stage(s): steps 2 to 4 as measured"
    assert drawn == ["check", (["action"], title, 2, {"plan": 1})]
    engine.last_plan = None  # of other steps, say
    pictures.after_last_steps()
    assert drawn[2:] == drawn[:2]
