"""Tells the server of changes in jobs' states, and never lets one wait for memory: the server orders jobs."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_mux.serve.channel.messages import State
from megatron_mux.serve.instance.held import HeldJobs
from megatron_mux.tasks.life import StateChange
from megatron_mux.training.callback import Callback
from megatron_mux.training.commands import Cancel

NO_ROOM = "its memory does not fit beside the jobs that train there"


@dataclass(eq=False)
class TellsStates(Callback):
    """Reports states of jobs. Those that end with a save are reported once it is complete (see `saves.py`).

    Attributes:
        jobs: Of this instance; None on ranks that tell nobody.
    """

    jobs: HeldJobs | None

    def state_changed(self, change: StateChange) -> None:
        """See `Callback`."""
        held = None if self.jobs is None else self.jobs.of(change.name)
        if self.jobs is None or held is None:
            return
        is_kept = change.old in ("running", "parked", "paused")  # a save is going to tell of it
        state, reason = str(change.new), change.reason
        if state == "waiting":
            held.is_refused = True
            self.jobs.queue.put(Cancel(change.name))
            return
        if state == "removed" and held.is_refused:
            state, reason = "no_room", NO_ROOM
        elif (state == "removed" and is_kept) or state in ("joining", "finished", "failed", "stopped"):
            return
        self.jobs.report(State, job=held.job, attempt=held.attempt, state=state, reason=reason)
        if state in ("removed", "refused", "no_room"):
            self.jobs.drop(held)
