"""What a split server refuses: proposals, requests, uploads, and too much of anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_mux.backbone.model import Backbone
from megatron_mux.runtime import Parallel
from megatron_mux.split.client.transport import DeadlineError
from megatron_mux.split.protocol.messages import Decision, State, Upload
from megatron_mux.split.protocol.pieces import Piece
from megatron_mux.split.protocol.wire import Dtype, Flags, Kind, RefusedError
from tests.unit.split.caller import Caller, backbone, equal, parallel, path, server
from tests.unit.split.hostile_stream import AnyFields, hello
from tests.unit.split.running_server import RunningServer, running_server

__all__ = ["backbone", "parallel", "path", "server"]  # fixtures


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"fingerprint": "another"}, "backbone"),
        ({"cut_front": 3, "cut_back": 1}, "proposal"),
        ({"adapter": {"peft_type": "LORA", "target_modules": ["nowhere"]}}, "proposal"),
        ({"adapter": {"peft_type": "MAGIC"}}, "proposal"),
        ({"adapter": {"peft_type": "LORA", "lora_alpha": 10**400}}, "proposal"),
        ({"adapter": {"peft_type": "LORA", "lora_alpha": 10**300}}, "proposal"),
        ({"adapter": {"peft_type": "LORA", "adapter_name_or_path": "/etc"}}, "proposal"),
        ({"adapter": {"peft_type": "LORA", "r": 60_000, "target_modules": "all-linear"}}, "too_large"),
        ({"train_rows": 10**8, "rows": 10**8}, "too_large"),
        ({"adapter": {"peft_type": "LORA", "target_modules": ["q_proj"] * 5000}}, "proposal"),
        ({"adapter": {"peft_type": "LORA", "rank_pattern": {"q_proj" * 50: 2}}}, "proposal"),
        ({"rows": 10**8}, "too_large"),
        ({"adapter": {"peft_type": "LORA", "target_modules": "(.*)*q_proj"}}, "proposal"),
        ({"adapter": {"peft_type": "LORA", "rank_pattern": {"(.*)*q_proj": 2}}}, "proposal"),
        ({"adapter": {"peft_type": "LORA", "layers_to_transform": [1]}}, "proposal"),
        ({"adapter": {"peft_type": "LORA", "init_lora_weights": "pissa"}}, "proposal"),
        ({"training": {"max_steps": 4, "optim": "adafactor"}}, "proposal"),
        ({"training": {"max_steps": 4, "loss": "orpo"}}, "proposal"),
        ({"step": 3}, "no_state"),
    ],
)
def test_proposals_that_are_refused(server: RunningServer, changes: dict[str, Any], code: str) -> None:
    with pytest.raises(RefusedError) as refused:
        Caller(server, **changes).join()
    assert refused.value.code == code
    assert server.server.dispatcher.scheduler.free == server.capacity
    assert not server.server.metrics.sessions


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda m: replace(m, session=m.session + 1), "session"),
        (lambda m: replace(m, step=3), "step"),
        (lambda m: replace(m, fields=AnyFields(content={"lengths": [5, 8], "ids": [0, 1]})), "rows"),
        (lambda m: replace(m, fields=AnyFields(content={"lengths": [5, 7], "ids": [0]})), "rows"),
        (lambda m: replace(m, fields=AnyFields(content={"lengths": [0, 12], "ids": [0, 1]})), "json"),
        (
            lambda m: replace(m, fields=AnyFields(content={"lengths": [1] * 12, "ids": list(range(12))})),
            "rows",
        ),
        (
            lambda m: replace(m, fields=AnyFields(content={"lengths": [5, 7], "ids": [0, 1], "more": 1})),
            "json",
        ),
        (lambda m: replace(m, fields=AnyFields(content={"lengths": [5, 7], "ids": [0, -1]})), "json"),
        (lambda m: replace(m, kind=Kind.BACKWARD, fields=AnyFields(content={"forward": 77})), "no_state"),
        (lambda m: replace(m, kind=Kind.UPLOAD, tensor=None, dtype=Dtype.NONE, flags=Flags.NONE), "kind"),
        (
            lambda m: replace(m, fields=m.fields.model_copy(update={"previous": Decision(step=5, norm=1.0)})),
            "no_state",
        ),
        (
            lambda m: replace(
                m,
                fields=AnyFields(
                    content={"lengths": [12], "ids": [0], "previous": {"step": 0, "norm": -1.0}}
                ),
            ),
            "json",
        ),
        (lambda m: replace(m, tensor=m.tensor * float("nan")), "finite"),
        (lambda m: replace(m, tensor=m.tensor * 1e10), "norm"),
    ],
)
def test_requests_that_are_refused_change_nothing(server: RunningServer, change: Any, code: str) -> None:
    victim, hostile = Caller(server, task="victim"), Caller(server)
    victim.join()
    wanted = victim.train_step()
    hostile.join()
    with pytest.raises(RefusedError) as refused:
        hostile.call(change(hostile.forward()))
    assert refused.value.code == code
    fresh = Caller(server, task="fresh")
    fresh.join()
    assert equal(fresh.train_step(), wanted)


@pytest.mark.parametrize("kind", [Kind.HELLO, Kind.STATE])
def test_refusals_of_json_are_counted_and_logged(
    server: RunningServer, caplog: pytest.LogCaptureFixture, kind: Kind
) -> None:
    """As those of what the JSON asks for, though it is the stream that finds them."""
    caller = Caller(server)
    if kind is Kind.HELLO:
        message, code, why = hello(protocol=4), "proposal", "client speaks version 4 of the protocol"
    else:
        caller.join()
        message = caller.message(Kind.STATE, AnyFields(content={"first": -1}))
        code, why = "json", "STATE: first: Input should be greater than or equal to 0"
    counted = server.server.metrics.refused.labels(code)
    assert counted._value.get() == 0
    with pytest.raises(RefusedError, match=why) as refused:
        caller.call(message)
    assert refused.value.code == code and counted._value.get() == 1
    (logged,) = [record for record in caplog.records if record.message == "refused"]
    fields = vars(logged)["fields"]
    assert logged.levelname == "WARNING" and (fields["client"], fields["code"]) == ("local", code)
    assert why in fields["why"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda piece: replace(piece, kind="exp_avg"),
        lambda piece: replace(piece, key="elsewhere"),
        lambda piece: replace(
            piece, shape=(2**31 - 1, 2**20), dim=1, runs=(), tensor=piece.tensor.new_empty(2**31 - 1, 0)
        ),
        lambda piece: replace(piece, tensor=piece.tensor.bool()),
        lambda piece: replace(piece, shape=(1, *piece.shape), tensor=piece.tensor[None], dim=None, runs=()),
    ],
)  # fmt: skip
def test_uploads_that_do_not_fit_are_refused(server: RunningServer, spoil: Callable[[Piece], Piece]) -> None:
    """The session stays usable: its client can upload what is right."""
    source = Caller(server, task="source")
    source.join()
    found = source.call(source.message(Kind.STATE, State())).pieces
    pieces = [piece for piece in found if piece.kind == "value"]
    caller = Caller(server, uploads=True)
    caller.join()
    wrong = [spoil(pieces[0]), *pieces[1:]]
    try:
        caller.call(caller.message(Kind.UPLOAD, Upload(), pieces=wrong))
    except RefusedError as error:
        assert error.code in ("pieces", "index")
    else:
        assert wrong[0].tensor.dtype is torch.bool, "numbers of another type are converted"
    again = Caller(server, uploads=True, incarnation="cd" * 8)
    again.join()
    again.call(again.message(Kind.UPLOAD, Upload(), pieces=pieces))
    assert again.train_step()


def test_a_save_of_another_adapter_is_refused(server: RunningServer) -> None:
    caller = Caller(server)
    caller.join()
    caller.train_step()
    caller.state()
    for adapter in ({"peft_type": "LORA", "r": 8}, {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 2}):
        with pytest.raises(RefusedError) as refused:
            Caller(server, step=1, incarnation="cd" * 8, adapter=adapter).join()
        assert refused.value.code == "proposal"
    again = Caller(server, step=1, incarnation="ef" * 8)
    again.join()
    assert again.train_step()


@pytest.mark.parametrize("limit", ["most_sessions_each", "joins_each", "messages_each"])
def test_one_client_cannot_have_too_much(
    backbone: Backbone, parallel: Parallel, tmp_path: Path, limit: str
) -> None:
    options = {limit: 1 if limit == "most_sessions_each" else 0.001}
    with running_server(backbone, parallel, tmp_path / "store", **options) as server:
        caller = Caller(server)
        caller.join()
        refused = server.server.metrics.refused.labels("too_many")
        with pytest.raises((DeadlineError, RefusedError)):  # it would have to join again
            if limit == "messages_each":
                caller.call(caller.forward())
                caller.transport.call(caller.backward(caller.operation), 1)
            else:
                Caller(server, task="two").join(1)
        assert refused._value.get() > 0


def test_a_stream_is_told_that_another_has_taken_its_place(server: RunningServer) -> None:
    caller, other = Caller(server), Caller(server, incarnation="cd" * 8)
    caller.join()
    other.join()
    with pytest.raises(RefusedError, match="another stream"):
        caller.call(caller.forward())
    assert other.train_step()
