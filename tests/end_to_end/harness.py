"""Tasks in memory, engines over tiny backbones, and comparisons: what the end-to-end tests share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_mux.backbone.model import Backbone
from megatron_mux.batch.pack import PackedSequence, pack
from megatron_mux.batch.packed_batch import activate
from megatron_mux.engine import Engine, StepResult, Task
from megatron_mux.runtime import Parallel
from megatron_mux.tasks import TaskSpec
from tests.logits import all_logits
from tests.reference.loop import Example as Pair
from tests.reference.records import Records as Records  # tests take it from here


def random_records(count: int, vocab: int, shortest: int, longest: int, seed: int) -> Records:
    """Random tokens of random lengths; a prompt of random length is not labelled."""
    generator = torch.Generator().manual_seed(seed)
    pairs: list[Pair] = []
    for _ in range(count):
        length = int(torch.randint(shortest, longest + 1, (1,), generator=generator))
        prompt = int(torch.randint(1, length, (1,), generator=generator))
        tokens = torch.randint(1, vocab, (length,), generator=generator)
        pairs.append((tokens, torch.arange(length) >= prompt))
    return Records(pairs)


def make_spec(name: str, adapter: Mapping[str, Any], training: Mapping[str, Any]) -> TaskSpec:
    """A task's spec; records keep their order, so that the expected order needs none of our code."""
    return TaskSpec.model_validate(
        {
            "name": name,
            "adapter": dict(adapter),
            "data": {"path": "memory", "max_length": 64, "shuffle": False},
            "training": dict(training),
        }
    )


def in_file_order(records: Records, batch: int, steps: int) -> list[list[Pair]]:
    """The examples of each step without shuffling: pass after pass, a pass's last batch may be short."""
    passes = [records.pairs[i : i + batch] for i in range(0, len(records.pairs), batch)]
    return [passes[step % len(passes)] for step in range(steps)]


@dataclass
class Case:
    """One task of a test, in the form that both the engine and the references take.

    Attributes:
        name: Its name.
        adapter: The `adapter` section.
        training: The `training` section.
        records: What it learns from.
        initial: The adapter that both sides start from; None lets the engine make one.
    """

    name: str
    adapter: dict[str, Any]
    training: dict[str, Any]
    records: Records
    initial: dict[str, Tensor] | None = None

    @property
    def spec(self) -> TaskSpec:
        """The validated task."""
        return make_spec(self.name, self.adapter, self.training)

    @property
    def task(self) -> Task:
        """What the engine registers."""
        initial = (
            None if self.initial is None else {key: value.clone() for key, value in self.initial.items()}
        )
        return Task(self.spec, self.records.as_dataset(), initial=initial)

    def steps(self, count: int) -> list[list[Pair]]:
        """The examples of the first `count` steps."""
        return in_file_order(self.records, self.spec.sequences_per_step, count)


@dataclass
class Trained:
    """What an engine made of the tasks: every step's results, and adapters after the first step and at the end."""

    results: dict[str, list[StepResult]]
    tensors: dict[str, dict[str, Tensor]]
    after_first: dict[str, dict[str, Tensor]]

    def losses(self, name: str) -> list[float]:
        """Loss of each step of a task."""
        return [result.loss for result in self.results[name]]


def train(
    backbone: Backbone, parallel: Parallel, cases: Sequence[Case], steps: int, **engine_arguments: Any
) -> Trained:
    """Train `cases` together on `backbone` and leave it without adapters again."""
    engine = Engine(backbone, parallel, **engine_arguments)
    engine.register_tasks([case.task for case in cases])
    trained = Trained({case.name: [] for case in cases}, {}, {})
    try:
        for step in range(steps):
            for name, result in engine.step().items():
                trained.results[name].append(result)
            if step == 0:
                trained.after_first = {case.name: adapter(engine, case.name) for case in cases}
        trained.tensors = {case.name: adapter(engine, case.name) for case in cases}
    finally:
        for case in cases:
            engine.remove_task(case.name)
    return trained


def adapter(engine: Engine, name: str) -> dict[str, Tensor]:
    """A copy of a task's adapter as it is now."""
    tensors = engine.adapter_tensors(name)
    assert tensors is not None
    return {key: value.clone() for key, value in tensors.items()}


def relative(a: Tensor, b: Tensor) -> float:
    """Relative Frobenius distance of `a` from `b`; 0 where both are zero."""
    norm = float(b.double().norm())
    distance = float((a.double() - b.double().reshape(a.shape)).norm())
    return distance if norm == 0 else distance / norm


def assert_close(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], tolerance: float, what: str
) -> None:
    """Same keys, same shapes, and every tensor within `tolerance` in relative Frobenius norm."""
    assert set(found) == set(wanted), f"{what}: keys differ: {sorted(set(found) ^ set(wanted))[:6]}"
    far: list[str] = []
    for key in wanted:
        assert found[key].shape == wanted[key].shape, (
            f"{what}: {key}: {found[key].shape} != {wanted[key].shape}"
        )
        distance = relative(found[key], wanted[key])
        if not distance <= tolerance:
            far.append(f"{key}: {distance:.2e}")
    assert not far, f"{what}: beyond {tolerance:.0e}: {far[:6]} ({len(far)} of {len(wanted)})"


def assert_same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], what: str) -> None:
    """Bit for bit."""
    assert set(found) == set(wanted), f"{what}: keys differ"
    for key in wanted:
        assert torch.equal(found[key], wanted[key]), (
            f"{what}: {key} differs by {relative(found[key], wanted[key]):.2e}"
        )


@torch.no_grad()
def engine_logits(engine: Engine, case: Case, pairs: Sequence[Pair], virtual_tokens: int = 0) -> list[Tensor]:
    """`[L, V]` logits of every example under the adapter that is attached now, if any."""
    attached = engine.adapters.tasks.get(case.name)
    batch = pack(
        [PackedSequence(case.name, i, tokens, labelled, 1.0) for i, (tokens, labelled) in enumerate(pairs)],
        (case.name,),
        {case.name: 0},
        {case.name: virtual_tokens},
        training=False,
        slots={case.name: attached.slot if attached else 0},
    ).to()
    with activate(batch):
        rows = all_logits(engine.backbone, batch)
    rows = rows.reshape(batch.rows, -1)
    return [rows[s.start : s.start + s.length] for s in batch.segments]
