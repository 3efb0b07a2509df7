"""What an operator chooses for a service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Limits:
    """Bounds on what one tenant, or one request, may take.

    Attributes:
        file_bytes: Of one upload.
        stored_bytes: Of all files of a tenant.
        files: Of a tenant.
        open_jobs: Jobs of a tenant that are not over.
        running_jobs: Of a tenant that train at the same time; None: no bound.
        open_completions: Chat completions of a tenant that are in progress or wait for an instance.
        body_bytes: Of a request that is not an upload.
    """

    file_bytes: int = 512 * 2**20
    stored_bytes: int = 10 * 2**30
    files: int = 1000
    open_jobs: int = 300
    running_jobs: int | None = None
    open_completions: int = 16
    body_bytes: int = 2 * 2**20


@dataclass(frozen=True)
class Settings:
    """A service.

    Attributes:
        state: Its directory: the database, files, jobs, what instances save.
        backbones: Directories of models, by the names that clients use.
        host, port: Where it listens.
        database: SQLAlchemy's URL; empty: SQLite in `state`.
        instances: How many engines there are at most.
        flags: Flags of training that each instance gets.
        processes: Of each instance.
        policy: Who comes next: first come first served with filling up, or the fair one.
        reserve_bytes: Free space below which uploads are refused and jobs pause.
        hosts: Names of this server that clients may use beside `host`, in the header `Host`.
        certificate, key: PEM files of HTTPS; None: HTTP.
    """

    state: Path
    backbones: Mapping[str, Path]
    host: str = "127.0.0.1"
    port: int = 8000
    database: str = ""
    instances: int = 1
    flags: tuple[str, ...] = ()
    processes: int = 1
    policy: Literal["fifo", "fair"] = "fair"
    reserve_bytes: int = 2**30
    hosts: tuple[str, ...] = ()
    certificate: Path | None = None
    key: Path | None = None
    limits: Limits = field(default_factory=Limits)

    def url(self, port: int) -> str:
        """Where clients find the API."""
        host = self.hosts[0] if self.hosts else f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self.certificate is None else 'https'}://{host}:{port}/v1"

    @property
    def files(self) -> Path:
        """The contents of files, by their ids."""
        return self.state / "files"

    @property
    def runs(self) -> Path:
        """What instances save: a directory each."""
        return self.state / "instances"

    @property
    def socket(self) -> Path:
        """Where instances dial."""
        return self.state / "channel.sock"
