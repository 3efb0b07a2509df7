"""How messages of tensor ranks travel: the choice, and what is asked of NCCL and of torch's multicast operators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux import runtime
from megatron_mux.backbone import communication
from megatron_mux.backbone.communication import (
    Capabilities,
    GroupExchange,
    MulticastExchange,
    choose,
    make_exchange,
)
from megatron_mux.backbone.pieces import Message, MessageKind

H100 = Capabilities(gpu=True, compute=(9, 0), one_node=True, multicast=True)
RANKS = 2


@pytest.mark.parametrize(
    ("has", "ctas", "way", "why"),
    [
        (H100, 8, "multicast", ""),
        (H100, 32, "multicast", ""),
        (Capabilities(True, (10, 0), True, True), 8, "multicast", ""),
        (H100, 4, "nccl", "NVLink SHARP takes 8 CTAs"),
        (Capabilities(True, (8, 0), True, True), 8, "nccl", "needs compute capability 9.0, not 8.0"),
        (Capabilities(True, (9, 0), False, True), 8, "nccl", "needs all tensor ranks on one node"),
        (Capabilities(True, (9, 0), True, False), 8, "nccl", "needs a driver and GPUs with multicast"),
        (Capabilities(gpu=False), 8, "gloo", "on a CPU"),
    ],
)
def test_the_best_way_that_the_machine_has(has: Capabilities, ctas: int, way: str, why: str) -> None:
    found, said = choose(has, ctas)
    assert found == way and why in said and bool(said) == (way != "multicast")


def places(host: list[str], compute: tuple[int, int] = (9, 0)) -> list[Any]:
    """What four ranks in two tensor groups tell each other."""
    return [(name, [0, 1] if rank < 2 else [2, 3], compute, True) for rank, name in enumerate(host)]


@pytest.mark.parametrize(
    ("everywhere", "one_node", "least"),
    [
        (places(["a", "a", "b", "b"]), True, (9, 0)),
        (places(["a", "b", "b", "a"]), False, (9, 0)),
        (places(["a", "a", "a"]) + places(["a"] * 4, (8, 6))[3:], True, (8, 6)),
    ],
)
def test_what_every_rank_has(
    everywhere: list[Any], one_node: bool, least: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(communication, "is_gpu", lambda device: True)
    monkeypatch.setattr(communication, "_has_multicast", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(
        dist, "all_gather_object", lambda found, own: found.__setitem__(slice(None), everywhere)
    )
    parallel: Any = SimpleNamespace(device=torch.device("cuda"), world_size=4, tp_group=None)
    assert communication._capabilities(parallel) == Capabilities(True, least, one_node, True)


@pytest.mark.parametrize(
    ("slots", "kind", "said"),
    [
        ([True, True], MulticastExchange, "NVLink SHARP with 8 CTAs"),
        ([True, False], GroupExchange, "NCCL with at most 12 CTAs (NVLink SHARP: the GPUs cannot share"),
        ([False, True], GroupExchange, "NCCL with at most 12 CTAs (NVLink SHARP: the GPUs cannot share"),
    ],
)
def test_one_rank_without_a_slot_is_enough_for_nccl(
    slots: list[bool], kind: type, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is this rank."""
    asked: list[int] = []
    slot = torch.zeros(64, dtype=torch.uint8) if slots[0] else None
    monkeypatch.setattr(communication, "_capabilities", lambda parallel: H100)
    monkeypatch.setattr(communication, "bounded_tensor_group", lambda parallel, ctas: asked.append(ctas))
    monkeypatch.setattr(communication, "multicast_slot", lambda group, device: slot)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: None)
    parallel: Any = SimpleNamespace(device=torch.device("cuda"), total=lambda flags: [slots.count(False)])
    exchange, line = make_exchange(parallel, 12)
    assert type(exchange) is kind and said in line and asked == [12]


def test_on_a_cpu_messages_stay_in_the_group_of_tensor_ranks() -> None:
    parallel = runtime.initialize(device="cpu")
    exchange, line = make_exchange(parallel)
    assert isinstance(exchange, GroupExchange) and exchange._group is parallel.tp_group
    assert line == "messages of tensor ranks: gloo (on a CPU)"
    runtime.shutdown()


