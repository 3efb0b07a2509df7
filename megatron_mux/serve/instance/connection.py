"""Keeps an instance connected to its server, in a thread of rank 0."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megatron_mux.serve.channel.messages import (
    LONGEST,
    Abandon,
    Acknowledge,
    AnyReport,
    Beat,
    Broken,
    Complete,
    Drain,
    Hello,
    Leave,
    Message,
    Piece,
    Refuse,
    Reports,
    Submit,
    Welcome,
    read_command,
)
from megatron_mux.serve.instance.held import HeldJobs
from megatron_mux.serve.instance.saves import RunFiles
from megatron_mux.training.commands import Tell

_SECONDS_BETWEEN_LOOKS = 0.2
_SECONDS_BETWEEN_BEATS = 1.0
_SECONDS_TO_DIAL_AGAIN = 0.5
_SECONDS_TO_TELL = 20.0
"""At the end, for reports that the server has not committed."""


@dataclass
class Connection:
    """Dials the server, again whenever it goes away; passes its commands on and sends it reports.

    Attributes:
        address: The server's Unix socket.
        name, token: By which the server knows the instance.
        jobs: Of the instance.
        files: What the run leaves.
        arrived: Set when the loop has something to look at.
    """

    address: Path
    name: str
    token: str
    jobs: HeldJobs
    files: RunFiles
    arrived: threading.Event = field(default_factory=threading.Event)
    _outbox: deque[Message] = field(default_factory=deque)
    _choices: dict[str, int] = field(default_factory=dict)  # of completions that are not over, by their ids
    _ends: threading.Event = field(default_factory=threading.Event)
    _socket: socket.socket | None = None
    _received: bytes = b""
    _is_welcome: bool = False
    _next_beat: float = 0.0

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def send(self, message: Message) -> None:
        """Have the server told something at once, if it is there; any thread may call it."""
        self._outbox.append(message)
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Report what the run has left, give the server some time to commit it, and leave."""
        if not self._thread.is_alive():
            return
        deadline = time.monotonic() + _SECONDS_TO_TELL
        self._ends.set()
        self._thread.join(timeout=max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        deadline = float("inf")
        while time.monotonic() < deadline:
            if self._ends.is_set() and deadline == float("inf"):
                deadline = time.monotonic() + _SECONDS_TO_TELL
            self.files.look()
            if self._ends.is_set() and self.jobs.has_told_all and not (self._is_welcome and self._outbox):
                break
            try:
                self._exchange()
            except (
                OSError,
                ValueError,
            ):  # the server went away, or what is there is no server of this version
                self._hang_up()
                time.sleep(_SECONDS_TO_DIAL_AGAIN)
        self._hang_up()

    def _exchange(self) -> None:
        """Send what is new, and follow what the server has sent."""
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(str(self.address))
            self._send([Hello(instance=self.name, token=self.token, jobs=self.jobs.held())])
        if self._is_welcome:
            self._report(self.jobs.unsent())
            if time.monotonic() >= self._next_beat:
                self._next_beat = time.monotonic() + _SECONDS_BETWEEN_BEATS
                self._send([Beat()])
            while self._outbox:
                self._send_now(self._outbox.popleft())
        descriptor = self._socket.fileno()
        ready = select.select([descriptor, self._wake], [], [], _SECONDS_BETWEEN_LOOKS)[0]
        if self._wake in ready:
            os.eventfd_read(self._wake)
        if descriptor in ready:
            self._receive()

    def _send_now(self, message: Message) -> None:
        """Send what concerns a completion, unless the server that asked for it has gone away."""
        if not isinstance(message, Piece | Broken) or message.id not in self._choices:
            return
        self._choices[message.id] -= isinstance(message, Piece) and message.finish is not None
        if isinstance(message, Broken) or not self._choices[message.id]:
            del self._choices[message.id]
        self._send([message])

    def _receive(self) -> None:
        assert self._socket is not None
        received = self._socket.recv(1 << 16)
        if not received:
            raise ConnectionError("the server has closed the connection")
        *lines, self._received = (self._received + received).split(b"\n")
        if len(self._received) > LONGEST:
            raise ValueError("a command is too long")
        for line in lines:
            self._follow(line)

    def _follow(self, line: bytes) -> None:
        match read_command(line):
            case Welcome(last_report=last):
                self._is_welcome = True
                self._report(self.jobs.unsent(after=last))
            case Submit() as submit:
                self.jobs.submit(submit)
            case Leave() as leave:
                self.jobs.leave(leave)
            case Complete() as request:
                self._choices[request.id] = request.choices
                self._tell(request)
            case Abandon() as request:
                self._choices.pop(request.id, None)
                self._tell(request)
            case Acknowledge(report=number):
                self.jobs.acknowledge(number)
            case Drain() | Refuse():
                self.jobs.drain()
        self.arrived.set()

    def _tell(self, request: Complete | Abandon) -> None:
        self.jobs.queue.put(Tell(request))

    def _report(self, reports: Sequence[AnyReport]) -> None:
        if reports:
            self._send([Reports(reports=list(reports))])

    def _send(self, messages: Sequence[Message]) -> None:
        assert self._socket is not None
        for message in messages:
            self._socket.sendall(message.line())

    def _hang_up(self) -> None:
        if self._socket is not None:
            with suppress(OSError):
                self._socket.close()
        self._socket, self._is_welcome, self._received = None, False, b""
        for own in list(self._choices):  # whoever asked is gone
            self._tell(Abandon(id=own))
        self._choices.clear()
        self.arrived.set()
