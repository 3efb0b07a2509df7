"""Memory is counted exactly, predicted closely, and reserved by policies as the paper's Figure 3 says."""

from __future__ import annotations

import pytest
import torch

from megatron_mux import runtime
from megatron_mux.backbone.model import Backbone
from megatron_mux.split.agreement import Proposal
from megatron_mux.split.body import Body
from megatron_mux.split.co_batching import measure_co_batching
from megatron_mux.split.meter import measure
from megatron_mux.split.policies import POLICIES, Circumstances, plan_forward
from megatron_mux.split.session_memory import Memory, predict, profile
from tests import tiny_models
from tests.unit.split.test_serving import proposal

CPU = torch.device("cpu")
MEMORY = Memory(rows=100, forward=1000, graph=8000, backward=10_000, hidden=100, lasting=500)
BUSY = Circumstances(free=10**6, waiting=1, largest=0, answer_s=9.0, reforward_s=1.0)


@pytest.fixture(scope="module")
def body(tmp_path_factory: pytest.TempPathFactory) -> Body:
    path = tiny_models.make(tmp_path_factory.mktemp("backbone"), "llama", num_hidden_layers=6, hidden_size=64)
    parallel = runtime.initialize(device="cpu")
    return Body(Backbone.load(path, parallel, split=(1, 5, 0), stage=1, ends=False), parallel)


def test_what_is_alive_is_counted_and_what_is_freed_is_not() -> None:
    def compute() -> torch.Tensor:
        a = torch.ones(100, 100)
        b = a @ a
        del a
        c = b.t() + 1  # a view takes nothing
        del b
        return c

    _, peak = measure(CPU, compute)
    assert (peak.peak, peak.lasting) == (2 * 40_000, 40_000)


@pytest.mark.parametrize("cut_back", [0, 1])
@pytest.mark.parametrize(
    "adapter",
    [
        {"peft_type": "LORA", "r": 4},
        {"peft_type": "LORA", "r": 4, "target_modules": "all-linear"},
        {"peft_type": "IA3"},
    ],
    ids=str,
)
def test_predictions_are_close(body: Body, adapter: dict[str, object], cut_back: int) -> None:
    asked: Proposal = proposal(adapter=adapter, cut_back=cut_back, train_rows=256, rows=256, longest=64)
    predicted = predict(body.backbone.shape, asked, 4, "cpu")
    layers = asked.body(body.backbone.shape)
    body.add("a", asked.adapter_spec(), asked.training, layers, 9)
    measured = profile(body, "a", asked, layers)
    body.remove("a")
    # Each tensor begins at a multiple of 16 values, in parameters, gradients and both moments.
    padding = len(asked.adapter_spec().tensors(body.backbone.shape)) * 16 * 4 * 4
    assert predicted.lasting <= measured.lasting <= predicted.lasting + padding
    assert predicted.backward == pytest.approx(measured.backward, rel=0.08)
    assert measured.forward <= predicted.forward
    assert measured.forward < measured.graph < measured.backward


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_reserve_what_they_keep(policy: str) -> None:
    plan = plan_forward(policy, MEMORY, 50, BUSY)  # type: ignore[arg-type]
    assert plan.kept <= plan.size
    keeps_graph = policy in ("preserve", "vanilla")
    assert (plan.keeps == "graph") is keeps_graph
    if policy == "vanilla":
        assert plan.size == plan.backward == 0  # the whole task has its memory
    elif keeps_graph:
        assert (plan.size, plan.kept, plan.backward) == (5000, 5000, 0)
    else:
        assert (plan.kept, plan.backward) == (50, 5000)
        assert plan.size == (5000 if policy == "reforward-with-gradients" else 550)


def test_auto_keeps_a_graph_at_nobodys_expense_only() -> None:
    roomy = Circumstances(free=20_000, waiting=0, largest=9_000, answer_s=1.0, reforward_s=1.0)
    assert plan_forward("auto", MEMORY, 100, roomy).keeps == "graph"
    for change in ({"waiting": 1}, {"largest": 10_001}, {"free": 18_999}):
        now = Circumstances(**{**vars(roomy), **change})
        assert plan_forward("auto", MEMORY, 100, now).keeps == "input"


def test_auto_moves_a_graph_to_host_memory_where_that_is_faster() -> None:
    def keeps(rate: float, answer_s: float = 1.0) -> str:
        now = Circumstances(free=0, waiting=1, largest=0, answer_s=answer_s, reforward_s=0.1, host_rate=rate)
        return plan_forward("auto", MEMORY, 100, now).keeps

    assert keeps(rate=1e6) == "graph in host memory"  # 16 ms there and back
    assert keeps(rate=1e5) == "input"
    assert keeps(rate=1e6, answer_s=0.001) == "input"


def test_computing_together_is_measured_and_leaves_nothing(body: Body) -> None:
    assert measure_co_batching(body, range(1, 6)) in (0, 128, 256, 512, 1024)
    assert not body.adapters.tasks
