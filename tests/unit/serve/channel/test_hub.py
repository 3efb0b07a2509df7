"""Instances are known by their tokens; what they report is acknowledged once it is committed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megatron_mux.serve.channel import hub as module
from megatron_mux.serve.channel.hub import Hub, Pieces
from megatron_mux.serve.channel.messages import (
    Abandon,
    Acknowledge,
    AnyReport,
    Beat,
    Broken,
    Complete,
    Held,
    Hello,
    Leave,
    Message,
    Piece,
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
        return hash_of("secret") if instance in ("0.0", "1.0") else None

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


@dataclass
class Instance:
    """Connected to a hub, and does what a test says."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def say(self, *messages: Message) -> None:
        self.writer.write(b"".join(message.line() for message in messages))

    async def heard(self) -> Any:
        return read_command(await asyncio.wait_for(self.reader.readline(), 10))


@asynccontextmanager
async def connected(hub: Hub, address: Path, name: str) -> AsyncIterator[Instance]:
    instance = Instance(*await asyncio.open_unix_connection(address))
    instance.say(Hello(instance=name, token="secret"))
    assert isinstance(await instance.heard(), Welcome)
    try:
        yield instance
    finally:
        instance.writer.close()


async def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end
        await asyncio.sleep(0.002)


def with_two(directory: Path, do: Callable[[Hub, Instance, Instance], Coroutine[Any, Any, None]]) -> None:
    """Do something with two connected instances, `0.0` and `1.0`."""

    async def run() -> None:
        hub = Hub(Records(), lambda: None)
        address = directory / "socket"
        await hub.start(address)
        async with connected(hub, address, "0.0") as first, connected(hub, address, "1.0") as second:
            await do(hub, first, second)
        await hub.close()

    asyncio.run(run())


ASKED = Complete(id="chat", messages=[{"role": "user", "content": "a"}], choices=2)


def piece(choice: int, text: str = "", **more: Any) -> Piece:
    return Piece(id="chat", choice=choice, text=text, prompt_tokens=1, completion_tokens=1, **more)


def taken(pieces: Pieces) -> list[Piece | Broken]:
    return [pieces.get_nowait() for _ in range(pieces.qsize())]


def test_a_completion_gets_what_its_own_instance_says_until_it_is_over(tmp_path: Path) -> None:
    async def do(hub: Hub, first: Instance, second: Instance) -> None:
        pieces = hub.complete("0.0", ASKED)
        assert await first.heard() == ASKED and set(hub.peers["0.0"].completions) == {"chat"}
        ends = [piece(1, "b", finish="stop"), piece(0, "c", finish="length")]
        second.say(piece(0, "of another"), Broken(id="chat", message="of another"), Beat(free_bytes=1))
        await until(lambda: hub.peers["1.0"].free_bytes == 1)
        first.say(piece(0, "a"), ends[0], piece(1, "late"), piece(2, "none"), ends[1], piece(0, "late"))
        first.say(Beat(free_bytes=1))
        await until(lambda: hub.peers["0.0"].free_bytes == 1)
        assert taken(pieces) == [piece(0, "a"), *ends] and not hub.peers["0.0"].completions
        hub.abandon("0.0", "chat")  # it is over: the instance hears nothing
        hub.abandon("2.0", "chat")
        hub.complete("0.0", ASKED)
        hub.abandon("0.0", "chat")
        assert [await first.heard(), await first.heard()] == [ASKED, Abandon(id="chat")]

    with_two(tmp_path, do)


def test_a_completion_that_breaks_off_is_over(tmp_path: Path) -> None:
    async def do(hub: Hub, first: Instance, second: Instance) -> None:
        pieces = hub.complete("0.0", ASKED)
        broken = Broken(id="chat", message="no", is_clients=True)
        first.say(broken, piece(0, "late"), Beat(free_bytes=1))
        await until(lambda: hub.peers["0.0"].free_bytes == 1)
        assert taken(pieces) == [broken] and not hub.peers["0.0"].completions

    with_two(tmp_path, do)


def test_the_completions_of_an_instance_that_goes_away_break_off(tmp_path: Path) -> None:
    async def do(hub: Hub, first: Instance, second: Instance) -> None:
        gone, other = hub.complete("0.0", ASKED), hub.complete("1.0", ASKED)
        async with connected(hub, tmp_path / "socket", "0.0") as again:
            new = hub.peers["0.0"]
            kept = hub.complete("0.0", ASKED)
            first.writer.close()
            await until(lambda: gone.qsize() > 0)
            (last,) = taken(gone)
            assert isinstance(last, Broken) and "its instance went away" in last.message
            assert hub.peers["0.0"] is new and other.empty() and kept.empty()
            assert not last.is_clients and await again.heard() == ASKED

    with_two(tmp_path, do)


def test_a_completion_that_nobody_reads_is_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_WAITING", 3)

    async def do(hub: Hub, first: Instance, second: Instance) -> None:
        pieces = hub.complete("0.0", ASKED)
        first.say(*(piece(0, str(number)) for number in range(9)))
        assert [await first.heard(), await first.heard()] == [ASKED, Abandon(id="chat")]
        *before, last = taken(pieces)
        assert before == [piece(0, str(number)) for number in range(3)]
        assert isinstance(last, Broken) and last.code == "too_slow" and not hub.peers["0.0"].completions

    with_two(tmp_path, do)
