"""A rank finds no memory in the middle of a pass that others make with it: they do not wait, and lose no step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_mux.backbone.model import Recompute, load_stages
from megatron_mux.backbone.residence import Kind
from megatron_mux.engine import Engine, EvalResult, Planning
from megatron_mux.engine.bucket_finalizer import BucketFinalizer
from megatron_mux.engine.messages import Messages
from megatron_mux.engine.out_of_memory import Shortage
from megatron_mux.runtime import Parallel
from tests import tiny_models
from tests.budget import Budget
from tests.end_to_end.harness import Case, assert_close, random_records

STEPS = 2
_SMALL = 1 << 12
"""Bytes: scalars and indices, not a tensor of a pass."""


@dataclass(frozen=True)
class Layout:
    tensor: int
    pipeline: int
    sequence_parallel: bool = False
    kind: Kind = "resident"
    recompute: Recompute = "none"
    policy: Any = "temporal"


LAYOUTS = {
    "TP4": Layout(4, 1),
    "TP2xPP2": Layout(2, 2, recompute="full"),
    "SP2xDP2": Layout(2, 1, True, recompute="selective"),
    "sharded DP4": Layout(1, 1, kind="sharded", recompute="full"),
    "sharded SP2xDP2": Layout(2, 1, True, "sharded-offloaded", policy="spatial"),
}
CASES: dict[str, dict[str, Any]] = {
    "a": {"peft_type": "LORA", "r": 4, "lora_dropout": 0.1, "target_modules": ["q_proj", "down_proj"]},
    "b": {"peft_type": "BOTTLENECK", "bottleneck_size": 4, "target_modules": ["o_proj", "down_proj"]},
    "c": {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 3},
}

Where = Mapping[tuple[str, str], float]
"""How far into the task's first forward (F) or backward (B) pass, or its step (U), of its operators."""


