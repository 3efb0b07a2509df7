"""What a client of a split server is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_mux.directory_lock import DirectoryLock
from megatron_mux.split.client.affinity import identity_of
from megatron_mux.split.client.link import ClientTransport, RequestTotals
from megatron_mux.split.client.remote import Privacy
from megatron_mux.split.privacy.noise import Privacy as PrivacySection
from megatron_mux.split.protocol.agreement import WireDtype
from megatron_mux.split.tls import ClientTls
from megatron_mux.tasks import TaskSpec


@dataclass
class ClientOptions:
    """What a client trains, through which server, and how.

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
        totals: Of all requests so far.
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
    totals: RequestTotals = field(default_factory=RequestTotals, init=False)
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
