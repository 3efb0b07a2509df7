"""What hostile clients do on a stream, by class of case. Each case is random, and the same for the same seed."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import torch

from megatron_mux.split.protocol.framing import frames
from megatron_mux.split.protocol.pieces import to_index
from megatron_mux.split.protocol.tensors import encode_pieces
from megatron_mux.split.protocol.wire import Dtype, Flags, Kind
from tests.unit.split.hostile_stream import (
    HIDDEN,
    LARGE_ROWS,
    PROPOSAL,
    ROWS,
    Ended,
    Stream,
    hello,
    packed,
    two_frames,
)

Case = Callable[[Random, Stream, int], None]
"""Acts on a stream; the number is that of another client's session."""

_ODD: Sequence[Any] = (
    None, True, -1, 0, 0.5, 1e308, 2**31, 2**63, 10**400, "", "x" * 5000, "../../etc/passwd", "\0", "\ud800", [], [[]],
    {}, {"a": {"b": []}}, [0] * 1000, ["q_proj"] * 100,
)  # fmt: skip
_NAMES = (
    "../../outside",
    "a/b",
    "..",
    ".",
    ".hidden",
    "a\0b",
    "a\nb",
    "~",
    "C:\\x",
    "x" * 129,
    "con/../y",
    "é",
    "",
)
_ADAPTERS: Sequence[dict[str, Any]] = (
    {}, {"peft_type": "LORA", "r": 10**9}, {"peft_type": "LORA", "target_modules": "(a+)+$"},
    {"peft_type": "LORA", "target_modules": ["q_proj"] * 10**4},
    {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 10**9}, {"peft_type": "IA3", "target_modules": [""]},
    {"peft_type": "BOTTLENECK", "bottleneck_size": 2**31}, {"peft_type": "LORA", "adapter_name_or_path": "/etc/passwd"},
    {"peft_type": "DIFF_PRUNING", "sparsity": 2}, {"peft_type": "VERA", "r": 10**7},
    {"peft_type": "LORA", "lora_dropout": 1e9}, {"peft_type": "LORA", "lora_alpha": -1e300}, {"peft_type": ["LORA"]},
    {"peft_type": "LORA", "layers_to_transform": [10**9]}, {"peft_type": "__class__"},
)  # fmt: skip


def fuzzed_header(rng: Random, stream: Stream, other: int) -> None:
    right = bytearray(b"".join(frames(hello())))
    match rng.randrange(4):
        case 0:
            stream.send(rng.randbytes(rng.randrange(200)))
        case 1:
            stream.send(b"MXS1" + rng.randbytes(60 + rng.randrange(100)))
        case 2:
            for _ in range(rng.randint(1, 4)):
                right[rng.randrange(64)] ^= 1 << rng.randrange(8)
            stream.send(bytes(right))
        case _:
            stream.send(bytes(right[: rng.randrange(64)]))


def lying_size(rng: Random, stream: Stream, other: int) -> None:
    text = json.dumps(PROPOSAL).encode()
    sizes = {
        "json_bytes": rng.choice([0, len(text) - 1, len(text) + 1, 1 << 20, rng.getrandbits(32)]),
        "tensor_bytes": rng.choice([0, 0, 1, rng.getrandbits(40), rng.getrandbits(64)]),
    }
    if rng.random() < 0.5:
        stream.send(packed(Kind.HELLO, **sizes) + text)
        return
    stream.join()
    rows = rng.choice([ROWS, 1, LARGE_ROWS, rng.getrandbits(32)])
    sizes["tensor_bytes"] = rng.choice([rows * HIDDEN * 4, rows * HIDDEN * 4 + 1, rng.getrandbits(40)])
    shape = {"rows": rows, "width": HIDDEN, "dtype": Dtype.F32, "session": stream.session, "operation": 1}
    stream.send(
        packed(rng.choice([Kind.FORWARD, Kind.BACKWARD]), **shape, **sizes)
        + rng.randbytes(rng.randrange(5000))
    )


def giant_shape(rng: Random, stream: Stream, other: int) -> None:
    if joins := rng.random() < 0.5:
        stream.join(uploads=rng.random() < 0.5)
    kind = rng.choice([Kind.FORWARD, Kind.BACKWARD, Kind.UPLOAD, Kind.STATE] if joins else list(Kind))
    rows, width = (
        rng.choice([1 << 20, 2**32 - 1, rng.getrandbits(32)]),
        rng.choice([HIDDEN, 2**32 - 1, rng.getrandbits(32)]),
    )
    named = kind is Kind.UPLOAD
    shape = {"rows": 0, "width": 0} if named else {"rows": rows, "width": width, "dtype": Dtype.F32}
    size = rng.choice([1 << 40, 1 << 39, rng.getrandbits(40)]) if named else min(rows * width * 4, 2**64 - 1)
    stream.send(
        packed(kind, session=stream.session, operation=1, tensor_bytes=size, **shape)
        + bytes(rng.randrange(5000))
    )


