"""A rank of `overlap.py`: computes the same step in several ways, in turns."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from engine_bench import SwitchablePlanning, environment, random_backbone, spec_of
from namespaces import limit_bandwidth
from overlap_sides import (
    ChainTimes,
    Forecast,
    MessageCosts,
    PlanTimes,
    figures,
    in_halves,
    in_one_batch,
    in_order,
    in_turn,
    one_after_another,
)
from processes import pin_to_core
from tensor_messages import Beside, Sent, seconds_by_size, send_alone, tensors_of, timed_pieces, watched
from workload import RANK, TaskShape, random_records

from megatron_mux.backbone.model import Backbone
from megatron_mux.engine import Engine, Task
from megatron_mux.fusion.plan import Plan
from megatron_mux.pipeline.action import TimedAction
from megatron_mux.pipeline.execute import Timer
from megatron_mux.pipeline.lanes import passes_to_svg
from megatron_mux.runtime import initialize
from megatron_mux.tasks import TaskSpec
from tests.reference.records import Records

LENGTH = 64
"""`max_length` of every task."""

_UNLIMITED = 1e11
"""Bits per second of the link while nothing is measured over it."""


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all cases; returns the result on rank 0 and {} on the other rank."""
    rank = pin_to_core()
    parallel = initialize(tensor_parallel=2, device="cpu")
    backbone = Backbone.load(random_backbone(arguments.backbone_shape, torch.float32, rank), parallel)
    result = {**environment(backbone, 1), "turns": arguments.turns, "tokens": arguments.tokens}
    cases = []
    for count in arguments.tasks:
        for share in [None] if arguments.no_namespaces else arguments.share:
            cases.append(_Case(backbone, arguments, count, share).measure())
            if rank == 0:
                short = {key: value for key, value in cases[-1].items() if key != "picture"}
                print(json.dumps(short), file=sys.stderr, flush=True)
    return {**result, "cases": cases} if rank == 0 else {}


class _Timed(NamedTuple):
    """A run.

    Attributes:
        seconds: Of the slowest rank.
        cpu: CPU seconds of this rank, with all its threads.
        made: What it returned.
    """

    seconds: float
    cpu: float
    made: Any


