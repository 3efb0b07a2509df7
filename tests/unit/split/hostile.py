"""A server under hostile clients, beside a well-behaved one whose results must not change."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import grpc
import psutil
import torch
from torch import Tensor

from megatron_mux.split.certificates import make_ca, make_client, make_server
from megatron_mux.split.client.transport import Transport
from megatron_mux.split.protocol.messages import Gradient, Message
from megatron_mux.split.protocol.wire import Dtype, Flags, Kind, Limits
from megatron_mux.split.server.service import Send, ServerTls, Service
from megatron_mux.split.server.serving import SplitServer
from megatron_mux.split.server.stream import ServerStream
from tests.end_to_end.harness import relative
from tests.unit.split.hostile_cases import CASES, act, raw_connection
from tests.unit.split.hostile_stream import HIDDEN, LARGE_ROWS, ROWS, TRAINING, AnyFields, Stream, hello
from tests.unit.split.running_server import RunningServer

IDENTITIES = 64
"""Names that hostile clients without TLS go by in turn: one would meet the limit on joining in every case."""
BYTES_IN_FLIGHT = 64 << 20
MOST_GROWTH = 512 << 20
"""Bytes that the process, attackers included, may grow by: those in flight, sessions, and what Python keeps of both."""
STALLING = 16
FAILURES = frozenset({"ERROR internal", "DEADLINE_EXCEEDED", "UNKNOWN", "INTERNAL"})
"""Outcomes that no case may have: the server failed, or did not answer."""
_WORKERS = 3
_REPLIES = frozenset({Kind.WELCOME, Kind.OUTPUT, Kind.GRADIENT, Kind.STATE_REPLY, Kind.BYE})


@dataclass
class Named:
    """A server as it looks to clients without certificates, which get names."""

    server: SplitServer
    names: Iterator[str]

    def limits(self, identity: str) -> Limits:
        return self.server.limits(identity)

    async def session(self, identity: str, incoming: ServerStream, send: Send) -> None:
        await self.server.session(next(self.names), incoming, send)


def train(address: str, name: str, steps: int = 4) -> list[Tensor]:
    """A well-behaved client: all that it gets in some optimizer steps, and the adapter."""
    limits = Limits(_REPLIES, LARGE_ROWS, HIDDEN, Dtype.F32, 1 << 20)
    transport = Transport(address, None, limits, retry_seconds=20, say=lambda text: None)
    random, got = torch.Generator().manual_seed(7), list[Tensor]()
    reply = transport.call(hello(task=name), 120)
    session, previous, operations = reply.session, None, itertools.count(1)

    def ask(kind: Kind, step: int, fields: dict[str, Any], flags: Flags = Flags.NONE) -> Message:
        dense = kind in (Kind.FORWARD, Kind.BACKWARD)
        tensor = torch.randn(ROWS, HIDDEN, generator=random) if dense else None
        dtype = Dtype.F32 if dense else Dtype.NONE
        own = Message(kind, session, step, next(operations), flags, AnyFields(content=fields), tensor, dtype)
        return transport.call(own, 120)

    for step in range(steps):
        told: dict[str, Any] = {} if previous is None else {"previous": previous}
        output = ask(Kind.FORWARD, step, {"lengths": [5, 7], "ids": [0, 1], **told}, TRAINING)
        gradient = ask(Kind.BACKWARD, step, {"forward": output.operation}, Flags.LAST | Flags.NEEDS_INPUT)
        assert output.tensor is not None and gradient.tensor is not None
        square = gradient.read(Gradient).squared_norm
        assert square is not None
        got += [output.tensor, gradient.tensor, torch.tensor(square)]
        previous = {"step": step, "norm": square**0.5, "skip": False}
    state = ask(Kind.STATE, steps, {"previous": previous})
    got += [piece.tensor for piece in state.pieces]
    ask(Kind.LEAVE, steps, {})
    transport.close()
    return got


@dataclass
class Report:
    """What became of an attack.

    Attributes:
        outcomes: By class of case, how often each.
        failures: Cases whose outcome is none of a server that works.
        rounds: How often the victim trained meanwhile.
        changed: Rounds whose results were others than undisturbed.
        growth: Most bytes that the process has grown by.
        seconds: How long it took.
    """

    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    rounds: int = 0
    changed: int = 0
    growth: int = 0
    seconds: float = 0.0

    def add(self, name: str, outcome: str, which: str) -> None:
        self.outcomes.setdefault(name, Counter())[outcome] += 1
        if outcome in FAILURES:
            self.failures.append(f"{which}: {name}: {outcome}")


class Battle:
    """A running server with ports for the victim, for hostile clients, and for those with TLS.

    Args:
        running: The server.
        folder: For certificates.
        tolerance: Relative distance from undisturbed results that counts as the same; 0: to the bit.
    """

    def __init__(self, running: RunningServer, folder: Path, tolerance: float = 0.0) -> None:
        self.running = running
        self.tolerance = tolerance
        names = (f"mallory-{i % IDENTITIES}" for i in itertools.count())
        self.tls = _certificates(folder)
        own = ServerTls(*(folder / name for name in ("server.pem", "server.key", "ca.pem")))
        self.victim = self._open(Named(running.server, itertools.repeat("victim")), None)
        self.hostile = self._open(Named(running.server, names), None)
        self.secure = self._open(running.server, own)
        self.undisturbed = train(f"127.0.0.1:{self.victim}", "undisturbed")

    def _open(self, handler: Any, tls: ServerTls | None) -> int:
        async def start() -> int:
            service = Service(handler, "127.0.0.1:0", tls, BYTES_IN_FLIGHT)
            await service.start()
            if self.running.more:  # all clients share what one server has
                service.in_flight = self.running.more[0].in_flight
            self.running.more.append(service)
            return service.port

        return asyncio.run_coroutine_threadsafe(start(), self.running.loop).result(30)

    def fight(self, cases: int, seed: int) -> Report:
        """Run cases, and the victim beside them until they are over."""
        report, over = Report(), threading.Event()
        process, began = psutil.Process(), time.monotonic()
        before = process.memory_info().rss
        with ThreadPoolExecutor(_WORKERS + 1) as pool, ExitStack() as held:
            victim = pool.submit(self._train_on, report, over)
            slow = deque[Stream]()
            held.callback(over.set)
            outcomes = pool.map(lambda i: self._case(i, seed, slow), range(cases))
            for i, (name, outcome) in enumerate(outcomes):
                report.add(name, outcome, f"case {i} of seed {seed}")
                report.growth = max(report.growth, process.memory_info().rss - before)
            over.set()
            victim.result()
        for one in slow:
            one.cancel()
        report.seconds = time.monotonic() - began
        return report

    def _train_on(self, report: Report, over: threading.Event) -> None:
        while not (over.is_set() and report.rounds):
            found = train(f"127.0.0.1:{self.victim}", f"round-{report.rounds}")
            distances = map(relative, found, self.undisturbed)
            report.changed += len(found) != len(self.undisturbed) or max(distances) > self.tolerance
            report.rounds += 1

    def _case(self, i: int, seed: int, slow: deque[Stream]) -> tuple[str, str]:
        rng = Random(f"{seed}:{i}")
        kind = rng.random()
        if kind < 0.02:
            return "bytes that are no gRPC", raw_connection(rng, rng.choice([self.hostile, self.secure]))
        if kind < 0.03:
            stalls = rng.choice([self._read_slowly, self._say_nothing])
            return stalls.__name__.strip("_").replace("_", " "), stalls(slow)
        if kind < 0.08:
            name = rng.choice(list(self.tls))
            return f"TLS: {name}", self._over_tls(rng, self.tls[name])
        name = rng.choice(list(CASES))
        options = [("grpc.use_local_subchannel_pool", 1)]
        if kind < 0.13 or name == "flood of joins":  # by one client
            with grpc.secure_channel(
                f"localhost:{self.secure}", self.tls["another client"], options
            ) as channel:
                return name, act(CASES[name], rng, channel, self._victims_session())
        with grpc.insecure_channel(f"127.0.0.1:{self.hostile}", options) as channel:
            return name, act(CASES[name], rng, channel, self._victims_session())

    def _over_tls(self, rng: Random, credentials: grpc.ChannelCredentials | None) -> str:
        address, options = f"localhost:{self.secure}", [("grpc.use_local_subchannel_pool", 1)]
        made = (
            grpc.insecure_channel(address, options)
            if credentials is None
            else grpc.secure_channel(address, credentials, options)
        )
        with made as channel:
            stream = Stream(channel)
            stream.send(hello())
            return stream.finish()

    def _read_slowly(self, slow: deque[Stream]) -> str:
        stream = Stream(grpc.insecure_channel(f"127.0.0.1:{self.hostile}"), reads=False)
        stream.send(hello())
        for _ in range(8):
            stream.send(stream.forward(torch.randn(LARGE_ROWS, HIDDEN), Flags.NONE))
        return self._hold(stream, slow)

    def _say_nothing(self, slow: deque[Stream]) -> str:
        return self._hold(Stream(grpc.insecure_channel(f"127.0.0.1:{self.hostile}")), slow)

    def _hold(self, stream: Stream, slow: deque[Stream]) -> str:
        slow.append(stream)
        if len(slow) > STALLING:
            slow.popleft().cancel()
        return "held"

    def _victims_session(self) -> int:
        sessions = list(self.running.server.sessions.values())
        return next((one.number for one in sessions if one.identity == "victim"), 1)


def _certificates(folder: Path) -> dict[str, grpc.ChannelCredentials | None]:
    """Write a server's certificate; returns credentials of hostile clients by what is wrong with them."""
    folder.mkdir(parents=True)
    ca, other = make_ca(), make_ca()
    later, earlier = datetime.now(UTC) + timedelta(days=1), datetime.now(UTC) - timedelta(days=1)
    ca.write(folder, "ca")
    server = make_server(ca, ["localhost"], later)
    server.write(folder, "server")
    root = (folder / "ca.pem").read_bytes()

    def credentials(name: str, own: Any) -> grpc.ChannelCredentials:
        own.write(folder, name)
        key, certificate = (folder / f"{name}.key").read_bytes(), (folder / f"{name}.pem").read_bytes()
        return grpc.ssl_channel_credentials(root, key, certificate)

    return {
        "no TLS": None,
        "no certificate": grpc.ssl_channel_credentials(root),
        "another CA's": credentials("other", make_client(other, "victim", later)),
        "expired": credentials("expired", make_client(ca, "victim", earlier)),
        "a server's": credentials("as-client", server),
        "name that is a path": credentials("path", make_client(ca, "../victim", later)),
        "another client": credentials("mallory", make_client(ca, "mallory", later)),
    }