@pytest.fixture
def path(once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    return once("tied", lambda directory: tiny_models.make(directory, "llama-tied")) / "llama-tied"


class Failing(TorchDispatchMode):
    """Operators find no memory once so many have run; -1: never."""

    def __init__(self, after: int = -1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.after = after
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count - 1 == self.after:
            raise torch.OutOfMemoryError(f"made to fail in {func}. Nothing is short")
        return func(*args, **(kwargs or {}))


@contextmanager
def failing(
    where: Where, counts: dict[tuple[str, str], int], left: set[tuple[str, str]]
) -> Iterator[list[str]]:
    """Passes and steps find no memory where it is said, once each; counts the operators of all others.

    Yields the tasks of the buckets, in their order.
    """
    attempt, surely_clip = Shortage.attempt, BucketFinalizer._step

    def attempted(self: Shortage, action: Any, compute: Any, again: Any = None) -> Any:
        key = (action.kind, names[action.bucket % len(names)])
        at = int(where[key] * counts[key]) if key in left else -1
        left.discard(key)

        def computed() -> Any:
            with Failing(at) as mode:
                made = compute()
            counts.setdefault(key, mode.count)
            return made

        return attempt(self, action, computed, again)

    def step(self: BucketFinalizer, name: str, *more: Any) -> None:
        if ("U", name) in left:
            left.discard(("U", name))
            with Failing(0):  # the first scalar of the step
                return surely_clip(self, name, *more)
        return surely_clip(self, name, *more)

    def begun(self: BucketFinalizer, running: Any, buckets: Any, *more: Any) -> None:
        names[:] = [bucket.tasks[-1] for bucket in buckets]
        made(self, running, buckets, *more)

    made = BucketFinalizer.__init__
    names: list[str] = []
    with ExitStack() as stack:
        for owner, name, value in (
            (Shortage, "attempt", attempted),
            (BucketFinalizer, "_step", step),
            (BucketFinalizer, "__init__", begun),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield names


@contextmanager
def without_memory() -> Iterator[list[int]]:
    """What goes through a pass without memory takes none; how many passes did."""
    alone, found = Messages.alone, [0]

    def watched(self: Messages, *given: Any, memory: bool) -> None:
        if memory:
            return alone(self, *given, memory=True)
        found[0] += 1
        with Budget(_SMALL) as budget:
            alone(self, *given, memory=False)
        assert not budget.failures
        return None

    with mock.patch.object(Messages, "alone", watched):
        yield found


@dataclass
class Found:
    """By task: for each turn its step and loss; its adapter on rank 0. What an evaluation of `c` found."""

    turns: dict[str, list[tuple[int, int, float]]]
    evaluated: EvalResult | None
    adapters: dict[str, dict[str, Tensor]]
    news: list[str]
    alone: int = 0


def trained(
    joined: Callable[..., Parallel],
    path: Path,
    layout: Layout,
    where: Where,
    counts: dict[tuple[str, str], int],
) -> Found:
    parallel = joined(layout.tensor, layout.pipeline, layout.sequence_parallel)
    stages = load_stages(path, parallel, torch.float64, layout.recompute, None, layout.kind)
    engine = Engine(stages, parallel, Planning(layout.policy, layout.pipeline))
    training = {"per_device_train_batch_size": 8, "learning_rate": 1e-2, "max_steps": STEPS}
    records = [random_records(12, 96, 4, 12, seed=i) for i in range(3)]
    cases = [Case(n, a, training, r) for (n, a), r in zip(CASES.items(), records, strict=True)]
    tasks = [case.task for case in cases]
    tasks[2].evaluation = records[0].as_dataset()
    engine.register_tasks(tasks)
    turns: dict[str, list[tuple[int, int, float]]] = {name: [] for name in engine.tasks}
    with failing(where, counts, set(where)) as names, without_memory() as alone:
        for turn in range(20):
            if not engine.active:
                break
            for name, result in engine.step().items():
                turns[name].append((turn, result.step, result.loss))
        names[:] = ["evaluation"]
        evaluated = engine.evaluate("c")
    adapters = {name: engine.adapter_tensors(name) or {} for name in engine.tasks}
    return Found(turns, evaluated, adapters, engine.planning.news, alone[0])


def differences(found: Found, wanted: Found, hit: set[str]) -> list[str]:
    problems = []
    for name, turns in wanted.turns.items():
        if name not in hit and found.turns[name] != turns:
            problems.append(f"{name}: {found.turns[name]} for {turns}")
        if [step for _, step, _ in found.turns[name]] != list(range(1, STEPS + 1)):
            problems.append(f"{name}: steps {found.turns[name]}")
        if [loss for *_, loss in found.turns[name]] != pytest.approx([loss for *_, loss in turns], rel=1e-9):
            problems.append(f"{name}: losses {found.turns[name]} for {turns}")
        if dist.get_rank() == 0:
            try:
                assert_close(found.adapters[name], wanted.adapters[name], 1e-9, name)
            except AssertionError as error:
                problems.append(str(error))
    return problems


def none_on_any_rank(problems: list[str]) -> None:
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, problems)
    assert not any(everyone), "\n".join(problem for rank in everyone for problem in rank)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_lack_memory_in_a_pass_cost_nobody_a_step(
    layout: str, path: Path, joined: Callable[..., Parallel]
) -> None:
    counts: dict[tuple[str, str], int] = {}
    wanted = trained(joined, path, LAYOUTS[layout], {}, counts)
    draw = random.Random(layout)
    one, two, three = draw.sample(range(4), 3)
    forward, backward = draw.random(), draw.random()
    where: dict[int, dict[tuple[str, str], float]] = {rank: {} for rank in range(4)}
    where[one]["F", "a"] = forward
    where[two]["B", "b"], where[three]["B", "b"] = backward, backward / 2
    where[three]["U", "c"] = 0
    if LAYOUTS[layout].policy == "spatial":  # all of them in one bucket
        where = {rank: {} for rank in range(4)}
        where[one]["F", "c"] = forward
        where[two]["F", "c"] = forward / 2
    where[one]["F", "evaluation"] = backward
    own = where[dist.get_rank()]
    found = trained(joined, path, LAYOUTS[layout], own, counts)
    hit = {"a", "b", "c"} if LAYOUTS[layout].policy == "spatial" else {"a", "b"}
    problems = differences(found, wanted, hit)
    assert found.evaluated is not None and wanted.evaluated is not None
    if found.evaluated.loss != pytest.approx(wanted.evaluated.loss, rel=1e-9):
        problems.append(f"evaluation: {found.evaluated} for {wanted.evaluated}")
    if bool(found.alone) != any(kind != "U" for kind, _ in own):
        problems.append(f"{found.alone} passes without memory, told to fail at {own}")
    if not any(f"rank {one} at" in said for said in found.news):
        problems.append(f"nothing was short: {found.news}")
    none_on_any_rank(problems)