def malformed_json(rng: Random, stream: Stream, other: int) -> None:
    text = rng.choice(
        [b"[" * 10**5, b'{"a":' * 20000, b"nonsense", b"[]", b"1", b'"x"', b"{", b'{"a": NaN}', b'{"a": Infinity}',
         b"\xff\xfe", rng.randbytes(rng.randrange(1, 2000)), b'{"a": ' + b"9" * 5000 + b"}", b" " * (1 << 20), b"",
         json.dumps(PROPOSAL).encode()[: rng.randrange(1, 200)], b'{"task": "a", "task": "b"}']
    )  # fmt: skip
    content = packed(Kind.HELLO, json_bytes=len(text)) + text
    stream.send(
        *[content[: 1 << 20]] + ([b"\1\0\0\0" + content[1 << 20 :]] if len(content) > 1 << 20 else [])
    )


def absurd_proposal(rng: Random, stream: Stream, other: int) -> None:
    changes: dict[str, Any] = {}
    for _ in range(rng.randint(1, 3)):
        name = rng.choice([*PROPOSAL, "step", "uploads", "protocol", "more"])
        changes[name] = rng.choice(_ODD)
    if rng.random() < 0.4:
        changes = {"adapter": rng.choice(_ADAPTERS)}
    elif rng.random() < 0.4:
        section = rng.choice(["adapter", "training"])
        known = ("r", "lora_alpha", "lora_dropout", "target_modules", "bias", "init_lora_weights",
                 "layers_to_transform", "rank_pattern", "modules_to_save") if section == "adapter" else (
                 "max_steps", "learning_rate", "weight_decay", "optim", "lr_scheduler_type", "warmup_steps", "seed",
                 "max_grad_norm", "num_train_epochs", "adam_beta1", "adam_epsilon")  # fmt: skip
        changes = {section: {**PROPOSAL[section], rng.choice(known): rng.choice(_ODD)}}
    stream.send(hello(**changes))


def path_trick(rng: Random, stream: Stream, other: int) -> None:
    stream.send(hello(**{rng.choice(["task", "task", "fingerprint", "incarnation"]): rng.choice(_NAMES)}))


def bad_value(rng: Random, stream: Stream, other: int) -> None:
    stream.join()
    spoilt = torch.randn(ROWS, HIDDEN)
    spoilt.view(-1)[rng.randrange(spoilt.numel())] = rng.choice([math.nan, math.inf, -math.inf, 3e38])
    if rng.random() < 0.5:
        stream.send(stream.forward(spoilt))
        return
    first = stream.ask(stream.forward())
    stream.send(stream.backward(first.operation, spoilt))


def wrong_dtype(rng: Random, stream: Stream, other: int) -> None:
    stream.join()
    dtype, width = rng.choice(list(Dtype)), rng.choice([HIDDEN, HIDDEN + 1, 1, 0])
    size = ROWS * dtype.row_bytes(width) + rng.choice([0, 0, 1])
    text = json.dumps({"lengths": [ROWS], "ids": [0]}).encode()
    shape = {"dtype": dtype, "rows": ROWS, "width": width, "tensor_bytes": size, "json_bytes": len(text)}
    head = packed(
        Kind.FORWARD, session=stream.session, operation=1, flags=rng.choice([0, 1, 5, 8, 0xFFFF]), **shape
    )
    stream.send(head + text + rng.randbytes(size))


def replayed(rng: Random, stream: Stream, other: int) -> None:
    stream.join()
    forward = stream.forward()
    stream.ask(forward)
    backward = stream.backward(forward.operation)
    stream.ask(backward)
    stream.ask(backward)  # answered from memory
    match rng.randrange(4):
        case 0:
            stream.send(forward)
        case 1:
            stream.send(stream.backward(forward.operation))
        case 2:
            stream.send(stream.backward(rng.getrandbits(31)))
        case _:
            stream.send(hello())


def another_session(rng: Random, stream: Stream, other: int) -> None:
    stream.join()
    stream.session = rng.choice([other, other, 0, stream.session + 1, rng.getrandbits(64)])
    stream.send(
        rng.choice(
            [stream.forward(), stream.request(Kind.STATE), stream.request(Kind.LEAVE), stream.backward(1)]
        )
    )


