"""Reports what a run leaves in its directory: lines of metrics, and saves once they are complete.

Files are where reports wait for a server that is away: nothing piles up in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from megatron_mux.serve.channel.messages import Lines, Saved
from megatron_mux.serve.channel.run_files import ENDS, SavedJob, new_lines, newest_save
from megatron_mux.serve.instance.held import HeldJob, HeldJobs


@dataclass
class RunFiles:
    """Follows the files of a run.

    Attributes:
        jobs: Of the instance.
        root: Directory of the service, which checkpoints are named below.
    """

    jobs: HeldJobs
    root: Path
    _offsets: dict[str, int] = field(default_factory=dict)
    _told: dict[str, tuple[int, str]] = field(default_factory=dict)  # step and status
    _manifest: int = 0

    def look(self) -> None:
        """Report what is new."""
        # A save is read before the metrics, so that the metrics of its steps are reported first.
        number, saved = newest_save(self.jobs.directory, self._manifest)
        for held in self.jobs.jobs():
            if not self._report_lines(held):
                number = self._manifest  # the save is looked at again once the metrics before it are reported
            elif held.task in saved:
                self._report_save(held, saved[held.task])
        self._manifest = number

    def _report_lines(self, held: HeldJob) -> bool:
        """Report the metrics that a job has got; whether none are left."""
        for lines, offset in new_lines(self.jobs.directory, held.task, self._offsets.get(held.task, 0)):
            if self.jobs.is_full:
                return False
            self.jobs.report(Lines, job=held.job, attempt=held.attempt, lines=lines)
            self._offsets[held.task] = offset
        return True

    def _report_save(self, held: HeldJob, saved: SavedJob) -> None:
        """Report a save of a job, if it has got further."""
        if self._told.get(held.task) == (saved.step, saved.status):
            return
        if saved.checkpoint is None and saved.status not in ENDS:
            return  # it has not been saved here
        self._told[held.task] = saved.step, saved.status
        below = saved.checkpoint and str(saved.checkpoint.resolve().relative_to(self.root.resolve()))
        self.jobs.report(
            Saved, job=held.job, attempt=held.attempt, step=saved.step, checkpoint=below or "",
            status=saved.status, reason=saved.reason,
        )  # fmt: skip
        if saved.status in ENDS:
            self.jobs.drop(held)
            self._offsets.pop(held.task, None)
            self._told.pop(held.task, None)
