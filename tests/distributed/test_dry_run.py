"""What each of four ranks really holds and allocates is what a dry run predicts from its config."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch.distributed as dist

from megatron_mux.backbone.stage_pass import Pieces
from megatron_mux.backbone.weight_offload import Kind
from megatron_mux.dry_run.execute import record_steps
from megatron_mux.dry_run.known_values import assumed_routes
from megatron_mux.dry_run.process import dry_runs
from megatron_mux.dry_run.representative_ranks import representative_ranks
from megatron_mux.dry_run.run_spec import Dtype, Recording, RunSpec, TaskRecords
from megatron_mux.dry_run.worst_case_batch import STEPS, STEPS_THAT_PRUNE
from megatron_mux.expert_shape import Placement
from megatron_mux.fusion.plan import Bucket, HybridTask, Plan, plan_for
from megatron_mux.kernels.attention import dense as dense_attention
from megatron_mux.kernels.attention import short as short_attention
from megatron_mux.memory.forms.method import Recompute
from megatron_mux.runtime import Parallel
from tests import tiny_models, warm
from tests.distributed.exchanges import OnCopies
from tests.distributed.test_engine_layouts import cases_of, in_turns
from tests.end_to_end.harness import Case
from tests.unit.dry_run.recordings import held, last_step_peak

WITHIN = 0.001
"""Measured to the byte, wherever it was tried."""


class Layout(NamedTuple):
    """How four processes are divided, what they train, and how."""

    kinds: tuple[str, ...]
    tensor: int = 1
    pipeline: int = 1
    layers: int = 2
    recompute: Recompute = "none"
    residence: Kind = "resident"
    dtype: Dtype = "float32"
    sequence_parallel: bool = False
    buckets: bool = False
    in_turns: bool = False
    steps: int = STEPS


LAYOUTS = {
    "DP=4": Layout(("everywhere", "lora")),
    "DP=4, sharded, recomputed": Layout(
        ("pruned", "scales"), layers=3, recompute="full", residence="sharded", steps=STEPS_THAT_PRUNE
    ),
    "DP=4, offloaded, bf16": Layout(("bottle", "lora"), layers=3, residence="offloaded", dtype="bfloat16"),
    "TP=4, more ranks than heads of keys": Layout(("prefix", "scales"), 4, recompute="selective"),
    "DP=2, TP=2, in turns, recomputed": Layout(
        ("bottle", "lora"), 2, layers=3, recompute="full", in_turns=True
    ),
    "PP=4, fp64": Layout(("lora", "prefix"), 1, 4, 4, recompute="full", dtype="float64"),
    "PP=2, TP=2, sequence parallel": Layout(
        ("bottle", "everywhere"), 2, 2, recompute="selective", sequence_parallel=True
    ),
    "DP=2, PP=2, four kinds, two buckets, chunks": Layout(
        ("bottle", "lora", "prefix", "scales"), 1, 2, 4, recompute="full", buckets=True
    ),
}


def _task(case: Case) -> TaskRecords:
    """A task whose every step has the same records."""
    lengths, labels = (
        [int(count) for count in counts[: case.spec.sequences_per_step]]
        for counts in (case.records.lengths, case.records.label_counts)
    )
    return TaskRecords(case.spec.plain(), lengths, labels)


def _run(layout: Layout, config: dict[str, object]) -> RunSpec:
    data = 4 // (layout.tensor * layout.pipeline)
    if layout.buckets:
        hybrids = [HybridTask(group) for group in (layout.kinds[:2], layout.kinds[2:3], layout.kinds[3:])]
        seconds = {"forward": (1.0,) * layout.pipeline, "backward": (1.0,) * layout.pipeline}
        buckets = (
            Bucket(tuple(hybrids[:2]), 2, chunk=9, **seconds),  # type: ignore[arg-type]
            Bucket((hybrids[2],), 1, **seconds),  # type: ignore[arg-type]
        )
        plan = Plan("auto", layout.pipeline, buckets, data=data)
    elif layout.in_turns:
        bucket = Bucket(
            tuple(HybridTask((name,)) for name in layout.kinds), 1, forward=(1.0,), backward=(1.0,)
        )
        messages = 2 * layout.layers
        pieces = Pieces(messages + 1, messages * (2 if layout.recompute == "full" else 1) + 1)
        plan = in_turns(Plan("auto", 1, (bucket,), data=data), pieces)
    else:
        parts = dict.fromkeys(layout.kinds, 1)
        plan = replace(plan_for("spatial", parts, layout.pipeline, layout.pipeline), data=data)
    return RunSpec(
        config,
        [_task(case) for case in cases_of("llama", 96) if case.name in layout.kinds],
        plan,
        layout.tensor,
        layout.sequence_parallel,
        layout.dtype,
        layout.recompute,
        layout.residence,
        "cpu",
        steps=layout.steps,
    )


def _really(run: RunSpec, path: Path, parallel: Parallel) -> Recording:
    for cached in (dense_attention._mask, short_attention._classes, short_attention._bias):
        cached.cache_clear()  # what an earlier layout left
    with OnCopies():
        return record_steps(run, path, parallel, None)


def _told(recording: Recording) -> Told:
    return [("held", held(recording)), ("peak of the last step", last_step_peak(recording))]


class Prepared(NamedTuple):
    """A run, its model, and the ranks that are dry run."""

    run: RunSpec
    path: Path
    ranks: list[int]


Told = list[tuple[str, int]]
EXPERTS = "EP=4"


@pytest.fixture(scope="module")
def prepared(once: Callable[[str, Callable[[Path], object]], Path]) -> dict[str, Prepared]:
    """All runs."""
    found = {}
    for name, layout in LAYOUTS.items():
        path = _model(once, layout.layers)
        run = _run(layout, json.loads((path / "config.json").read_text()))
        # Those that are chosen, and where ranks differ in more than their sequences one more: what a dry run says of a
        # rank that is not chosen must hold as well.
        more = {3} if layout.tensor * layout.pipeline > 1 else set()
        found[name] = Prepared(run, path, sorted({*representative_ranks(run, range(4)), *more}))
    path = once("dry-run-experts", lambda directory: tiny_models.make(directory, "mixtral")) / "mixtral"
    found[EXPERTS] = Prepared(_with_experts(json.loads((path / "config.json").read_text())), path, [0, 1, 3])
    return found


def _with_experts(config: dict[str, int]) -> RunSpec:
    adapter = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}
    adapter |= {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    training = {"per_device_train_batch_size": 16, "max_steps": 4}
    task = {"name": "a", "adapter": adapter, "data": {"path": "none"}, "training": training}
    records = TaskRecords(task, [12] * 16, [11] * 16)
    plan = replace(plan_for("spatial", {"a": 1}, 1, 2), data=4)
    layers, experts = config["num_hidden_layers"], config["num_local_experts"]
    ranks = [(0,) if expert < experts // 2 else (1 + expert % 3,) for expert in range(experts - 1)]
    placement = Placement(4, dict.fromkeys(range(layers), (*ranks, (1, 3))))
    likely = np.linspace(1.5, 0.5, experts) * config["num_experts_per_tok"] / experts
    run = RunSpec(config, [records], plan, dtype="float32", device="cpu", steps=STEPS, expert=4)
    return replace(run, placement=placement, access=dict.fromkeys(range(layers), likely.tolist()))


@pytest.fixture(scope="module")
def predicted(prepared: dict[str, Prepared]) -> dict[str, dict[int, Told]]:
    """What dry runs say of ranks, all of them in a process of its own, before anything is computed."""
    shared: list[dict[str, dict[int, Told]]] = [{}]
    if dist.get_rank() == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "executable", os.environ.get(warm.VARIABLE, sys.executable))
            found = iter(dry_runs([(one.run, rank) for one in prepared.values() for rank in one.ranks]))
        shared = [{name: {r: _told(next(found)) for r in one.ranks} for name, one in prepared.items()}]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def test_ranks_hold_and_allocate_what_was_dry_run(
    prepared: dict[str, Prepared],
    predicted: dict[str, dict[int, Told]],
    joined: Callable[..., Parallel],
) -> None:
    problems, figures = [], []
    for name, layout in LAYOUTS.items():
        run, path, _ = prepared[name]
        parallel = joined(layout.tensor, layout.pipeline, layout.sequence_parallel)
        really = _really(run, path, parallel)
        for (what, bytes_), (_, said) in zip(
            _told(really), predicted[name].get(dist.get_rank(), []), strict=False
        ):
            off = said / bytes_ - 1
            line = f"{name}, rank {dist.get_rank()}: {what} {bytes_}, predicted {said} ({off:+.3%})"
            figures.append(line)
            problems += [line] * (abs(off) > WITHIN)
        peaks = [0] * dist.get_world_size()
        dist.all_gather_object(peaks, last_step_peak(really))
        chosen = representative_ranks(run, range(4))
        if max(peaks[rank] for rank in chosen) < 0.99 * max(peaks):
            problems.append(f"{name}: ranks {chosen} were chosen, peaks are {peaks}")
    everyone: list[tuple[list[str], list[str]]] = [([], [])] * dist.get_world_size()
    dist.all_gather_object(everyone, (problems, figures))
    print("\n".join(line for _, lines in everyone for line in lines))
    assert not any(bad for bad, _ in everyone), "\n".join(line for bad, _ in everyone for line in bad)
    assert sum(len(lines) for _, lines in everyone) == 2 * sum(len(prepared[name].ranks) for name in LAYOUTS)


def test_ranks_with_experts_allocate_what_was_dry_run(
    prepared: dict[str, Prepared],
    predicted: dict[str, dict[int, Told]],
    joined: Callable[..., Parallel],
) -> None:
    """With routers that select what dry runs assume: some experts more often, which lie unevenly, one on two ranks."""
    run, path, ranks = prepared[EXPERTS]
    parallel = joined(1, 1, expert=4)
    with assumed_routes(parallel.experts, run.placement, run.access):
        found = _told(_really(run, path, parallel))
    said = predicted[EXPERTS].get(dist.get_rank(), [])
    same = all(abs(b / a - 1) <= WITHIN for (_, a), (_, b) in zip(found, said, strict=False))
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, None if same else f"rank {dist.get_rank()}: {found}, predicted {said}")
    assert not any(everyone), everyone
    assert bool(said) == (dist.get_rank() in ranks)


def _model(once: Callable[[str, Callable[[Path], object]], Path], layers: int) -> Path:
    def make(directory: Path) -> None:
        tiny_models.make(directory, "llama", num_hidden_layers=layers)

    return once(f"dry-run-{layers}", make) / "llama"
