"""A service without instances, whose checker finds what a test says, and OpenAI's client for each tenant."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openai import OpenAI
from starlette.testclient import TestClient

from megatron_mux.serve.api.app import create_app
from megatron_mux.serve.database.store import Store, sqlite_url
from megatron_mux.serve.jobs.fields import Fault
from megatron_mux.serve.keys import new_key, new_tenant
from megatron_mux.serve.service import Service
from megatron_mux.serve.settings import Limits, Settings

URL = "http://127.0.0.1:8000"
CHAT = b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'


@dataclass(frozen=True)
class Found:
    faults: Sequence[Fault] = ()
    total_steps: int | None = 12
    records: int = 6
    tokens: int = 60
    notes: Sequence[str] = ()


@dataclass
class FakeChecker:
    """Finds the faults it is given; `check_files` goes on while `free` is set, and breaks down `broken` times."""

    field_faults: list[Fault] = field(default_factory=list)
    file_faults: list[Fault] = field(default_factory=list)
    free: bool = True
    broken: int = 0
    tasks: list[dict[str, Any]] = field(default_factory=list)

    async def check_fields(self, backbone: Path, task: dict[str, Any]) -> Sequence[Fault]:
        self.tasks.append(task)
        await asyncio.sleep(0.01)
        return self.field_faults

    async def check_files(self, backbone: Path, task: dict[str, Any]) -> Found:
        if self.broken:
            self.broken -= 1
            raise RuntimeError("the checker has died")
        while not self.free:
            await asyncio.sleep(0.002)
        return Found(self.file_faults)


@dataclass
class World:
    service: Service
    http: TestClient
    checker: FakeChecker
    woken: list[None]

    def key(self, tenant: str) -> str:
        return new_key(self.service.store, new_tenant(self.service.store, tenant))

    def client(self, tenant: str = "ann") -> OpenAI:
        return OpenAI(http_client=self.http, base_url=f"{URL}/v1", api_key=self.key(tenant), max_retries=0)

    def until(self, true: Callable[[], bool]) -> None:
        end = time.monotonic() + 10
        while not true():
            assert time.monotonic() < end
            time.sleep(0.002)


def make_world(directory: Path, **changes: Any) -> World:
    """A service in a directory; `changes` are to its limits."""
    settings = Settings(
        directory,
        {"tiny": directory / "tiny"},
        hosts=("mux.example",),
        reserve_bytes=0,
        limits=Limits(**changes),
    )
    checker, woken = FakeChecker(), list[None]()
    service = Service(settings, Store(sqlite_url(directory)), checker, lambda: woken.append(None))
    http = TestClient(create_app(service), base_url=URL, raise_server_exceptions=False)
    return World(service, http, checker, woken)


def upload(client: OpenAI, content: bytes = CHAT, name: str = "data.jsonl") -> str:
    return client.files.create(file=(name, io.BytesIO(content)), purpose="fine-tune").id


def status(client: OpenAI, job_id: str) -> str:
    return client.fine_tuning.jobs.retrieve(job_id).status
