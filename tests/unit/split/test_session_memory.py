"""Memory is counted exactly, predicted closely, and reserved by policies as the paper's Figure 3 says."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_mux import runtime
from megatron_mux.backbone.model import Backbone
from megatron_mux.split.protocol.agreement import Proposal
from megatron_mux.split.server.body import Body, Rows
from megatron_mux.split.server.co_batching import measure_co_batching
from megatron_mux.split.server.policies import POLICIES, Circumstances, Offer, plan_forward
from megatron_mux.split.server.session_memory import (
    Memory,
    count_passes,
    profile,
    sequences_behind_prefixes,
    worst_case_lengths,
)
from megatron_mux.split.server.session_prediction import BodyPlace, SessionPredictor
from tests import tiny_models
from tests.unit.split.caller import proposal
from tests.unit.split.counted import meter

COUNT = meter(torch.device("cpu"))
MEMORY = Memory(rows=100, forward=1000, graph=8000, backward=10_000, hidden=100, lasting=500)
BUSY = Circumstances(free=10**6, waits=True, largest=0, answer_s=9.0, reforward_s=1.0)


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    path = tiny_models.make(tmp_path_factory.mktemp("backbone"), "llama", num_hidden_layers=6, hidden_size=64)
    parallel = runtime.initialize(device="cpu")
    return Backbone.load(path, parallel, split=(1, 5, 0), stage=1, ends=False)


def test_what_is_alive_is_counted_and_what_is_freed_is_not() -> None:
    def compute() -> torch.Tensor:
        a = torch.ones(100, 100)
        b = a @ a
        del a
        c = b.t() + 1  # a view takes nothing
        del b
        return c

    peak = COUNT(compute)
    assert (peak.peak, peak.lasting) == (2 * 40_000, 40_000)


ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"peft_type": "LORA", "r": 4},
    "all linear": {"peft_type": "LORA", "r": 4, "target_modules": "all-linear", "lora_dropout": 0.1},
    "prefix": {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 5},
    "bottleneck": {"peft_type": "BOTTLENECK", "bottleneck_size": 8},
    "ia3": {"peft_type": "IA3"},
    "diff": {"peft_type": "DIFF_PRUNING"},
}


def joined(body: Body, adapter: str, **asked: Any) -> tuple[Proposal, Memory]:
    """A session with an adapter, and its memory as counted in real passes."""
    fields = {"cut_back": 0, "train_rows": 256, "rows": 256, "longest": 64, "sequences": 28, **asked}
    wanted: Proposal = proposal(adapter=ADAPTERS[adapter], **fields)
    layers = wanted.body(body.backbone.shape)
    body.add("a", wanted.adapter_spec(), wanted.training, layers, 9)
    return wanted, profile(body, "a", wanted, layers, COUNT)


@pytest.mark.parametrize(
    ("adapter", "cut_back"), [*((name, 0) for name in ADAPTERS), ("lora", 1), ("ia3", 1)]
)
def test_predictions_are_what_is_counted(body: Body, adapter: str, cut_back: int) -> None:
    asked, counted = joined(body, adapter, cut_back=cut_back)
    predict = SessionPredictor(BodyPlace.of(body, range(1, 6)))
    predicted = asyncio.run(predict(asked))
    assert replace(predicted, few_backward=counted.few_backward) == counted
    # Of a single row, the peak may be at another moment where there are more layers.
    assert counted.few_backward <= predicted.few_backward <= 1.01 * counted.few_backward
    assert counted.forward < counted.graph < counted.backward


@pytest.mark.parametrize("adapter", ["lora", "prefix", "diff"])
def test_what_is_reserved_is_enough_for_smaller_requests_and_shorter_sequences(
    body: Body, adapter: str
) -> None:
    asked, memory = joined(body, adapter)
    for lengths in ((3,), (9,) * 28, (64, 17), (50,) * 5):
        rows, width = sum(lengths), body.backbone.shape.hidden
        one = Rows("a", lengths, tuple(range(len(lengths))), 0, True, torch.zeros(rows, width), True)
        forward, _, backward = count_passes(body, one, asked.body(body.backbone.shape), COUNT)
        # A remainder of the measured rows is padded by itself.
        assert forward <= 1.01 * memory.forward_of(rows), lengths
        assert backward <= 1.01 * memory.backward_of(rows), lengths


def test_the_heaviest_sequences_are_the_longest_or_those_that_are_padded_most() -> None:
    assert worst_case_lengths(8, "cpu") == [8]
    assert worst_case_lengths(64, "cpu") == [9, 57, 64]  # padded to 16, and 57 to 64
    assert worst_case_lengths(2000, "cpu") == [9, 449, 2000]  # 449 to 512, whose weights are many
    assert worst_case_lengths(2000, "cuda") == [2000]


def test_short_sequences_beside_long_ones_need_no_more_than_is_reserved(body: Body) -> None:
    """Of few sequences some may be short, so that the others are longer than any that the server measured alone."""
    lengths = (449, 449, 702)
    rows = sum(lengths)
    asked, memory = joined(body, "lora", train_rows=rows, rows=rows, longest=702, sequences=3)
    width = body.backbone.shape.hidden
    one = Rows("a", lengths, (0, 1, 2), 0, True, torch.zeros(rows, width), True)
    forward, graph, backward = count_passes(body, one, asked.body(body.backbone.shape), COUNT)
    assert forward <= memory.forward and graph <= memory.graph and backward <= memory.backward


def test_prefixes_are_copied_for_as_many_sequences_as_there_may_be() -> None:
    assert sequences_behind_prefixes(100, 4, 64) == [64, 34, 1, 1]
    assert sequences_behind_prefixes(8, 4, 3) == [3, 2, 2, 1]
    assert sequences_behind_prefixes(8, 4, 2) == [2, 1, 2, 1, 2]  # the last one beyond what was agreed
    assert sequences_behind_prefixes(3, 9, 64) == [1, 1, 1]


def test_smaller_requests_need_what_does_not_depend_on_rows() -> None:
    memory = Memory(100, 1000, 8000, 10_000, 100, 500, few=10, few_forward=280, few_backward=1900)
    assert [memory.forward_of(rows) for rows in (0, 50, 100, 200)] == [200, 600, 1000, 2000]
    assert [memory.backward_of(rows) for rows in (0, 50, 100, 200)] == [1000, 5500, 10_000, 20_000]


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_reserve_what_they_keep(policy: str) -> None:
    plan = plan_forward(policy, MEMORY, 50, BUSY)  # type: ignore[arg-type]
    wanted = (5000, 5000, 0) if policy == "preserve" else (550, 50, 5000)
    assert (plan.size, plan.kept, plan.backward) == wanted
    assert plan.keeps == ("graph" if policy == "preserve" else "input")


def test_auto_keeps_a_graph_at_nobodys_expense_only() -> None:
    roomy = Circumstances(free=20_000, waits=False, largest=9_000, answer_s=1.0, reforward_s=1.0)
    assert plan_forward("auto", MEMORY, 100, roomy).keeps == "graph"
    for change in ({"waits": True}, {"largest": 10_001}, {"free": 18_999}):
        now = Circumstances(**{**vars(roomy), **change})
        assert plan_forward("auto", MEMORY, 100, now).keeps == "input"


@pytest.mark.parametrize(
    ("answer_s", "free", "others", "keeps"),
    [
        (9.0, 30_000, [(9_000, 1.0)], "graph"),  # all graphs fit beside the largest backward pass
        (1.0, 20_000, [(9_000, 1.0)], "graph"),  # only one of two fits: this client is as fast as the other
        (3.0, 20_000, [(9_000, 1.0)], "input"),  # a slow one leaves it to the other
        (3.0, 20_000, [(9_000, 4.0)], "graph"),  # unless that is slower
        (3.0, 37_000, [(9_000, 1.0)] * 3, "graph"),  # one of the others' three does not fit
        (3.0, 20_000, [(9_000, 1.0)] * 3, "input"),  # none of them does
        (0.0, 20_000, [(9_000, 1.0)], "graph"),  # nothing is known yet of this client
        (9.0, 20_000, [], "graph"),  # nor of any other
    ],
)
def test_auto_leaves_memory_to_clients_that_answer_soon(
    answer_s: float, free: int, others: list[tuple[int, float]], keeps: str
) -> None:
    offers = [Offer(size, seconds, reforward_s=0.1) for size, seconds in others]
    now = Circumstances(free, False, 9_000, answer_s, reforward_s=0.12, others=offers)
    assert plan_forward("auto", MEMORY, 100, now).keeps == keeps


def test_auto_moves_a_graph_to_host_memory_where_that_is_faster() -> None:
    def keeps(rate: float, answer_s: float = 1.0) -> str:
        now = Circumstances(0, True, 0, answer_s, reforward_s=0.1, host_rate=rate)
        return plan_forward("auto", MEMORY, 100, now).keeps

    assert keeps(rate=1e6) == "graph in host memory"  # 16 ms there and back
    assert keeps(rate=1e5) == "input"
    assert keeps(rate=1e6, answer_s=0.001) == "input"


def test_computing_together_is_measured_and_leaves_nothing(body: Body) -> None:
    assert measure_co_batching(body, range(1, 6)) in (0, 128, 256, 512, 1024)
    assert not body.adapters.tasks
