"""A client of a real server that sends what a test wants it to send, and fixtures of both."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_mux import runtime
from megatron_mux.backbone.model import Backbone
from megatron_mux.runtime import Parallel
from megatron_mux.split.client.transport import Transport
from megatron_mux.split.protocol.agreement import Fields, Proposal, Terms
from megatron_mux.split.protocol.messages import (
    Backward,
    Decision,
    Forward,
    Gradient,
    Message,
    State,
    StateReply,
)
from megatron_mux.split.protocol.pieces import Piece
from megatron_mux.split.protocol.wire import Dtype, Flags, Kind, Limits
from megatron_mux.split.server.dispatcher import Work
from tests import tiny_models
from tests.unit.split.running_server import RunningServer, running_server

LAYERS, HIDDEN, ROWS = 4, 32, 12
RUN = "12" * 8
REPLIES = Limits(
    frozenset({Kind.WELCOME, Kind.OUTPUT, Kind.GRADIENT, Kind.STATE_REPLY, Kind.STORED, Kind.BYE}),
    64,
    HIDDEN,
    Dtype.F64,
    1 << 20,
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make(tmp_path_factory.mktemp("backbone"), "llama", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def parallel() -> Parallel:
    return runtime.initialize(device="cpu")


@pytest.fixture
def backbone(path: Path, parallel: Parallel) -> Backbone:
    return Backbone.load(path, parallel, torch.float64, split=(1, LAYERS - 1, 0), stage=1, ends=False)


@pytest.fixture
def server(backbone: Backbone, parallel: Parallel, tmp_path: Path) -> Iterator[RunningServer]:
    with running_server(backbone, parallel, tmp_path / "store") as running:
        yield running


def proposal(**changes: Any) -> Proposal:
    values: dict[str, Any] = {
        "task": "one",
        "fingerprint": "fingerprint",
        "cut_front": 1,
        "cut_back": 1,
        "wire": "f64",
        "adapter": {"peft_type": "LORA", "r": 4, "lora_dropout": 0.3},
        "training": {"max_steps": 9, "learning_rate": 0.05},
        "total_steps": 9,
        "train_rows": ROWS,
        "rows": 2 * ROWS,
        "sequences": 4,
        "longest": ROWS,
        "run": RUN,
        "incarnation": "ab" * 8,
    }
    return Proposal.model_validate({**values, **changes})


class Caller:
    """A client that sends what a test wants it to send."""

    def __init__(self, server: RunningServer, seconds: float = 20, **changes: Any) -> None:
        self.seconds = seconds
        self.transport = Transport(server.address, None, REPLIES, retry_seconds=5, say=lambda text: None)
        self.proposal = proposal(**changes)
        self.operation, self.session, self.step = 0, 0, self.proposal.step
        self.previous: Decision | None = None

    def join(self, seconds: float | None = None) -> Terms:
        reply = self.transport.call(Message(Kind.HELLO, fields=self.proposal), seconds or self.seconds)
        terms = reply.read(Terms)
        self.session, self.step = reply.session, terms.step
        return terms

    def message(self, kind: Kind, fields: Fields, **others: Any) -> Message:
        self.operation += 1
        if self.previous is not None:
            fields, self.previous = fields.model_copy(update={"previous": self.previous}), None
        return Message(kind, self.session, self.step, self.operation, fields=fields, **others)

    def forward(
        self,
        seed: int = 0,
        lengths: tuple[int, ...] = (5, 7),
        flags: Flags = Flags.TRAINING | Flags.NEEDS_INPUT,
    ) -> Message:
        hidden = torch.randn(
            sum(lengths), HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
        )
        fields = Forward(lengths=list(lengths), ids=list(range(len(lengths))))
        return self.message(Kind.FORWARD, fields, flags=flags, tensor=hidden, dtype=Dtype.F64)

    def backward(self, forward: int, seed: int = 1) -> Message:
        gradient = torch.randn(
            ROWS, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
        )
        flags = Flags.LAST | Flags.NEEDS_INPUT
        return self.message(
            Kind.BACKWARD, Backward(forward=forward), flags=flags, tensor=gradient, dtype=Dtype.F64
        )

    def call(self, message: Message) -> Message:
        return self.transport.call(message, self.seconds)

    def train_step(self) -> list[torch.Tensor]:
        """A whole optimizer step; returns what came back."""
        output = self.call(self.forward(seed=10 * self.step))
        reply = self.call(self.backward(self.operation, seed=10 * self.step + 1))
        self.decide(reply)
        assert output.tensor is not None and reply.tensor is not None
        return [output.tensor, reply.tensor]

    def decide(self, gradient: Message) -> None:
        """Have the next request tell that a step is taken."""
        norm = norm_of(gradient) ** 0.5
        assert norm > 0
        self.previous = Decision(step=self.step, norm=norm)
        self.step += 1

    def state(self) -> list[torch.Tensor]:
        pieces, total = list[Piece](), 1
        while len(pieces) < total:
            reply = self.call(self.message(Kind.STATE, State(first=len(pieces))))
            pieces += reply.pieces
            total = reply.read(StateReply).total
        return [piece.tensor for piece in pieces]


def norm_of(gradient: Message) -> float:
    """The squared norm that a GRADIENT tells."""
    square = gradient.read(Gradient).squared_norm
    assert square is not None
    return square


def equal(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(ones) == len(others) > 0 and all(map(torch.equal, ones, others))


@contextmanager
def busy(server: RunningServer) -> Iterator[None]:
    """Context in which the compute thread does something long."""
    over, begun = threading.Event(), threading.Event()

    def wait(works: Any) -> list[None]:
        begun.set()
        over.wait(20)
        return [None]

    running = asyncio.run_coroutine_threadsafe(
        server.server.dispatcher.compute(Work("another", wait)), server.loop
    )
    assert begun.wait(20)
    try:
        yield
    finally:
        over.set()
        running.result(20)