class _Case:
    """Some number of tasks, at one bandwidth.

    Args:
        backbone: This rank's part of it.
        arguments: The command line.
        count: Number of tasks.
        share: Of messages in a step; None: the link is left as it is.
    """

    def __init__(
        self, backbone: Backbone, arguments: argparse.Namespace, count: int, share: float | None
    ) -> None:
        self.parallel = backbone.parallel
        self._turns, self._share = arguments.turns, share
        self._tasks = _tasks(count, arguments.tokens, backbone.shape.vocab)
        self._steps = _Steps(backbone, *self._tasks)
        self._names = list(self._steps.engine.tasks)
        self._backbone = backbone

    def measure(self) -> dict[str, Any]:
        """Profile, predict, compare the sides' adapters, then measure the sides in turns."""
        names = self._names
        plans = {"a": one_after_another(names), "b": in_one_batch(names)}
        if self._share is not None:
            limit_bandwidth(_UNLIMITED)
        plain = {side: self._profile(plan) for side, plan in plans.items()}
        taking_turns = {
            "tasks": plans["a"],
            "halves": in_halves(plans["b"]),
        }
        profiles = {
            name: self._profile(in_turn(plan, self._backbone.shape.layers))
            for name, plan in taking_turns.items()
        }
        rate = None if self._share is None else self._calibrate(plain["a"])
        costs = self._message_costs([*plain.values(), *profiles.values()])
        turns = {
            name: ChainTimes.of(profile, costs, self.parallel.most) for name, profile in profiles.items()
        }
        forecast = Forecast(plain, turns)
        for side, (name, orders) in forecast.orders.items():
            plans[side] = in_order(taking_turns[name], *orders)
        plans.setdefault("e", plans["b"])
        measured = self._measure(plans, plain["a"].sent)
        tasks_in_turns = in_order(taking_turns["tasks"], *turns["tasks"].orders("auto"))
        timed: list[TimedAction] = []
        self._steps.take(plans["e"] if "e" in forecast.orders else tasks_in_turns, timer=timed.append)
        self._steps.close()
        slower = [
            statistics.median(measured["seconds"][side]) / profiled
            for side, profiled in (("f", plain["a"].compute), ("g", costs.seconds(plain["a"].sent)))
        ]
        predicted = forecast.seconds()
        return {
            "ours": f"{forecast.orders['e'][0]} in turns" if "e" in forecast.orders else "one batch",
            "tasks": len(names),
            "share": self._share,
            "megabits_per_s": None if rate is None else rate / 1e6,
            "messages": len(plain["a"].sent),
            "megabytes": sum(size * dtype.itemsize for size, dtype in plain["a"].sent) / 1e6,
            "taken_from_computation": costs.share,
            "profile": {
                name: {"rest_s": own.rest, "waits_s": own.waits, "chains": own.to_json()}
                for name, own in turns.items()
            },
            **measured,
            **figures(measured["seconds"], measured["cpu_seconds"], costs.share, predicted),
            "predicted_s": predicted,
            "slower_than_profile": slower,
            "predicted_at_this_speed_s": forecast.seconds(*slower),
            "orders": {
                side: [launch.forward, launch.backward]
                for side, plan in plans.items()
                for launch in plan.buckets[0].launch
            },
            **self._compared({**plans, "tasks": tasks_in_turns}),
            "picture": passes_to_svg(timed),
        }

    def _profile(self, plan: Plan) -> PlanTimes:
        """Time steps without messages, batches in turns piece by piece."""
        run = partial(self._steps.take, plan, left_out=True)
        sent = run()
        seconds, found = [], []
        for _ in range(4):
            with timed_pieces() as passes:
                seconds.append(self._timed(run).seconds)
            if passes:
                found.append((passes[0], passes[1]))
        return PlanTimes(statistics.median(seconds), sent, found)

    def _calibrate(self, profile: PlanTimes) -> float:
        """Limit the link so that messages take their share of a step; returns its bits per second."""
        tensors = tensors_of(profile.sent)
        wanted = profile.compute * self._share / (1 - self._share)
        rate = 8 * sum(tensor.nbytes for tensor in tensors) / wanted
        for _ in range(4):
            limit_bandwidth(rate)
            rate *= self._timed(partial(send_alone, tensors, self.parallel.tp_group)).seconds / wanted
            rate = min(rate, _UNLIMITED)
        limit_bandwidth(rate)
        return rate

    def _message_costs(self, profiles: Sequence[PlanTimes]) -> MessageCosts:
        """Time messages without computing anything, and beside products."""
        group, costs = self.parallel.tp_group, MessageCosts()
        with Beside() as undisturbed:
            time.sleep(0.5)
        shares = []
        for profile in profiles:
            # The first profile's messages as they follow each other; of the others a few of each other size.
            sent = (
                profile.sent if not costs.alone else _few([n for n in profile.sent if n not in costs.alone])
            )
            send = partial(send_alone, tensors_of(sent), group)
            costs.alone |= self._slowest(seconds_by_size(sent, [self._timed(send).made for _ in range(3)]))
            with Beside() as beside:
                rounds = [self._timed(send).made for _ in range(3)]
            costs.beside |= self._slowest(seconds_by_size(sent, rounds))
            shares += [1 - beside.rate / undisturbed.rate] * (profile is profiles[0])
        (costs.share,) = self.parallel.most([max(0.0, statistics.median(shares))])
        return costs

    def _slowest(self, seconds: Mapping[Sent, float]) -> dict[Sent, float]:
        return dict(zip(seconds, self.parallel.most(list(seconds.values())), strict=True))

    def _measure(self, plans: Mapping[str, Plan], sent: Sequence[Sent]) -> dict[str, Any]:
        """Seconds and CPU seconds of all sides, in turns."""
        runs: dict[str, Callable[[], object]] = {
            side: partial(self._steps.take, plan) for side, plan in plans.items()
        }
        runs["f"] = partial(self._steps.take, plans["a"], left_out=True)
        runs["g"] = partial(send_alone, tensors_of(sent), self.parallel.tp_group)
        seconds: dict[str, list[float]] = {side: [] for side in runs}
        cpu: dict[str, list[list[float]]] = {side: [] for side in runs}
        for run in runs.values():
            run()
        order = list(runs)
        for turn in range(self._turns):
            first = turn % len(order)
            for side in order[first:] + order[:first]:
                timed = self._timed(runs[side])
                seconds[side].append(timed.seconds)
                cpu[side].append(self._of_all(timed.cpu))
        return {"seconds": seconds, "cpu_seconds": cpu}

    def _timed(self, run: Callable[[], Any]) -> _Timed:
        self.parallel.most([0.0])  # a barrier
        start, before = time.perf_counter(), time.process_time()
        made = run()
        seconds, cpu = time.perf_counter() - start, time.process_time() - before
        return _Timed(self.parallel.most([seconds])[0], cpu, made)

    def _of_all(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.parallel.world_size
        dist.all_gather_object(found, value)
        return found

    def _compared(self, plans: Mapping[str, Plan]) -> dict[str, Any]:
        """Whether tasks in turns train the same adapters to the bit, and all ranks issue the same messages."""
        adapters, logs = {}, {}
        for side, plan in plans.items():
            steps = _Steps(self._backbone, *_with_rate(self._tasks, 1e-3))
            logs[side] = [sent for _ in range(2) for sent in steps.take(plan)]
            adapters[side] = [steps.values(name) for name in self._names]
            steps.close()
        same = {
            side: all(map(torch.equal, own, adapters["a"]))
            for side, own in adapters.items()
            if side in ("d", "tasks")
        }
        others = self._of_all({side: [(n, str(dtype)) for n, dtype in log] for side, log in logs.items()})
        return {
            "adapters_equal": all(all(own.values()) for own in self._of_all(same)),
            "messages_equal": all(own == others[0] for own in others),
        }


class _Steps:
    """Tasks of an engine that step under one plan or another."""

    def __init__(self, backbone: Backbone, specs: Sequence[TaskSpec], records: Sequence[Records]) -> None:
        self._group = backbone.parallel.tp_group
        self._planning = SwitchablePlanning()
        self.engine = Engine(backbone, backbone.parallel, self._planning)
        self.engine.register_tasks([Task(s, r) for s, r in zip(specs, records, strict=True)])

    def take(self, plan: Plan, left_out: bool = False, timer: Timer | None = None) -> list[Sent]:
        """One step; returns its messages of tensor ranks, which may be left out."""
        self._planning.plan = plan
        with watched(self._group, left_out) as log:
            self.engine.step(timer)
        return log

    def values(self, name: str) -> torch.Tensor:
        """A task's adapter on this rank, flat."""
        return self.engine.adapters.tasks[name].flat_params.values.clone()

    def close(self) -> None:
        """Leave the backbone to others."""
        for name in self.engine.tasks:
            self.engine.remove_task(name)
        self.engine.close()


def _tasks(count: int, tokens: int, vocab: int) -> tuple[list[TaskSpec], list[Records]]:
    """Tasks that have about `tokens` tokens in a step together."""
    adapter = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    batch = max(1, round(tokens / count / (0.625 * LENGTH)))
    shape = TaskShape("", batch, LENGTH)
    specs = [spec_of(f"task-{i}", adapter, batch, LENGTH) for i in range(count)]
    return specs, [Records(random_records(shape, batch, vocab, seed=i)) for i in range(count)]


def _few(sent: Sequence[Sent]) -> list[Sent]:
    """Four messages of each size."""
    return [one for one in dict.fromkeys(sent) for _ in range(4)]


def _with_rate(
    tasks: tuple[list[TaskSpec], list[Records]], rate: float
) -> tuple[list[TaskSpec], list[Records]]:
    """The tasks with a learning rate at which adapters change."""
    specs, records = tasks
    trainings = [spec.training.model_copy(update={"learning_rate": rate}) for spec in specs]
    return [
        spec.model_copy(update={"training": own}) for spec, own in zip(specs, trainings, strict=True)
    ], records
