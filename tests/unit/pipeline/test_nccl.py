"""Pipelines on played GPUs: no run hangs, whatever waits in it; and a run that breaks the rules does."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_mux.pipeline import execute as execution
from megatron_mux.pipeline.action import Action
from megatron_mux.pipeline.template import Template, gpipe, interleaved, one_f_one_b, plain
from megatron_mux.pipeline.transfers import AHEAD, Transfer, issue_order, received_ahead, sends_kept
from tests.unit.pipeline.nccl import Hang, World
from tests.unit.pipeline.orders import Order, ends_in_any_order, receives_two_ahead, sends_at_once
from tests.unit.pipeline.pipelines import Run, checked, in_turns, play, random_run

COUNT = int(os.environ.get("MUX_PLAYED_RUNS", "640"))
IN_TURNS = COUNT // 5
"""A run in turns takes as long as three others."""


def test_no_random_run_hangs() -> None:
    runs = [checked(random_run(seed)) for seed in range(COUNT)]
    for run in runs:
        play(run)
    for seed in range(0, COUNT, 50):
        assert play(random_run(seed)) == play(random_run(seed)), "the same seed, the same outcome"
    switches = {(run.queues, run.waits > 0, run.failures > 0, run.timed, run.pipelines) for run in runs}
    assert len(switches) == 3 * 2 * 2 * 2 * 2, "each of them with each other"


def test_no_random_run_in_turns_hangs() -> None:
    """Tensor ranks exchange messages while transfers between stages, and whatever else waits, are outstanding."""
    runs = [in_turns(random_run(seed)) for seed in range(IN_TURNS)]
    for run in runs:
        play(run)
    for seed in range(0, IN_TURNS, 50):
        assert play(in_turns(random_run(seed))) == play(in_turns(random_run(seed)))
    assert (
        len({(run.queues, run.waits > 0, run.pipelines, run.hybrid_tasks) for run in runs}) == 3 * 2 * 2 * 2
    )


def hangs(order: Order, change: Callable[[Run], Run], patch: pytest.MonkeyPatch) -> int:
    """How many of the first random runs hang if ranks follow another order."""
    patch.setattr(execution, "issue_order", order)
    found = 0
    for seed in range(40):
        try:
            play(change(random_run(seed)))
        except Hang:
            found += 1
    return found


def only(**switches: Any) -> Callable[[Run], Run]:
    """Nothing waits but what is given."""
    nothing: dict[str, Any] = {"queues": "many", "waits": 0.0, "copies": 0.0, "failures": 0.0, "timed": False}
    return lambda run: replace(run, **(nothing | switches))


@pytest.mark.parametrize(
    ("order", "switches"),
    [
        (receives_two_ahead, {"failures": 0.1}),
        (receives_two_ahead, {"waits": 0.3}),
        (receives_two_ahead, {"queues": "one"}),
        (receives_two_ahead, {"queues": "serial"}),
        (sends_at_once, {"waits": 0.3}),
        (sends_at_once, {"queues": "serial"}),
        (ends_in_any_order, {"waits": 0.3}),
        (ends_in_any_order, {"queues": "serial"}),
    ],
)
def test_another_order_hangs(order: Order, switches: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert hangs(order, only(**switches), monkeypatch) >= 1


def test_timing_waits_for_nothing_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even with receives two ahead: times are taken by events."""
    assert hangs(receives_two_ahead, only(), monkeypatch) == 0, "without any waits nothing hangs"
    waits = [play(only(timed=True)(random_run(seed)))[-1] for seed in range(20)]
    for text, run in zip(waits, map(random_run, range(20)), strict=True):
        assert "synchronize" not in text.replace("event.synchronize", "")
        assert f"('event.synchronize', {run.ranks * run.pipelines * len(run.parts)})" in text


@pytest.mark.parametrize("template", [gpipe(4, plain([6])), one_f_one_b(4, plain([3, 5]))])
def test_the_order_of_one_rank(template: Template) -> None:
    for rank in range(4):
        events = list(issue_order(template, rank, 4))
        assert [event for event in events if isinstance(event, Action)] == list(template[rank])
        place = {event: i for i, event in enumerate(events)}
        assert len(place) == len(events)
        ahead = 0
        for event in events:
            if isinstance(event, Action):
                ahead -= event.before(4, 4) is not None
                assert event.before(4, 4) is None or place[Transfer(event.before(4, 4), event)] < place[event]  # type: ignore[arg-type]
            elif event.target.stage == rank:
                ahead += 1
                assert ahead <= 2 * AHEAD + 1, "both inboxes, and what is being used"
            else:
                assert place[event.source] < place[event]


@pytest.mark.parametrize("virtual", [1, 2])
@pytest.mark.parametrize("ranks", [2, 4])
def test_how_much_is_received_ahead(ranks: int, virtual: int) -> None:
    """What predictions count is what ranks do."""
    stages, sizes = ranks * virtual, plain([3 * ranks, 2 * ranks])
    template = one_f_one_b(ranks, sizes) if virtual == 1 else interleaved(ranks, virtual, sizes)
    most = Counter[bool]()
    for rank in range(ranks):
        received: set[Action] = set()
        for event in issue_order(template, rank, stages):
            if isinstance(event, Transfer):
                received |= {event.target} if event.target.stage % ranks == rank else set()
                continue
            received.discard(event)
            for backward in (False, True):
                ahead = sum(action.is_backward == backward for action in received)
                most[backward] = max(most[backward], ahead)
    counted = [received_ahead(stages, ranks, backward) for backward in (False, True)]
    if virtual == 1:
        assert [most[False], most[True]] == counted
    else:
        assert 0 < most[False] <= counted[0] and 0 < most[True] <= counted[1]


def test_actions_that_wait_for_each_other_are_refused() -> None:
    first, second = (Action.parse(text) for text in ("1F0.0", "0B0.0"))
    template = ((second, Action.parse("0F0.0")), (first, Action.parse("1B0.0")))
    with pytest.raises(RuntimeError, match=r"wait for each other: 0B0\.0, 1F0\.0"):
        list(issue_order(template, 0, 2))


def test_sent_tensors_are_kept_until_a_fixed_number_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from megatron_mux.pipeline import communicate
    from tests.unit.pipeline.nccl import Group, installed

    world = World(2, "many")
    most = 0

    def host(rank: int) -> None:
        nonlocal most
        parallel: Any = SimpleNamespace(
            pp_rank=rank,
            pp_size=2,
            pp_group=Group((0, 1)),
            pipeline_ranks=[0, 1],
            device=torch.device("cuda"),
            heartbeat=None,
        )
        communicator = communicate.Communicator(parallel)
        for _ in range(100):
            if rank == 0:
                communicator.send(torch.empty(3, device="meta"), backward=False)
                most = max(most, len(communicator._pending[False]))
            else:
                communicator.receive((3,), torch.float32, backward=False).wait()
        communicator.finish()
        assert not any(communicator._pending.values())

    installed(world, monkeypatch)
    world.run(host)
    assert most == sends_kept(2)
