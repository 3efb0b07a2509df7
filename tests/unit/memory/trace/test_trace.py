"""A traced step: of any depth from two and three layers, and against a step that really computes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_mux.errors import UserError
from megatron_mux.gpus import Gpu
from megatron_mux.memory.optimizers import OPTIMIZERS
from megatron_mux.memory.stream.events import Category, Moment, Stream
from megatron_mux.memory.trace.case import Case
from megatron_mux.memory.trace.depth import step
from megatron_mux.memory.trace.model import UntraceableError
from megatron_mux.memory.trace.tracer import Tracer
from megatron_mux.memory.trace.training import count, trace
from megatron_mux.memory.untraced import TABLE
from megatron_mux.memory.worker import WorkerError
from tests.unit.memory.stream.peak import peak_of
from tests.unit.memory.traced import ADAPTERS, CONFIGS, GPT2, LLAMA, on_a_fake_gpu

pytestmark = on_a_fake_gpu


@functools.cache
def traced(config: str, adapter: str, layers: int, **more: Any) -> Stream:
    return trace(Case(CONFIGS[config], layers, 2, 16, ADAPTERS[adapter], **more))


def assert_few_layers_tell(config: str, adapter: str, layers: int, **more: Any) -> None:
    def few(cases: Sequence[Case]) -> list[Stream]:
        assert len(cases) == 2, "the whole was traced"
        return [traced(config, adapter, case.layers, **more) for case in cases]

    whole = Case(CONFIGS[config], layers, 2, 16, ADAPTERS[adapter], **more)
    _assert_same(step(whole, few), traced(config, adapter, layers, **more))


WAYS = [("llama", adapter, recompute) for adapter in ADAPTERS for recompute in (False, True)]
WAYS.remove(("llama", "prefix", True))  # peft does not do it
WAYS += [("gpt2", "full", False), ("gpt2", "lora", True), ("gpt2", "ia3", False), ("gpt2", "prefix", False)]


@pytest.mark.parametrize(("config", "adapter", "recompute"), WAYS)
def test_few_layers_tell_of_more(config: str, adapter: str, recompute: bool) -> None:
    # In the second step the optimizer has its states: that is the same however many layers there are.
    assert_few_layers_tell(config, adapter, 4, recompute=recompute, steps=2)


@pytest.mark.parametrize(
    "more",
    [
        {"autocast": "bfloat16", "optimizer": "adamw_torch_fused", "clip": None},
        {"autocast": "float16", "weights": "float32", "recompute": True},
        {"optimizer": "sgd", "padded": True, "gpu": Gpu((7, 5), False), "weights": "float16"},
        {"attention": "eager", "padded": True},
        {"accumulate": True},
        {"optimizer": "adagrad"},
        {"optimizer": "rmsprop"},
        {"optimizer": "adafactor"},
        {"optimizer": "adafactor", "weights": "float32", "accumulate": True},
    ],
    ids=str,
)
def test_few_layers_tell_however_they_are_trained(more: dict[str, Any]) -> None:
    assert_few_layers_tell("llama", "lora", 4, **more)


@pytest.mark.parametrize("adapter", ["full", "lora"])
@pytest.mark.parametrize(
    "optimizer", [name for name, one in OPTIMIZERS.items() if one.in_turn and one.traced]
)
def test_few_layers_tell_however_deep_with_one_tensor_at_a_time(optimizer: str, adapter: str) -> None:
    assert_few_layers_tell("llama", adapter, 5, optimizer=optimizer)


@pytest.mark.parametrize("optimizer", [name for name, one in OPTIMIZERS.items() if one.traced])
def test_an_optimizers_step_that_computes_takes_what_was_traced(optimizer: str) -> None:
    case = Case(LLAMA, 2, 2, 16, None, "float32", attention="eager", optimizer=optimizer)
    # States that are made in host memory are moved by an operator of another name.
    found, real = (
        [(kind, size, moment.phase) for kind, size, moment in _large(stream)]
        for stream in (trace(case), count(case))
    )
    assert found == real


def _assert_same(found: Stream, expected: Stream) -> None:
    for index, (one, other) in enumerate(zip(found, expected, strict=False)):
        assert one == other, f"event {index}"
    assert len(found) == len(expected)


@pytest.mark.parametrize(("config", "adapter", "recompute"), WAYS)
def test_a_step_that_computes_takes_what_was_traced(config: str, adapter: str, recompute: bool) -> None:
    # A GPU's dropout makes a mask of bytes, the CPU's one of numbers.
    plain = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) if config == "gpt2" else {}
    section = ADAPTERS[adapter]
    section = section and {**section, **({"lora_dropout": 0.0} if adapter == "lora" else {})}
    case = Case(CONFIGS[config] | plain, 2, 2, 16, section, "float32", attention="eager", recompute=recompute)
    case = replace(case, steps=1 if recompute else 2)
    found, real = trace(case), count(case)
    assert _large(found) == _large(real)
    assert peak_of(found).moment == peak_of(real).moment
    assert peak_of(found).size == pytest.approx(
        peak_of(real).size, abs=1000
    )  # step numbers are in host memory


def _large(stream: Stream) -> list[tuple[str, int, Moment]]:
    """Without step numbers (host memory), norms, the copy of a prefix's token numbers (to a GPU), and what is added."""
    added = {event.block for event in stream if event.moment.operator in TABLE}
    return [
        (event.kind, event.size, event.moment)
        for event in stream
        if event.size > 80 and event.block not in added
    ]