def absurd_request(rng: Random, stream: Stream, other: int) -> None:
    stream.join()
    odd, kind = rng.choice([*_ODD[:-2], [ROWS, -ROWS, ROWS], [1] * ROWS]), rng.randrange(6)
    if kind < 2:
        stream.send(stream.forward(**{rng.choice(["lengths", "ids", "previous", "more"]): odd}))
    elif kind == 2:
        decision = {"step": 0, "norm": 1.0, "skip": False, rng.choice(["step", "norm", "skip"]): odd}
        stream.send(stream.forward(previous=decision))
    elif kind == 3:
        stream.send(stream.request(Kind.STATE, {rng.choice(["keep", "previous", "x"]): odd}))
    elif kind == 4:
        stream.send(packed(rng.choice(list(Kind)), session=stream.session, operation=1))
    else:
        for step in range(rng.randint(1, 14)):  # steps without a backward, beyond the last
            decision = {"step": step, "norm": 1e300, "skip": rng.random() < 0.2}
            stream.ask(stream.request(Kind.STATE, {"previous": decision}, step=step + 1))


def absurd_upload(rng: Random, stream: Stream, other: int) -> None:
    stream.join()
    reply = stream.ask(stream.request(Kind.STATE))
    pieces = [piece for piece in reply.pieces if piece.kind == "value" or rng.random() < 0.1]
    stream.ask(stream.request(Kind.LEAVE))
    again = Stream(stream.channel)
    try:
        again.join(uploads=True)
        index = to_index(pieces)
        entry = rng.choice(index)
        entry[rng.choice(list(entry))] = rng.choice(
            [*_ODD, [2**31 - 1] * 4, [[0, 2**31 - 1]], [[5, 1]], "exp_avg", "extra"]
        )
        text, content = json.dumps({"pieces": index}).encode(), b"".join(encode_pieces(pieces))
        sizes = {"json_bytes": len(text), "tensor_bytes": len(content)}
        again.ask(packed(Kind.UPLOAD, session=again.session, operation=1, **sizes) + text + content)
    except Ended:
        pass
    stream.outcome = again.finish()


def broken_frames(rng: Random, stream: Stream, other: int) -> None:
    stream.join()
    first, second = two_frames(stream)
    cut = rng.randrange(len(second))
    stream.send(
        *rng.choice(
            [[first, first], [second, first], [first, second, second], [second], [first], [first, second[:cut]],
             [first[:cut], second], [first, second + b"x"], [first, b"\2" + second[1:]], [first, b""], [first, second]]
        )
    )  # fmt: skip


def flood_of_messages(rng: Random, stream: Stream, other: int) -> None:
    """Requests, heartbeats among them, without waiting for answers."""
    stream.join()
    for _ in range(rng.randint(8, 24)):
        stream.send(stream.forward(flags=Flags.NONE) if rng.random() < 0.7 else packed(Kind.PING))


def flood_of_joins(rng: Random, stream: Stream, other: int) -> None:
    many = [Stream(stream.channel) for _ in range(30)]
    for i, one in enumerate(many):
        one.send(hello(task=f"task-{i % 3}"))
    stream.outcome = [one.finish() for one in many][-1]


def cut_off(rng: Random, stream: Stream, other: int) -> None:
    """A client that is gone while it joins, or while something is computed for it."""
    gone = Stream(stream.channel)
    gone.send(hello(), *([packed(Kind.PING)] if rng.random() < 0.5 else []))
    if rng.random() < 0.5:
        gone.finish()
    gone.cancel()
    stream.send(hello())


CASES: Mapping[str, Case] = {
    "fuzzed header": fuzzed_header,
    "lying size": lying_size,
    "giant shape": giant_shape,
    "malformed JSON": malformed_json,
    "absurd proposal": absurd_proposal,
    "path trick in a name": path_trick,
    "not finite, or huge": bad_value,
    "wrong dtype or width": wrong_dtype,
    "replayed": replayed,
    "another client's session": another_session,
    "absurd request": absurd_request,
    "absurd upload": absurd_upload,
    "doubled, reordered, cut frames": broken_frames,
    "flood of messages": flood_of_messages,
    "flood of joins": flood_of_joins,
    "cut off": cut_off,
}


def act(case: Case, rng: Random, channel: Any, other: int) -> str:
    """Run a case; returns its outcome."""
    stream = Stream(channel)
    try:
        case(rng, stream, other)
    except Ended:
        pass
    ended = stream.outcome
    final = stream.finish()
    return ended if final == "nothing" else final


def raw_connection(rng: Random, port: int) -> str:
    """Bytes that are no gRPC, on connections of their own."""
    for _ in range(rng.randint(1, 8)):
        with socket.create_connection(("127.0.0.1", port), 10) as own:
            own.sendall(
                rng.choice(
                    [b"GET / HTTP/1.1\r\n\r\n", rng.randbytes(500), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b""]
                )
            )
    return "closed"
