"""What the routes and the dispatcher of a service share."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakValueDictionary

from megatron_mux.serve.completions import Completions
from megatron_mux.serve.database.store import Store
from megatron_mux.serve.jobs.fields import Fault
from megatron_mux.serve.settings import Settings


class Checked(Protocol):
    """What a check of a job's files found. `total_steps` is None if there are faults."""

    @property
    def faults(self) -> Sequence[Fault]:
        """Everything that is wrong with the files; empty: nothing."""

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the job."""

    @property
    def records(self) -> int:
        """Those that it learns from."""

    @property
    def tokens(self) -> int:
        """Of one pass over them."""

    @property
    def notes(self) -> Sequence[str]:
        """What its tenant should know of them."""


class Checker(Protocol):
    """Checks tasks and files with the engine's own code, in other processes."""

    async def check_fields(self, backbone: Path, task: dict[str, Any]) -> Sequence[Fault]:
        """Check everything of a task but its files."""

    async def check_files(self, backbone: Path, task: dict[str, Any]) -> Checked:
        """Tokenise the files of a task and check each record."""


@dataclass
class Service:
    """A running service. Routes reach it as `request.app.state.service`.

    Attributes:
        wake: Tells the dispatcher that jobs have changed. Any thread may call it.
        started: Seconds since 1970.
        checks: Background checks of files, so that they are neither collected as garbage nor left behind.
        locks: By tenant and body of a request that makes a job: two equal ones follow each other.
        receiving: Uploads in progress, by tenant.
        completing: Chat completions in progress, by tenant.
        completions: Set by whoever serves chats, which take instances.
    """

    settings: Settings
    store: Store
    checker: Checker
    wake: Callable[[], None]
    started: float = field(default_factory=time.time)
    checks: set[asyncio.Task[None]] = field(default_factory=set)
    locks: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)
    receiving: Counter[str] = field(default_factory=Counter)
    completing: Counter[str] = field(default_factory=Counter)
    completions: Completions = field(init=False, repr=False)
