"""Instances are known by their tokens; what they report is acknowledged once it is committed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megatron_mux.serve.channel.hub import Hub
from megatron_mux.serve.channel.messages import (
    Acknowledge,
    AnyReport,
    Beat,
    Held,
    Hello,
    Leave,
    Message,
    Refuse,
    Reports,
    State,
    Welcome,
    read_command,
)
from megatron_mux.serve.database.ids import hash_of


@dataclass
class Records:
    committed: list[AnyReport] = field(default_factory=list)

    def token_hash(self, instance: str) -> str | None:
        return hash_of("secret") if instance == "0.0" else None

    def last_report(self, instance: str) -> int:
        return max((own.number for own in self.committed), default=0)

    def commit(self, instance: str, reports: Sequence[AnyReport]) -> None:
        self.committed += reports


def talk(directory: Path, *sent: Message, raw: bytes = b"") -> tuple[list[Any], Records, Hub]:
    """What a server answers to an instance that says this and stays connected until it has got all answers."""
    records = Records()

    async def run() -> tuple[list[Any], Hub]:
        hub = Hub(records, lambda: None)
        await hub.start(directory / "socket")
        reader, writer = await asyncio.open_unix_connection(directory / "socket")
        writer.write(b"".join(message.line() for message in sent) + raw)
        answers = []
        while True:
            try:
                line = await asyncio.wait_for(reader.readline(), 0.3)
            except TimeoutError:
                hub.send("0.0", Leave(job="old", attempt=1))
                line = await reader.readline()
            if not line:
                break
            answers.append(read_command(line))
            if isinstance(answers[-1], Leave):
                break
        held = dict(hub.peers["0.0"].held) if "0.0" in hub.peers else None
        writer.close()
        await hub.close()
        return [*answers, held], hub

    answers, hub = asyncio.run(run())
    return answers, records, hub


def state(number: int, job: str, new: str) -> State:
    return State(number=number, job=job, attempt=1, state=new)


def test_reports_are_committed_and_acknowledged_and_commands_reach_the_instance(tmp_path: Path) -> None:
    jobs = [Held(job="old", attempt=1), Held(job="left", attempt=2)]
    hello = Hello(instance="0.0", token="secret", jobs=jobs)
    reports = [state(1, "old", "running"), state(2, "left", "removed")]
    answers, records, _ = talk(tmp_path, hello, Beat(free_bytes=7), Reports(reports=[*reports]))
    assert answers == [Welcome(last_report=0), Acknowledge(report=2), Leave(job="old", attempt=1), {"old": 1}]
    assert records.committed == reports


@pytest.mark.parametrize(
    "hello",
    [
        Hello(instance="0.0", token="wrong"),
        Hello(instance="gone", token="secret"),
        Hello(instance="0.0", token="secret", version="0.0.1"),
    ],
)
def test_whoever_is_not_known_or_of_another_version_is_refused(tmp_path: Path, hello: Hello) -> None:
    (refused, held), records, hub = talk(tmp_path, hello, Reports(reports=[state(1, "old", "running")]))
    assert isinstance(refused, Refuse) and held is None and not records.committed and not hub.peers


@pytest.mark.parametrize(
    "raw", [b"GET / HTTP/1.1\n", b'{"kind":"reports","reports":[]}\n', b"\xff\n", b"{}\n"]
)
def test_whoever_does_not_greet_is_hung_up_on(tmp_path: Path, raw: bytes) -> None:
    answers, _, hub = talk(tmp_path, raw=raw)
    assert answers == [None] and not hub.peers
