"""Fine-tunes one task whose data, labels, first and last layers stay in this process, and whose body is on a server."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from megatron_mux.directory_lock import DirectoryLock
from megatron_mux.errors import UserError
from megatron_mux.report import Reporter
from megatron_mux.saved_files import refuse_used
from megatron_mux.split.client.link import LOST
from megatron_mux.split.client.options import ClientOptions
from megatron_mux.split.client.run import ClientRun
from megatron_mux.split.client.run_record import refuse_other_clients
from megatron_mux.split.protocol.wire import RefusedError
from megatron_mux.task_table import TaskHistory
from megatron_mux.tasks import TaskSpec, read_task
from megatron_mux.tasks.life import TaskLife

_MOST_LOSSES = 8
"""How often the server may lose steps before the client has saved once more."""


class SplitTrainer(ClientOptions):
    """Fine-tunes one task through a server; see `ClientOptions` for the arguments.

    The loop, metrics, evaluations and saves are those of every run. A server that was restarted may have lost steps
    that the client has done: both then go back to the client's newest save that the server has too.
    """

    def train(self) -> TaskHistory:
        """Train until the task is done, or until a signal: then save and leave.

        Returns:
            The task's figures.

        Raises:
            UserError: The input is wrong, or the server cannot be reached, refuses the client, or loses steps again and
                again.
        """
        spec = self.task if isinstance(self.task, TaskSpec) else read_task(self.task, Path.cwd())
        self._refuse_other_clients(spec.name)  # before a lock is broken
        with ExitStack() as held:
            if self.save is not None:
                path = self.save / spec.name
                self.lock = held.enter_context(DirectoryLock(path, break_lock=self.break_lock, say=print))
            self._refuse_other_clients(spec.name)
            if self.save is not None and self.save != self.load:
                refuse_used(self.save, spec.name)
            return self._train(spec)

    def _refuse_other_clients(self, task: str) -> None:
        for flag, directory in (("--save", self.save), ("--load", self.load)):
            refuse_other_clients(flag, directory, task, self.identity)

    def _train(self, spec: TaskSpec) -> TaskHistory:
        """`train`, while nobody else writes into the task's directory."""
        reporter = self._reporter(spec.name)
        reporter.add(spec, TaskLife("loading"))
        try:
            run = ClientRun.open(self, spec, reporter.say)
            losses, saved = 0, -1
            while True:
                try:
                    run.attempt(reporter)
                    return reporter.history[spec.name]
                except RefusedError as error:
                    if error.code != LOST:
                        raise
                    why = str(error)
                reporter.release()
                reached = run.go_back()
                losses, saved = (1 if reached > saved else losses + 1), max(saved, reached)
                if losses > _MOST_LOSSES:
                    raise UserError(
                        f"{spec.name}: the server has lost steps {losses} times after step {reached}: {why}"
                    )
                reporter = self._reporter(spec.name)
                reporter.say(f"{spec.name}: going back to step {reached}, since {why}")
        finally:
            reporter.release()

    def _reporter(self, name: str) -> Reporter:
        return Reporter(
            self.save, self.tensorboard_dir, self.log_interval, self.progress, silent=False, owner=name
        )