def test_parameters_and_states_are_told_apart() -> None:
    found = traced("llama", "lora", 2)
    weights = dict.fromkeys(Category, 0)
    for event in found:
        if event.kind == "allocate":
            weights[event.category] += event.size
    hidden, rank, layers = 64, 4, 2
    pairs = layers * (rank * (hidden + hidden) + rank * (hidden + hidden // 2))  # q_proj, v_proj
    assert weights[Category.ADAPTERS] == 4 * pairs
    assert weights[Category.GRADIENTS] == 2 * 4 * pairs, "in both steps"
    assert weights[Category.OPTIMIZER] == 2 * 4 * pairs, "made once"


def test_a_second_micro_batch_finds_gradients() -> None:
    one, two = (trace(Case(LLAMA, 2, 2, 16, steps=1, accumulate=accumulate)) for accumulate in (False, True))
    forward = [
        max(
            size
            for size, at in zip(found.live(), found.moments, strict=True)
            if found.moment_names[at][0] == "forward"
        )
        for found in (one, two)
    ]
    gradients = sum(e.size for e in one if e.kind == "allocate" and e.category == Category.GRADIENTS)
    assert gradients and 0 <= forward[1] - forward[0] - gradients < 100, "and the first one's loss"


@pytest.mark.versions
def test_traces_in_a_process_of_their_own() -> None:
    cases = [Case(GPT2, layers, 2, 16, ADAPTERS["ia3"]) for layers in (2, 3)]
    with Tracer() as tracer:
        tracer.begin()
        for case, found in zip(cases, tracer.traced(cases), strict=True):
            _assert_same(found, traced("gpt2", "ia3", case.layers))
        with pytest.raises(WorkerError, match="knows no model_type 'ggpt'"):
            list(tracer.traced([Case({"model_type": "ggpt"}, 2, 2, 16)]))
        with pytest.raises(UserError, match="cannot be read"):
            tracer.sizes(Path("nowhere.json"))
        assert tracer._process is not None
        tracer._process._process.kill()
        others = [replace(case, batch=3) for case in cases]
        with pytest.raises(WorkerError, match="ended by SIGKILL"):
            list(tracer.traced(others))
        assert len(list(tracer.traced(others))) == 2, "in another process"
    with Tracer(seconds=0.01) as tracer, pytest.raises(WorkerError, match=r"longer than 0\.01 s"):
        list(tracer.traced([replace(cases[0], batch=4)]))


def test_a_prefix_and_recomputation_exclude_each_other() -> None:
    with pytest.raises(UntraceableError, match="prefix"):
        trace(Case(LLAMA, 2, 2, 16, ADAPTERS["prefix"], recompute=True))


def test_an_adapter_of_some_layers_is_traced_whole() -> None:
    def few(cases: Sequence[Case]) -> list[Stream]:
        assert [case.layers for case in cases] == [5]
        return [trace(case) for case in cases]

    adapter = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "layers_to_transform": [3, 4]}
    found = step(Case(LLAMA, 5, 2, 16, adapter, steps=1), few)
    assert {event.moment.layer for event in found if event.category == Category.ADAPTERS} == {3, 4}


def test_torch_is_as_before_afterwards() -> None:
    before = torch._C._accelerator_getAccelerator(), torch.nn.functional.scaled_dot_product_attention
    traced("gpt2", "ia3", 2)
    after = torch._C._accelerator_getAccelerator(), torch.nn.functional.scaled_dot_product_attention
    assert before == after
