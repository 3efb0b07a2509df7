"""Counts which experts a run's steps select, logs it, and has experts moved where that pays."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

from megatron_mux.arguments import MuxArguments
from megatron_mux.data.dataset import Example, TaskDataset
from megatron_mux.engine import Engine
from megatron_mux.expert_shape import Placement
from megatron_mux.moe.access_counts import Access, AccessCounts
from megatron_mux.moe.entries import Floats
from megatron_mux.moe.placement import write_placement
from megatron_mux.moe.topology import Topology
from megatron_mux.report import EXPERT_ACCESS, Reporter
from megatron_mux.training.callback import Callback
from megatron_mux.training.expert_placement import PLACEMENT_FILE
from megatron_mux.training.expert_placer import Decision, ExpertPlacer, moved
from megatron_mux.training.expert_topology import topology_of_hosts
from megatron_mux.training.step_loop import Due

_START_TOKENS = 8192
"""Tokens of each task's data by which experts are placed at the start."""

_LEAST_ROWS = 64
"""Rows that must have selected an expert on average, before experts move by what was counted."""


@dataclass(frozen=True)
class _Sample:
    """The first records of a task's data, as the engine evaluates records."""

    data: TaskDataset
    records: int
    distinct_completions: None = None

    def __len__(self) -> int:
        return self.records

    def __getitem__(self, number: int) -> Example:
        return self.data[number]

    def candidates(self, number: int) -> tuple[list[Example], int]:
        """The record alone."""
        return [self[number]], 0

    @property
    def end_of_sequence(self) -> int:
        """See `TaskDataset`."""
        return self.data.end_of_sequence


