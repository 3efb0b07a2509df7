"""Saves in the background: states are copied to host memory, then gathered and written by a thread while steps run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_mux import checkpoint
from megatron_mux.checkpoint import TaskToSave
from megatron_mux.directory_lock import DirectoryLock
from megatron_mux.engine.agreement import from_first, raise_on_every_rank
from megatron_mux.engine.snapshot import HostMemory, LocalState
from megatron_mux.errors import UserError
from megatron_mux.files import Pace
from megatron_mux.fusion.plan import Plan
from megatron_mux.merging.provenance import Provenance
from megatron_mux.process_groups import new_group
from megatron_mux.quantised.scheme import Quantisation
from megatron_mux.runtime import Parallel
from megatron_mux.training.callback import Callback
from megatron_mux.training.cards import CardWriter

_LONGEST_WRITE = timedelta(days=1)
"""The first rank writes a task before it asks others for the next one, and may be told to write slowly."""


@dataclass(eq=False)
class Saver(Callback):
    """Writes the saves of a run, one at a time. Every rank makes one.

    Args:
        directory: The run's directory.
        backbone: Fingerprint of the backbone.
        keep: See `checkpoint.save`.
        rate: Bytes to write a second while steps run; None: no limit.
        parallel: Where this rank stands.
        precision: See `checkpoint.Manifest`.
        owner: See `checkpoint.save`.
        quantisation: How the backbone's weights are quantised; None: not at all.
        lock: On the directory; checked while saving.

    Attributes:
        memory: Host memory of the save that is being written.
        problem: Why the last save could not be written, as far as this rank knows by now; else empty.
    """

    directory: Path
    backbone: str
    keep: int | None
    rate: int | None
    parallel: Parallel
    precision: str = ""
    owner: str = ""
    quantisation: Quantisation | None = None
    lock: DirectoryLock | None = None
    memory: HostMemory = field(init=False)
    _cards: CardWriter = field(init=False)
    _trained_on: Provenance = field(init=False)
    _group: dist.ProcessGroup | None = None
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "saver"))
    _running: Future[None] | None = None
    _pace: Pace = field(default_factory=Pace)

    def __post_init__(self) -> None:
        self.memory = HostMemory(self.parallel.device)
        quantised = str(self.quantisation or "")
        self._cards = CardWriter(self.directory, self.backbone, self.parallel, self.precision, quantised)
        self._trained_on = Provenance(self.backbone)
        if self.quantisation is not None and self.quantisation.is_made:
            dtype, device = self.precision.partition(" ")[0], self.parallel.device.type
            self._trained_on = Provenance(self.backbone, self.quantisation.method, dtype, device)
        if len(self.parallel.model_ranks) > 1:
            # A group of its own: its exchanges run beside those of the steps.
            ranks = from_first(self.parallel.model_ranks, self.parallel)
            self._group = new_group(ranks, self.parallel.device, "gloo", limit=_LONGEST_WRITE)

    def begin(
        self,
        states: Sequence[TaskToSave],
        copies: Mapping[str, LocalState],
        plan: Plan | None,
        steps: int = 0,
    ) -> None:
        """Write a save while this returns. Every rank calls it, after `wait`.

        Args:
            states: Every task of the run, in the same order on every rank; entries name the coming checkpoints, and
                are left alone by the caller.
            copies: This rank's part of the states to write.
            plan: The plan in force; only the first rank needs it.
            steps: Steps of the run so far.
        """
        self._pace = Pace(self.rate)
        self._running = self._thread.submit(self._try, states, dict(copies), plan, steps, self._pace)

    def _try(self, *what: Any) -> None:
        """Write a save, in the thread. What goes wrong is kept for the main thread to raise."""
        try:
            self._write(*what)
        except UserError as error:
            self.problem = str(error)
        except Exception as error:  # on this rank alone: the others must not wait for it
            self.problem = f"the save failed: {type(error).__name__}: {error}"

    def _write(
        self,
        states: Sequence[TaskToSave],
        copies: Mapping[str, LocalState],
        plan: Plan | None,
        steps: int,
        pace: Pace,
    ) -> None:
        waiting = iter(states)
        try:
            if self.parallel.rank == 0:
                assert plan is not None
                checkpoint.save(
                    self.directory,
                    map(self._described, self._gathered(waiting, copies)),
                    plan,
                    self.backbone,
                    self.keep,
                    pace,
                    self.precision,
                    self.owner,
                    steps,
                    *(() if self.lock is None else (self.lock.check,)),
                )
        finally:
            for _ in self._gathered(
                waiting, copies
            ):  # if one failed: other ranks send what they have of the rest
                pass

    def _gathered(
        self, states: Iterator[TaskToSave], copies: Mapping[str, LocalState]
    ) -> Iterator[TaskToSave]:
        """Yield the tasks, each with its snapshot once it is its turn: one of them is in memory at a time."""
        for state in states:
            if state.entry.name in copies:
                state.snapshot = copies[state.entry.name].gather(self.parallel, self._group)
            yield state
            state.snapshot = None

    def _described(self, state: TaskToSave) -> TaskToSave:
        """The task with what its files say of it."""
        if state.snapshot is not None:
            state.header = self._trained_on.header
            state.card = self._cards.card(state)
        return state

    @property
    def is_done(self) -> bool:
        """Whether nothing is being written on this rank."""
        return self._running is None or self._running.done()

    def before_save(self) -> None:
        """Wait for the save before: one is written at a time."""
        self.wait()

    def finish(self) -> None:
        """Wait for the last save."""
        self.wait()

    def wait(self) -> None:
        """Wait until the last save is written, at full speed. Every rank calls it.

        Raises:
            SharedError: It could not be written.
        """
        self.parallel.heartbeat.at("saving")
        self._pace.lift()
        if self._running is not None:
            self._running.result()
        raise_on_every_rank(self.problem, self.parallel)
        self._running = None

    def close(self) -> None:
        """Let the save that is being written be finished, and end the thread."""
        self._pace.lift()
        self._thread.shutdown()
