"""What a client sends, what it does not, and what it makes of the replies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_mux.engine import StepResult
from megatron_mux.errors import UserError
from megatron_mux.split.client.engine import SplitEngine
from megatron_mux.split.client.link import LOST
from megatron_mux.split.protocol.messages import Decision, Forward, Gradient, Message, WithPrevious
from megatron_mux.split.protocol.wire import Dtype, Flags, Kind, RefusedError
from tests import tiny_models
from tests.end_to_end.harness import adapter
from tests.unit.split.fake_server import FakeServer
from tests.unit.split.splitting import case, split_engine

LORA: dict[str, Any] = {"peft_type": "LORA", "r": 4}
FRONT, BODY, BACK = (
    [f"model.layers.{layer}.self_attn.{name}" for name in ("q_proj", "v_proj")] for layer in (0, 2, 3)
)
EVERYWHERE = ["q_proj", "v_proj"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make(tmp_path_factory.mktemp("backbone"), "llama")


def engine_of(server: FakeServer, targets: Any = EVERYWHERE, **options: Any) -> SplitEngine:
    one = case({**LORA, "target_modules": targets}, **options.pop("training", {}))
    engine = split_engine(server, one.spec, (1, 1), **options)
    engine.register_tasks([one.task])
    return engine


def step(engine: SplitEngine) -> StepResult:
    return engine.step()["one"]


def sent(server: FakeServer) -> list[tuple[Kind, Flags]]:
    return [(message.kind, message.flags) for message in server.messages[1:]]


T, L, N = Flags.TRAINING, Flags.LAST, Flags.NEEDS_INPUT


@pytest.mark.parametrize(
    ("targets", "forward", "backward"),
    [
        (EVERYWHERE, T | N, (T | N, T | N | L)),
        (BODY, T, (T, T | L)),
        (FRONT, T | N, (T | N, T | N | L)),
        (BACK, Flags.NONE, ()),
    ],
    ids=["everywhere", "body", "front", "back"],
)
def test_flags_say_what_is_needed(
    path: Path, targets: Any, forward: Flags, backward: tuple[Flags, ...]
) -> None:
    server = FakeServer(path)
    engine = engine_of(server, targets)
    first, second = step(engine), step(engine)
    engine.close()
    each = [
        [(Kind.FORWARD, forward)] + [(Kind.BACKWARD, flags)] * bool(backward) for flags in backward or (T, T)
    ]
    assert sent(server) == 2 * [message for own in each for message in own]
    assert 0 < first.grad_norm != second.grad_norm
    # Two micro-batches of a step; the second step's first request tells what became of the first.
    passes = [message.read(Forward) for message in server.messages if message.kind is Kind.FORWARD]
    decision = Decision(step=0, norm=first.grad_norm)
    assert [fields.previous for fields in passes] == [None, None, decision, None]
    assert [message.operation for message in server.messages] == list(range(len(server.messages)))
    lengths, ids = [fields.lengths for fields in passes], [fields.ids for fields in passes]
    assert sorted(ids[0] + ids[1]) == [0, 1, 2, 3] and len(lengths[0]) == len(ids[0])


def test_an_evaluation_asks_for_no_graph(path: Path) -> None:
    server = FakeServer(path)
    engine = engine_of(server)
    engine.evaluate("one", engine.task("one").data)
    engine.close()
    assert sent(server) == [(Kind.FORWARD, Flags.NONE)]
    link = engine.backbone.remote.link  # type: ignore[attr-defined]
    assert (link.totals.requests, link.totals.waited_s, link.totals.computed_s) == (1, 0.5, 0.25)


@pytest.mark.parametrize(("wire", "tolerance"), [("f32", 1e-6), ("bf16", 1e-2), ("f16", 1e-3), ("i8", 1e-6)])
def test_wire_dtypes(path: Path, wire: Any, tolerance: float) -> None:
    exact = step(engine_of(FakeServer(path)))
    server = FakeServer(path)
    result = step(engine_of(server, wire=wire))
    assert result.loss == pytest.approx(exact.loss, rel=tolerance)
    assert result.grad_norm == pytest.approx(exact.grad_norm, rel=10 * tolerance)
    dtypes = {m.tensor.dtype for m in server.messages if m.tensor is not None}
    # The codec quantises int8 (`tensors.encode`), for which it gets fp32.
    wanted = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "i8": torch.float32}
    assert dtypes == {wanted[wire]} and {m.dtype for m in server.messages[1:]} == {Dtype[wire.upper()]}


class Failing(FakeServer):
    """Changes some replies."""

    change: Callable[[Message], Message] = staticmethod(lambda reply: reply)

    def serve(self, message: Message) -> Message:
        return self.change(super().serve(message))


def poisoned(kind: Kind) -> Callable[[Message], Message]:
    def change(reply: Message) -> Message:
        if reply.kind is not kind or reply.tensor is None:
            return reply
        return replace(reply, tensor=torch.full_like(reply.tensor, math.nan))

    return change


def no_norm(reply: Message) -> Message:
    return replace(reply, fields=Gradient()) if reply.kind is Kind.GRADIENT else reply


@pytest.mark.parametrize(
    ("change", "said"),
    [(poisoned(Kind.OUTPUT), "its loss was nan"), (poisoned(Kind.GRADIENT), "its gradient norm was nan"),
     (no_norm, "its gradient norm was nan")],
    ids=["output", "gradient", "norm"],
)  # fmt: skip
def test_neither_end_steps_if_something_is_not_finite(
    path: Path, change: Callable[[Message], Message], said: str
) -> None:
    server = Failing(path)
    engine = engine_of(server)
    step(engine)
    before = adapter(engine, "one")
    server.change = change
    result = step(engine)
    assert result.status == "failed" and said in result.reason
    server.change = lambda reply: reply
    after = adapter(engine, "one")  # a save: it tells the server to skip the step
    engine.close()
    told = server.messages[-1].read(WithPrevious).previous
    assert told == Decision(step=1, norm=0.0, skip=True) and server.step == 1
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert all(torch.isfinite(m.tensor).all() for m in server.messages if m.tensor is not None)


def test_what_overflows_on_the_wire_is_not_sent(path: Path) -> None:
    server = FakeServer(path)
    engine = engine_of(server, wire="f16", privacy=Scaling(1e6, 1.0))
    result = step(engine)
    engine.close()
    assert result.status == "failed" and "its loss was nan" in result.reason and len(server.messages) == 1
    assert server.step == 0


class Scaling:
    """Stands in for what clips and adds noise."""

    def __init__(self, hidden: float, gradient: float) -> None:
        self.scales = hidden, gradient
        self.seen: list[tuple[str, tuple[int, ...], int, int]] = []

    def activations(self, hidden: Tensor, lengths: Sequence[int], step: int, operation: int) -> Tensor:
        self.seen.append(("activations", tuple(lengths), step, operation))
        return hidden * self.scales[0]

    def gradients(self, gradient: Tensor, lengths: Sequence[int], step: int, operation: int) -> Tensor:
        self.seen.append(("gradients", tuple(lengths), step, operation))
        return gradient * self.scales[1]


def test_all_that_is_sent_goes_through_the_hooks(path: Path) -> None:
    plain, server, privacy = FakeServer(path), FakeServer(path), Scaling(0.5, 2.0)
    engine = engine_of(server, privacy=privacy)
    step(engine_of(plain))
    step(engine)
    assert plain.messages[1].tensor is not None and server.messages[1].tensor is not None
    assert torch.equal(server.messages[1].tensor, plain.messages[1].tensor * 0.5)
    first, second = (tuple(m.read(Forward).lengths) for m in server.messages if m.kind is Kind.FORWARD)
    engine.evaluate("one", engine.task("one").data)
    step(engine)
    kinds = ["activations", "gradients"] * 2
    assert [kind for kind, *_ in privacy.seen] == [*kinds, "activations", *kinds]
    assert [lengths for _, lengths, *_ in privacy.seen[:4]] == [first, first, second, second]
    # Passes of a step are numbered, whatever was evaluated before it.
    numbers = [(0, 0), (0, 0), (0, 1), (0, 1), (1, 0), (1, 0), (1, 0), (1, 1), (1, 1)]
    assert [(done, number) for *_, done, number in privacy.seen] == numbers


def test_a_reply_of_another_shape_is_refused(path: Path) -> None:
    server = Failing(path)
    engine = engine_of(server)
    server.change = lambda reply: replace(reply, tensor=None if reply.tensor is None else reply.tensor[:-1])
    with pytest.raises(UserError, match=r"The server's reply must be \[\d+, 32\], got \[\d+, 32\]"):
        step(engine)


def test_a_new_session_is_noticed(path: Path) -> None:
    server = FakeServer(path)
    engine = engine_of(server)
    seen: list[Message] = []

    def dies(message: Message) -> bool:
        """The first time that anything is asked for, and after the first micro-batch."""
        seen.append(message)
        return len(seen) in (1, 5)

    server.dies = dies
    with pytest.raises(RefusedError, match="the server has lost what it had done of step 1") as refused:
        step(engine)
    assert refused.value.code == LOST
    # At first nothing was lost: the same operation was asked for again, in the new session.
    asked = [(m.kind, m.session, m.operation) for m in server.messages[1:4]]
    assert asked == [(Kind.HELLO, 1, 1), (Kind.FORWARD, 2, 1), (Kind.BACKWARD, 2, 2)]