class ExpertWatch(Callback):
    """Watches the experts of a run. Every rank makes one.

    Args:
        directory: Where the run is saved; None: it is not.
        interval: Steps between lines of the log, at least: it is written between bursts of steps.
        placer: Decides where experts go; None: they stay.
        places, replaces: Whether it does at the start, and between steps.
        kept: Whether experts are where an earlier run has moved them.
    """

    def __init__(
        self,
        engine: Engine,
        reporter: Reporter,
        directory: Path | None,
        interval: int,
        placer: ExpertPlacer | None,
        places: bool,
        replaces: bool,
        kept: bool,
    ) -> None:
        self.engine, self.parallel, self.reporter = engine, engine.parallel, reporter
        self._directory, self._interval = directory, interval
        self._placer, self._places, self._replaces = placer, places, replaces
        self._counts = AccessCounts(engine.stages.values())
        self._steps, self._cpu_s, self._counted_s = 0, 0.0, 0.0
        self._recent: Access | None = None
        self._recent_steps = 0
        self._first: Floats | None = None
        self._keeps_placement = kept

    @contextmanager
    def around_steps(self) -> Iterator[None]:
        """Context in which steps are counted."""
        began, before = time.thread_time(), self._counts.cpu_s
        with self._counts.counting():
            yield
        self._cpu_s += time.thread_time() - began
        self._counted_s += self._counts.cpu_s - before

    # -- at the start

    def before_steps(self) -> None:
        """Place experts before the first burst, if that was asked for.

        They are placed by what the tasks' data select with their adapters as they are.
        """
        names = self.engine.active
        if not self._places or self._placer is None or not names:
            return
        self.reporter.say(f"placing experts by {_START_TOKENS} tokens of each task at most")
        self.parallel.heartbeat.at("placing experts", long=True)
        tokens, found = 0.0, []
        for name in names:
            spec, lengths = self.engine.task(name).spec, self.engine.task(name).data.lengths
            of_step = spec.sequences_per_step * float(np.mean(lengths))
            # Each task counts by its share of a step, whatever the size of its file.
            found.append(
                self._select(name).scaled(1000 * of_step / float(lengths[: self._records(name)].sum()))
            )
            tokens += of_step
        access = reduce(Access.merged, found)
        self._places = False
        before, left = self._placer.rows, self._steps_left()
        decision = self._placer.decide(access, max(1, round(tokens)), left, anew=True)
        if decision is None:
            self.reporter.say(f"experts stay where they are: in {left} step(s) no move would pay")
            return
        count = len(moved(before, decision.rows, self._placer.layers))
        size, seconds = self._placer.move(decision)
        less = 1 - decision.after / decision.before
        self.reporter.say(
            f"experts are placed: transfers of a step are predicted to take {decision.after * 1e3:.4g} ms instead of "
            f"{decision.before * 1e3:.4g} ms where they were ({less:.1%} less); {count} moved, {size} bytes in "
            f"{seconds:.2f} s, {left} step(s) to come"
        )
        self._keeps_placement = True
        self.save(None, ())

    def _steps_left(self) -> int:
        """Steps to come of the task that has most of them."""
        progress = [self.engine.progress(name) for name in self.engine.active]
        return max((total - done for done, total, _ in progress), default=0)

    def _select(self, name: str) -> Access:
        """What a task's first records select."""
        data = self.engine.task(name).data
        with self._counts.counting():
            self.engine.evaluate(name, _Sample(data, self._records(name)))
        slots = self.engine.slots
        return self._counts.take(self.parallel, {name: slots[name]}, pairs=True)

    def _records(self, name: str) -> int:
        """How many records of a task experts are placed by."""
        ends = np.cumsum(self.engine.task(name).data.lengths)
        return min(len(ends), int(np.searchsorted(ends, _START_TOKENS)) + 1)

    # -- while steps run

    def due(self, seconds: float) -> Iterator[Due]:
        """Yield in how many steps experts may move. Nothing if they stay."""
        if self._replaces:
            yield max(1, self._interval - self._steps), self._interval

    def after_steps(self, steps: int) -> None:
        """Count steps. A line is written, and experts may move, if it is time to."""
        self._steps += steps
        if self._steps >= self._interval:
            self.before_save()
            self._consider()

    def before_save(self) -> None:
        """Write what was counted since the last line. Slots of tasks that leave may be taken by others."""
        if not self._steps:
            return
        access = self._counts.take(self.parallel, self.engine.slots, pairs=self._replaces)
        if self.parallel.rank == 0:
            self.reporter.append(EXPERT_ACCESS, self._line(access))
        self._recent = access if self._recent is None else self._recent.merged(access)
        self._recent_steps += self._steps
        self._steps, self._cpu_s, self._counted_s = 0, 0.0, 0.0

    def _line(self, access: Access) -> dict[str, Any]:
        routing = self.engine.backbone.shape.experts
        assert routing is not None
        top_k = routing.routing.top_k
        probabilities = access.probabilities(access.selected, top_k)
        if self._first is None:
            self._first = self._earlier()
        if self._first is None:
            self._first = probabilities
        # Of the choices of a layer, the share that falls on other experts than in the first line.
        drift = np.abs(probabilities - self._first).sum(axis=1) / (2 * top_k)
        return {
            **self._when(),
            "layers": list(access.layers),
            "rows": (access.selected.sum(axis=1) // top_k).tolist(),
            "access": probabilities.round(6).tolist(),
            "drift": drift.round(6).tolist(),
            "by_task": {
                name: access.probabilities(rows, top_k).round(6).tolist()
                for name, rows in access.by_task.items()
            },
            "counting_cpu_s": round(self._counted_s, 6),
            "steps_cpu_s": round(self._cpu_s, 6),
        }

    def _when(self) -> dict[str, Any]:
        return {"steps": {name: self.engine.progress(name)[0] for name in self.engine.tasks}}

    def _earlier(self) -> Floats | None:
        """The first line of the run that this one continues."""
        path = None if self._directory is None else self._directory / EXPERT_ACCESS
        if path is None or not path.exists():
            return None
        for line in path.read_text().splitlines():
            content = json.loads(line)
            if "access" in content:
                return np.array(content["access"])
        return None

    def _consider(self) -> None:
        """Move experts if recent steps say that it pays."""
        recent, steps, left = self._recent, self._recent_steps, self._steps_left()
        if self._placer is None or not self._replaces or recent is None or not left:
            return
        rows = recent.selected.sum(axis=1)
        if rows.min() < _LEAST_ROWS * recent.selected.shape[1]:
            return
        self._recent, self._recent_steps = None, 0
        top_k = self._placer.model.top_k
        decision = self._placer.decide(recent, max(1, round(int(rows[0]) / top_k / steps)), left)
        if decision is not None:
            self._move(self._placer, decision, left)

    def _move(self, placer: ExpertPlacer, decision: Decision, left: int) -> None:
        moves = moved(placer.rows, decision.rows, placer.layers)
        size, seconds = placer.move(decision)
        self._keeps_placement = True
        gain = decision.before - decision.after
        self.reporter.say(
            f"{len(moves)} expert(s) moved, {size} bytes in {seconds:.3f} s: transfers of a step are predicted to take "
            f"{decision.after * 1e3:.4g} ms instead of {decision.before * 1e3:.4g} ms, {left} step(s) to come"
        )
        if self.parallel.rank == 0:
            predicted = {"gain_s_per_step": gain, "cost_s": decision.cost}
            line = {**self._when(), "moved": moves, "bytes": size, "seconds": round(seconds, 6)}
            self.reporter.append(EXPERT_ACCESS, {**line, "predicted": predicted})

    # -- when the run is saved

    def save(self, names: Collection[str] | None, leaving: Sequence[str]) -> None:
        """Write where experts are, once that is not where they were asked to be."""
        if not self._keeps_placement or self._directory is None or self._placer is None or self.parallel.rank:
            return
        nodes = [worker.node for worker in self._placer.topology.workers]
        details = {"nodes": nodes, "workers_are": self._placer.workers_are}
        path = self._directory / PLACEMENT_FILE
        try:
            write_placement(path, self._placer.model, len(nodes), self._placer.rows, details)
        except OSError as error:
            self.reporter.note(f"{path}: could not be written", error)


def watch_experts(
    arguments: MuxArguments, engine: Engine, reporter: Reporter, topology: Topology | None, kept: bool
) -> ExpertWatch | None:
    """What watches the experts of a run; None if nobody asked. Every rank calls it.

    Args:
        topology: Of `--mux-expert-topology`; None: of the hosts.
        kept: Whether experts are where an earlier run has moved them.
    """
    experts, placement = engine.backbone.shape.experts, engine.backbone.placement
    places, replaces = arguments.places_experts and not kept, arguments.replaces_experts
    if experts is None or placement is None or (arguments.save is None and not places and not replaces):
        return None
    placer = None
    if places or replaces or kept:
        parallel, assumed = engine.parallel, False
        if topology is None:
            room = _room(arguments, engine, placement)
            topology, said = topology_of_hosts(parallel, room, measured=places or replaces)
            assumed = not said
            if said:
                reporter.say(said)
        placer = ExpertPlacer(engine, parallel, topology, assumed)
    interval = arguments.log_interval
    return ExpertWatch(engine, reporter, arguments.save, interval, placer, places, replaces, kept)


def _room(arguments: MuxArguments, engine: Engine, placement: Placement) -> list[int]:
    """Experts that each worker may hold: what flags say, else equally many; at least those it has."""
    first = engine.parallel.experts.first_worker
    held = [placement.held_by(rank) for rank in range(first, placement.size)]
    experts = sum(len(row) for row in placement.ranks.values())
    given = arguments.mux_expert_capacity or (-(-experts // len(held)),)
    each = [*given] * len(held) if len(given) == 1 else given[: len(held)]
    return [max(pair) for pair in zip(held, each, strict=True)]
