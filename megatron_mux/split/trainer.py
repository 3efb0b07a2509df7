"""Fine-tunes one task whose data, labels, first and last layers stay in this process, and whose body is on a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_mux.directory_lock import DirectoryLock
from megatron_mux.errors import UserError
from megatron_mux.report import Reporter
from megatron_mux.saved_files import refuse_used
from megatron_mux.split.affinity import identity_of
from megatron_mux.split.agreement import WireDtype
from megatron_mux.split.client_run import ClientRun
from megatron_mux.split.link import LOST, ClientTransport, Tally
from megatron_mux.split.noise import Privacy as PrivacySection
from megatron_mux.split.remote import Privacy
from megatron_mux.split.run_record import refuse_other_clients
from megatron_mux.split.tls import ClientTls
from megatron_mux.split.wire import RefusedError
from megatron_mux.task_table import LOADING, TaskHistory
from megatron_mux.tasks import TaskSpec, read_task

_MOST_LOSSES = 8
"""How often the server may lose steps before the client has saved once more."""


@dataclass
class SplitTrainer:
    """Fine-tunes one task through a server.

    The loop, metrics, evaluations and saves are those of every run. A server that was restarted may have lost steps
    that the client has done: both then go back to the client's newest save that the server has too.

    Args:
        backbone: Hugging Face directory, or what `export_client` made of one: only the client's layers are read.
        task: What `tasks.yaml` holds of a task; relative paths start from the working directory.
        server: `HOST:PORT`; tried for a minute if nobody is there.
        tls: The client's certificate, and the CA of the server's; None (tests only): no encryption.
        cut_front: Layers that the client computes behind the embedding, at least 1.
        cut_back: Layers that it computes before the final norm.
        save: Directory for checkpoints and metrics, which clients with other tasks may share.
        load: Directory of a run to continue; if it is empty, a new run starts.
        break_lock: Take over a `save` directory that another process has locked.
        save_interval: Steps between saves, besides the one at the end; None: what the task's section says, else a
            tenth of the run, from 10 to 50.
        keep_checkpoints: Saves to keep; None: all, but 3 if nobody says how often to save.
        log_interval: Steps between printed lines.
        tensorboard_dir: Directory for TensorBoard.
        wire: Dtype of what is sent.
        dtype: In which the client's layers compute.
        device: Where; by default a GPU if there is one.
        progress: Whether to draw a live table on a terminal.
        privacy: Clipping and noise of what is sent, or an object that does it otherwise; None: it is sent as it is.
        connect: Makes the connection; None: gRPC.

    Attributes:
        tally: Of all requests so far.
        lock: On the task's directory in `save`, while it trains.
    """

    backbone: str | Path
    task: TaskSpec | Mapping[str, Any]
    server: str
    tls: ClientTls | None
    cut_front: int = 1
    cut_back: int = 1
    save: Path | None = None
    load: Path | None = None
    break_lock: bool = False
    save_interval: int | None = None
    keep_checkpoints: int | None = None
    log_interval: int = 10
    tensorboard_dir: Path | None = None
    wire: WireDtype = "f32"
    dtype: torch.dtype = torch.float32
    device: torch.device | str | None = None
    progress: bool = True
    privacy: PrivacySection | Privacy | None = None
    connect: Callable[[Callable[[str], None]], ClientTransport] | None = None
    tally: Tally = field(default_factory=Tally, init=False)
    lock: DirectoryLock | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Take text for paths, too."""
        self.save, self.load, self.tensorboard_dir = (
            None if path is None else Path(path) for path in (self.save, self.load, self.tensorboard_dir)
        )

    @property
    def identity(self) -> str:
        """The client's name on the server: the common name of its certificate."""
        return "local" if self.tls is None else identity_of(self.tls.certificate)

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
                own = self.save / spec.name
                self.lock = held.enter_context(DirectoryLock(own, break_lock=self.break_lock, say=print))
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
        reporter.add(spec, LOADING)
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
