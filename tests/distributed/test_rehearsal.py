"""What each of four ranks really holds and allocates is what was rehearsed of it, without memory, from its config."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from torch.distributed import Work

from megatron_mux.backbone.residence import Kind
from megatron_mux.fusion.plan import Bucket, HybridTask, Plan, plan_for
from megatron_mux.kernels import attention, grouped
from megatron_mux.rehearsal.perform import count
from megatron_mux.rehearsal.process import rehearsals
from megatron_mux.rehearsal.recording import Recording
from megatron_mux.rehearsal.setting import Cast, Setting
from megatron_mux.runtime import Parallel
from tests import tiny_models
from tests.distributed.test_engine_layouts import cases_of
from tests.end_to_end.harness import Case

WITHIN = 0.01


class Layout(NamedTuple):
    """How four processes are divided, and how they train."""

    tensor: int = 1
    pipeline: int = 1
    sequence_parallel: bool = False
    residence: Kind = "resident"
    recompute: str = "none"
    buckets: bool = False


LAYOUTS = {
    "DP=4": Layout(),
    "DP=4, sharded": Layout(residence="sharded"),
    "TP=4": Layout(4),
    "DP=2, TP=2, sequence parallel": Layout(2, 1, True),
    "PP=4": Layout(1, 4),
    "PP=2, TP=2": Layout(2, 2),
    "DP=2, PP=2, four kinds, two buckets, chunks": Layout(1, 2, recompute="full", buckets=True),
}
FEW, MANY = ("lora", "scales"), ("bottle", "lora", "prefix", "scales")


def _cases(layout: Layout) -> list[Case]:
    return [case for case in cases_of("llama", 96) if case.name in (MANY if layout.buckets else FEW)]


def _setting(layout: Layout, config: dict[str, object], cases: list[Case]) -> Setting:
    data = 4 // (layout.tensor * layout.pipeline)
    if layout.buckets:
        hybrids = [HybridTask(group) for group in (MANY[:2], MANY[2:3], MANY[3:])]
        seconds = {"forward": (1.0,) * layout.pipeline, "backward": (1.0,) * layout.pipeline}
        buckets = (
            Bucket(tuple(hybrids[:2]), 2, chunk=9, **seconds),  # type: ignore[arg-type]
            Bucket((hybrids[2],), 1, **seconds),  # type: ignore[arg-type]
        )
        plan = Plan("auto", layout.pipeline, buckets, data=data)
    else:
        plan = replace(
            plan_for("spatial", dict.fromkeys(FEW, 1), layout.pipeline, layout.pipeline), data=data
        )
    return Setting(
        config,
        [Cast.of(case.spec, case.records) for case in cases],
        plan,
        layout.tensor,
        layout.sequence_parallel,
        "float32",
        layout.recompute,  # type: ignore[arg-type]
        layout.residence,
        "cpu",
    )


def _really(setting: Setting, path: Path, parallel: Parallel) -> Recording:
    for cached in (attention._mask, attention._bounds, grouped._runs):
        cached.cache_clear()  # what an earlier layout left
    with _messages_let_go():
        return count(setting, path, parallel)


@contextmanager
def _messages_let_go() -> Iterator[None]:
    """Wait for messages so that they are free once they are waited for.

    A thread of gloo's says that a message is there, and holds its tensors until it runs again: with more processes than
    cores, that can be several operators later. One that sleeps until the message is there lets the thread finish.
    """
    wait = Work.wait

    def patiently(work: Work, *arguments: Any, **named: Any) -> bool:
        until = (
            time.monotonic() + 5e-3
        )  # messages to one rank, and compound ones, are complete only once waited for
        while not work.is_completed() and time.monotonic() < until:
            time.sleep(1e-4)
        time.sleep(1e-4)
        return wait(work, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Work, "wait", patiently)
        yield


def _told(recording: Recording) -> list[tuple[str, int]]:
    return [("held", recording.held), ("peak of the last step", recording.last_step_peak)]


@pytest.mark.timeout(300)
def test_ranks_hold_and_allocate_what_was_rehearsed(
    once: Callable[[str, Callable[[Path], object]], Path], joined: Callable[..., Parallel]
) -> None:
    path = once("rehearsed", lambda directory: tiny_models.make(directory, "llama")) / "llama"
    config = json.loads((path / "config.json").read_text())
    settings = {name: _setting(layout, config, _cases(layout)) for name, layout in LAYOUTS.items()}
    found: list[Recording] = []
    if dist.get_rank() == 0:
        # In a process of its own, before anything is computed.
        found = rehearsals([(setting, rank) for setting in settings.values() for rank in range(4)])
    mine = [[(one.held, one.last_step_peak) for one in found]]
    dist.broadcast_object_list(mine, src=0)
    problems, figures = [], []
    for i, (name, setting) in enumerate(settings.items()):
        layout = LAYOUTS[name]
        parallel = joined(layout.tensor, layout.pipeline, layout.sequence_parallel)
        really = _really(setting, path, parallel)
        for (what, bytes_), rehearsed in zip(_told(really), mine[0][4 * i + dist.get_rank()], strict=True):
            off = rehearsed / bytes_ - 1
            line = f"{name}, rank {dist.get_rank()}: {what} {bytes_}, rehearsed {rehearsed} ({off:+.3%})"
            figures.append(line)
            problems += [line] * (abs(off) > WITHIN)
    everyone: list[tuple[list[str], list[str]]] = [([], [])] * dist.get_world_size()
    dist.all_gather_object(everyone, (problems, figures))
    print("\n".join(line for _, lines in everyone for line in lines))
    assert not any(bad for bad, _ in everyone), "\n".join(line for bad, _ in everyone for line in bad)
