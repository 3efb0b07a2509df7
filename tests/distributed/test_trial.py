"""A plan that does not fit on some rank gets smaller before a step counts, also where ranks meet in a pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.backbone.model import Recompute, load_stages
from megatron_mux.backbone.weight_offload import Kind
from megatron_mux.engine import Engine, Planning
from megatron_mux.engine.trial import local_collectives
from megatron_mux.runtime import Parallel
from tests import tiny_models
from tests.budget import Budget, on_the_host
from tests.distributed.exchanges import OnCopies
from tests.end_to_end.harness import Case, assert_same, random_records

STEPS = 2


LITTLE = 0.62
"""Of the peak: away from what whole and halved passes take, since gloo's threads move the peak by some percent."""


@dataclass(frozen=True)
class Layout:
    tensor: int
    pipeline: int
    sequence_parallel: bool = False
    kind: Kind = "resident"
    recompute: Recompute = "none"


LAYOUTS = {
    "TP2xDP2": Layout(2, 1),
    "TP2xPP2": Layout(2, 2, recompute="full"),
    "SP2xPP2": Layout(2, 2, True),
    "sharded DP4": Layout(1, 1, kind="sharded", recompute="selective"),
    "PP2xDP2": Layout(1, 2),
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "a": {"peft_type": "LORA", "r": 4, "lora_dropout": 0.1, "target_modules": ["q_proj", "down_proj"]},
    "b": {"peft_type": "BOTTLENECK", "bottleneck_size": 4, "target_modules": ["o_proj", "down_proj"]},
}


@pytest.fixture
def path(once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    def make(directory: Path) -> None:
        tiny_models.make(directory, "llama-tied", num_hidden_layers=2)

    return once("tied-2", make) / "llama-tied"


class Run:
    """Every task to its end, and an evaluation of the first; the last rank may have less memory than it takes."""

    def __init__(self, parallel: Parallel, path: Path, layout: Layout, planning: Planning) -> None:
        stages = load_stages(path, parallel, torch.float64, layout.recompute, None, layout.kind)
        self.engine = Engine(stages, parallel, planning, tries_plans=True)
        training = {"per_device_train_batch_size": 16, "learning_rate": 1e-2, "max_steps": STEPS}
        self.results: list[Any] = []
        self.adapters: dict[str, dict[str, Tensor]] = {}
        self.budget = Budget()
        cases = [
            Case(name, adapter, training, random_records(16, 96, 10, 24, seed=i))
            for i, (name, adapter) in enumerate(ADAPTERS.items())
        ]
        self.tasks = [case.task for case in cases]
        self.tasks[0].evaluation = random_records(32, 96, 4, 24, seed=5).as_dataset()

    def go(self, limit: float | None = None) -> Run:
        with OnCopies(), self.budget:
            self.engine.register_tasks(self.tasks)
            self.budget.limit = limit
            while self.engine.active:
                self.results += self.engine.steps(2)
            self.results.append(self.engine.evaluate("a"))
        for name in self.engine.tasks:
            self.adapters[name] = self.engine.adapter_tensors(name) or {}
        return self


def everywhere(problems: list[str]) -> None:
    found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, problems)
    assert not any(found), "\n".join(problem for rank in found for problem in rank)


@pytest.mark.parametrize(
    ("layout", "policy"),
    [
        ("TP2xDP2", "spatial"),
        ("TP2xPP2", "temporal"),
        ("SP2xPP2", "spatial"),
        ("sharded DP4", "temporal"),
        ("PP2xDP2", "spatial"),
    ],
)
def test_one_rank_with_less_memory_makes_the_plan_smaller_for_all(
    layout: str, policy: Any, path: Path, joined: Callable[..., Parallel]
) -> None:
    own = LAYOUTS[layout]
    parallel = joined(own.tensor, own.pipeline, own.sequence_parallel)
    whole = Run(parallel, path, own, Planning(policy, own.pipeline, micro_batches=1)).go()
    last = parallel.rank == parallel.world_size - 1
    small = Run(parallel, path, own, Planning(policy, own.pipeline, micro_batches=1))
    small.go(LITTLE * whole.budget.peak if last else None)
    plan, problems = small.engine.last_plan, []
    assert plan is not None
    counts = [bucket.micro_batches for bucket in plan.buckets]
    if max(counts) == 1:
        problems.append(f"the plan is as large as it was: {plan}")
    if not all(
        "out of memory (rank 3 at" in said and "the step runs in" in said
        for said in small.engine.planning.log_lines
    ):
        problems.append(f"news: {small.engine.planning.log_lines}")
    if last and not small.budget.failures:
        problems.append("nothing ran out of memory")
    # From the beginning with the plan that fits, on ranks with memory enough.
    given = Planning(policy, own.pipeline)
    given.fall_back_to(plan)
    wanted = Run(parallel, path, own, given).go()
    if small.results != wanted.results:
        problems.append(f"{small.results} for {wanted.results}")
    for name, tensors in wanted.adapters.items():
        assert_same(small.adapters[name], tensors, name)
    everywhere(problems)


