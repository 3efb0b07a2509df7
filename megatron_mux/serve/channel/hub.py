"""The server's end of the channel: who is connected, what they report and answer, and commands for them."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from megatron_mux.serve.channel.messages import (
    LONGEST,
    Abandon,
    Acknowledge,
    AnyReport,
    Beat,
    Broken,
    Complete,
    Held,
    Hello,
    Message,
    Piece,
    Refuse,
    Reports,
    Saved,
    State,
    Welcome,
    read_from_instance,
)
from megatron_mux.serve.channel.run_files import ENDS
from megatron_mux.serve.database.ids import hash_of
from megatron_mux.version import __version__

_log = logging.getLogger(__name__)

Pieces = asyncio.Queue[Piece | Broken]
_MOST_WAITING = 10_000
"""Pieces of a completion that its client has not taken; a slower one loses it, as the others must not wait."""


class Records(Protocol):
    """Takes what instances report; its methods are called in threads."""

    def token_hash(self, instance: str) -> str | None:
        """What is kept of an instance's token; None: there is no such instance, or it is gone."""

    def last_report(self, instance: str) -> int:
        """The number of the last report that was committed."""

    def commit(self, instance: str, reports: Sequence[AnyReport]) -> None:
        """Commit reports, in one transaction with the number of the last one."""


@dataclass
class OpenCompletion:
    """A completion that an instance has been given.

    Attributes:
        choices: Those that are not finished.
        pieces: What has come and was not taken yet.
    """

    choices: set[int]
    pieces: Pieces = field(default_factory=asyncio.Queue)


@dataclass
class Peer:
    """A connected instance.

    Attributes:
        name: Of the instance.
        held: Its jobs when it connected, with those that it has been given and without those that have left since.
        heard_at: When it was last heard, by the monotonic clock.
        free_bytes: That are left on its fullest rank, if it plans memory.
        completions: Those that it has and that are not over, by their ids.
    """

    name: str
    writer: asyncio.StreamWriter
    held: dict[str, int]
    heard_at: float = field(default_factory=time.monotonic)
    free_bytes: int | None = None
    completions: dict[str, OpenCompletion] = field(default_factory=dict)


class Hub:
    """Listens for instances.

    Args:
        records: Commits what they report.
        changed: Called when something has happened that the dispatcher is to look at.

    Attributes:
        peers: The connected instances, by their names.
    """

    def __init__(self, records: Records, changed: Callable[[], None]) -> None:
        self.peers: dict[str, Peer] = {}
        self._records = records
        self._changed = changed
        self._server: asyncio.Server | None = None

    async def start(self, address: Path) -> None:
        """Listen on a Unix socket that only this user can open.

        Raises:
            OSError: That is not possible, as where its path is too long for a socket.
        """
        with suppress(FileNotFoundError):
            address.unlink()  # of a server that was killed; another living one holds the lock on the directory
        before = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(self._serve, address, limit=LONGEST)
        finally:
            os.umask(before)

    async def close(self) -> None:
        """Close all connections; the instances go on and dial again."""
        if self._server is not None:
            self._server.close()
        for peer in list(self.peers.values()):
            peer.writer.close()

    def send(self, instance: str, message: Message) -> bool:
        """Send a command; whether the instance is connected."""
        peer = self.peers.get(instance)
        if peer is None:
            return False
        peer.writer.write(message.line())
        return True

    def complete(self, instance: str, message: Complete) -> Pieces:
        """Have a connected instance continue a conversation.

        Returns:
            What comes of it: pieces until each choice has its `finish`, or `Broken` as the last one.
        """
        peer = self.peers[instance]
        opened = peer.completions[message.id] = OpenCompletion(set(range(message.choices)))
        peer.writer.write(message.line())
        return opened.pieces

    def abandon(self, instance: str, completion: str) -> None:
        """Nobody waits for a completion any more; if it is over, nothing happens."""
        peer = self.peers.get(instance)
        if peer is not None and peer.completions.pop(completion, None) is not None:
            peer.writer.write(Abandon(id=completion).line())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer: Peer | None = None
        try:
            peer = await self._welcome(reader, writer)
            if peer is not None:
                await self._listen(peer, reader)
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            _log.warning("connection of %s: %s", peer.name if peer else "an unknown instance", error)
        finally:
            if peer is not None:
                if self.peers.get(peer.name) is peer:
                    del self.peers[peer.name]
                    self._changed()
                _break_all(peer)
            writer.close()

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Peer | None:
        """Find out who has connected."""
        hello = read_from_instance(await reader.readline())
        if not isinstance(hello, Hello):
            raise ValueError("the first message was no greeting")
        known = await asyncio.to_thread(self._records.token_hash, hello.instance)
        problem = ""
        if known is None or not hmac.compare_digest(known, hash_of(hello.token)):
            problem = "this server has not started it, or has given it up"
        elif hello.version != __version__:
            problem = f"it is of version {hello.version}, the server of {__version__}"
        if problem:
            _log.warning("instance %s is refused: %s", hello.instance, problem)
            writer.write(Refuse(reason=problem).line())
            await writer.drain()
            return None
        last = await asyncio.to_thread(self._records.last_report, hello.instance)
        peer = Peer(hello.instance, writer, _by_job(hello.jobs))
        writer.write(Welcome(last_report=last).line())
        self.peers[peer.name] = peer
        self._changed()
        return peer

    async def _listen(self, peer: Peer, reader: asyncio.StreamReader) -> None:
        """Take reports."""
        while line := await reader.readline():
            message = read_from_instance(line)
            peer.heard_at = time.monotonic()
            if isinstance(message, Beat):
                peer.free_bytes = message.free_bytes
            elif isinstance(message, Piece | Broken):
                _pass_on(peer, message)
            elif isinstance(message, Reports) and message.reports:
                await asyncio.to_thread(self._records.commit, peer.name, message.reports)
                for report in filter(_ends, message.reports):
                    peer.held.pop(report.job, None)
                peer.writer.write(Acknowledge(report=message.reports[-1].number).line())
                self._changed()


def _pass_on(peer: Peer, message: Piece | Broken) -> None:
    """Give what an instance says of a completion to whoever waits for it, if that is the instance's and is not over."""
    opened = peer.completions.get(message.id)
    if opened is None:
        return
    if isinstance(message, Piece):
        if message.choice not in opened.choices:
            return
        if opened.pieces.qsize() >= _MOST_WAITING:
            peer.writer.write(Abandon(id=message.id).line())
            message = Broken(id=message.id, message="the answer was read too slowly", code="too_slow")
        elif message.finish is not None:
            opened.choices.discard(message.choice)
    opened.pieces.put_nowait(message)
    if isinstance(message, Broken) or not opened.choices:
        del peer.completions[message.id]


def _break_all(peer: Peer) -> None:
    """Tell whoever waits for an instance that it is gone."""
    for own, opened in peer.completions.items():
        opened.pieces.put_nowait(Broken(id=own, message="its instance went away", code="instance_gone"))
    peer.completions.clear()


def _ends(report: AnyReport) -> bool:
    """Whether the instance has the job no more."""
    if isinstance(report, Saved):
        return report.status in ENDS
    return isinstance(report, State) and report.state in ("removed", "refused", "no_room")


def _by_job(held: Sequence[Held]) -> dict[str, int]:
    return {own.job: own.attempt for own in held}