class Rank:
    """This rank beside one that holds the negative of twice its values; records what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.order: list[str] = []  # with what streams are asked for

    def size(self) -> int:
        return RANKS

    group_name = "tensor"

    def all_reduce_(self, x: Tensor, op: str, group: str) -> Tensor:
        assert (op, group) == ("sum", "tensor") and x.is_contiguous()
        self.calls.append(f"all_reduce of {x.numel()}")
        self.order.append("operator")
        return x.neg_()

    def all_gather(self, x: Tensor, group: str, out: Tensor) -> Tensor:
        assert group == "tensor" and x.is_contiguous() and out.is_contiguous()
        self.calls.append(f"all_gather of {x.numel()}")
        return torch.cat([x, -2 * x], out=out)

    def collective(self, message: Message, made: Tensor, x: Tensor, group: Any, async_op: bool) -> None:
        assert group is self and not async_op, "one after another on one stream"
        self.calls.append(f"NCCL's {message.kind}")


class Stream:
    """Of messages."""

    def __init__(self, order: list[str], priority: int) -> None:
        assert priority < 0
        self._order = order

    def wait_stream(self, other: object) -> None:
        self._order.append("waits for computation")

    def record_event(self) -> Any:
        self._order.append("arrived")
        return SimpleNamespace(wait=lambda: None)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    """A played rank with torch's multicast operators and streams."""
    made = Rank()
    operators = SimpleNamespace(
        multimem_all_reduce_=made.all_reduce_, multimem_all_gather_out=made.all_gather
    )
    monkeypatch.setattr(torch.ops, "symm_mem", operators, raising=False)
    monkeypatch.setattr(communication, "_collective", made.collective)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: Stream(made.order, priority))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: made.order.append("keeps a tensor"))
    yield made


@pytest.mark.parametrize(("slot", "parts"), [(4096, [96]), (256, [64, 32])])
def test_a_long_message_travels_through_the_slot_in_parts(slot: int, parts: list[int], rank: Rank) -> None:
    exchange = MulticastExchange(rank, torch.empty(slot, dtype=torch.uint8))  # type: ignore[arg-type]
    x = torch.randn(12, 1, 8)
    before = x.clone()
    result = exchange.issue(Message("all_reduce", x)).wait()
    assert result is x and torch.equal(x, -before)
    assert rank.calls == [f"all_reduce of {part}" for part in parts]


def test_the_stream_of_messages_waits_for_computation_and_keeps_tensors(rank: Rank) -> None:
    exchange = MulticastExchange(rank, torch.empty(4096, dtype=torch.uint8))  # type: ignore[arg-type]
    exchange.issue(Message("all_reduce", torch.ones(4, 1, 8)))
    assert rank.order == ["waits for computation", "keeps a tensor", "keeps a tensor", "operator", "arrived"]


@pytest.mark.parametrize(("slot", "parts"), [(4096, [96]), (256, [32, 32, 32])])
def test_rows_of_all_ranks_are_gathered_in_their_order(slot: int, parts: list[int], rank: Rank) -> None:
    exchange = MulticastExchange(rank, torch.empty(slot, dtype=torch.uint8))  # type: ignore[arg-type]
    x = torch.randn(12, 1, 8)
    result = exchange.issue(Message("all_gather", x)).wait()
    assert torch.equal(result, torch.cat([x, -2 * x]))
    assert rank.calls == [f"all_gather of {part}" for part in parts]


@pytest.mark.parametrize(
    ("kind", "x", "rows"),
    [
        ("reduce_scatter", torch.ones(4, 1, 8), 2),  # torch has no such operator
        ("all_reduce", torch.ones(4, 1, 8, dtype=torch.float64), 4),
        ("all_gather", torch.ones(1, 1, 3), 2),  # not a multiple of 16 bytes
        ("all_reduce", torch.ones(0, 1, 8), 0),
    ],
)
def test_what_multicast_operators_do_not_take_goes_over_nccl(
    kind: MessageKind, x: Tensor, rows: int, rank: Rank
) -> None:
    exchange = MulticastExchange(rank, torch.empty(4096, dtype=torch.uint8))  # type: ignore[arg-type]
    result = exchange.issue(Message(kind, x)).wait()
    assert rank.calls == [f"NCCL's {kind}"] and result.shape == (rows, *x.shape[1:])