@pytest.mark.parametrize("layout", ["TP2xPP2", "SP2xPP2", "sharded DP4"])
def test_an_evaluation_that_does_not_fit_goes_on_in_smaller_passes(
    layout: str, path: Path, joined: Callable[..., Parallel]
) -> None:
    own = LAYOUTS[layout]
    parallel = joined(own.tensor, own.pipeline, own.sequence_parallel)
    run = Run(parallel, path, own, Planning("spatial", own.pipeline))
    run.engine.register_tasks(run.tasks[:1])
    with OnCopies(), Budget() as budget:
        wanted = run.engine.evaluate("a")
    run.engine.remove_task("a")
    run.engine.register_tasks(run.tasks[:1])  # what has fitted is forgotten
    last = parallel.rank == parallel.world_size - 1
    with OnCopies(), Budget(0.6 * budget.peak if last else None) as limited:
        found = run.engine.evaluate("a")
    assert found is not None and wanted is not None
    problems = [] if bool(limited.failures) == last else [f"{limited.failures} failures"]
    if (found.loss, found.accuracy) != pytest.approx((wanted.loss, wanted.accuracy), rel=1e-9):
        problems.append(f"{found} for {wanted}")
    everywhere(problems)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_collectives_of_one_rank_wait_for_no_other(
    sequence_parallel: bool, joined: Callable[..., Parallel]
) -> None:
    parallel = joined(2, 1, sequence_parallel)
    if parallel.rank == 0:
        with local_collectives():
            summed, gathered = torch.full((3,), 5.0), torch.full((6,), 5.0)
            dist.all_reduce(summed, group=parallel.tp_group)
            work = dist.all_gather_into_tensor(
                gathered, torch.ones(3), group=parallel.tp_group, async_op=True
            )
            assert work is not None
            work.wait()
            listed = [torch.ones(2), torch.ones(2)]
            dist.all_gather(listed, torch.ones(2), group=parallel.tp_group)
            scattered = torch.ones(3)
            dist.reduce_scatter_tensor(scattered, torch.ones(6), group=parallel.tp_group)
            dist.barrier(group=parallel.tp_group)
            of_a_slot, into_a_slot = torch.full((3,), 5.0), torch.full((6,), 5.0)
            torch.ops.symm_mem.multimem_all_reduce_(of_a_slot, "sum", "no such group")
            torch.ops.symm_mem.multimem_all_gather_out(of_a_slot, "no such group", into_a_slot)
        assert of_a_slot.tolist() == [5.0] * 3 and not into_a_slot.any()
        assert summed.tolist() == [5.0] * 3 and not gathered.any() and not scattered.any()
        assert not any(one.any() for one in listed)
    dist.barrier()
    total = torch.ones(1)
    dist.all_reduce(total, group=parallel.tp_group)
    assert total.item() == 2, "groups are as they were"


def test_what_no_micro_batch_fits_fails_on_every_rank_alike(
    path: Path, joined: Callable[..., Parallel]
) -> None:
    parallel = joined(2, 1, False)
    layout = LAYOUTS["TP2xDP2"]
    run = Run(parallel, path, layout, Planning("temporal", 1))
    run.tasks = run.tasks[:1]
    with OnCopies(), run.budget:
        run.engine.register_tasks(run.tasks)
        run.budget.limit = run.budget.held + 1000 if parallel.rank == 2 else None
        (step,) = run.engine.steps(4)
    with on_the_host():
        adapter = run.engine.adapter_tensors("a")
    assert (step["a"].status, step["a"].step) == ("failed", 0)
    assert "one sequence of it alone ran out of memory (rank 2 at 0F0.0" in step["a"].reason
    assert adapter is None or len(adapter)
