"""The plug-in against Megatron-Core's own schedules on two stages: losses, gradients, callbacks; what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.pipeline.plugin import Bucket, forward_backward_multi_bucket, multi_bucket
from megatron_mux.runtime import Parallel
from tests.distributed.small_gpt import (
    BUCKETS,
    TOTAL,
    Batch,
    assert_same,
    batches_of,
    counted,
    gradients,
    mean,
    megatrons,
    on_cpu,
    ours,
    small_gpt,
)

pytestmark = pytest.mark.versions

PIPELINE, DATA = (1, 2), (1, 1)


@pytest.fixture
def make(joined: Callable[..., Parallel]) -> Iterator[Callable[..., Any]]:
    """`make(layout)`: this stage of a small GPT of Megatron's."""
    with on_cpu():
        yield lambda layout=PIPELINE: small_gpt(joined(*layout))


def test_buckets_as_if_alone_come_to_what_megatron_makes_of_them_one_by_one(make: Callable[..., Any]) -> None:
    model = make()
    losses = [loss for bucket in BUCKETS for loss in megatrons(model, mean, bucket)]
    expected = losses, gradients(model)
    data = [iter(batches_of(bucket)) for bucket in BUCKETS]
    found = ours(multi_bucket(BUCKETS, own_means=True), model, mean, data)
    assert len(found) == (TOTAL if dist.get_rank() == 1 else 0)
    assert_same((found, gradients(model)), expected)


@pytest.mark.parametrize("limit", [None, (1e9, 1e9)], ids=["as 1F1B keeps", "eager"])
@pytest.mark.parametrize("loss", [mean, counted])
def test_one_batch_of_several_sources_comes_to_what_megatron_makes_of_it(
    loss: Callable[..., Any], limit: tuple[float, ...] | None, make: Callable[..., Any]
) -> None:
    model = make()
    model.config.grad_scale_func = lambda value: 8 * value
    all_batches = [batch for bucket in BUCKETS for batch in batches_of(bucket)]
    model.config.variable_seq_lengths = True  # Megatron then exchanges shapes
    given = {"data_iterator": iter(all_batches), "num_microbatches": TOTAL}
    expected = megatrons(model, loss, BUCKETS[0], **given), gradients(model)
    model.config.variable_seq_lengths = False
    found = ours(multi_bucket(BUCKETS, limit), model, loss, iter(all_batches))
    assert_same((found, gradients(model)), expected)


@dataclass
class Log:
    """Notes what a schedule asks of the training loop, in order."""

    events: list[Any] = field(default_factory=list)

    def timers(self, name: str, log_level: int | None = None) -> Any:
        return SimpleNamespace(
            start=lambda barrier=False: self.events.append(("start", name, log_level, barrier)),
            stop=lambda: self.events.append(("stop", name)),
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.events.append("hold")
        yield
        self.events.append("release")

    def grad_sync(self, parameters: Any) -> None:
        self.events.append(("sync", len(list(parameters))))

    def finalize(self, models: list[Any], tokens: Tensor | None, **more: Any) -> None:
        count = None if tokens is None else tokens.item()
        self.events.append(("finalize", len(models), count, more["force_all_reduce"]))

    def attach(self, config: Any) -> None:
        config.timers, config.no_sync_func, config.grad_sync_func = self.timers, self.no_sync, self.grad_sync
        config.finalize_model_grads_func = self.finalize
        config.calculate_per_token_loss = config.barrier_with_L1_time = True


def is_transfer(event: Any) -> bool:
    """Whether Megatron times a transfer with it: ours are made beside the passes."""
    return isinstance(event, tuple) and any(word in str(event[1]) for word in ("send", "recv"))


@pytest.mark.parametrize("layout", [PIPELINE, DATA])
def test_one_bucket_is_1f1b_and_asks_the_loop_for_the_same_in_the_same_order(
    layout: tuple[int, int], make: Callable[..., Any]
) -> None:
    model, bucket = make(layout), BUCKETS[0]
    logs = Log(), Log()
    logs[0].attach(model.config)
    expected = megatrons(model, counted, bucket, force_all_reduce=True), gradients(model)
    logs[1].attach(model.config)
    call = {"num_microbatches": 5, "seq_length": 6, "micro_batch_size": 2, "force_all_reduce": True}
    found = ours(forward_backward_multi_bucket, model, counted, iter(batches_of(bucket)), **call)
    assert_same((found, gradients(model)), expected)
    theirs, own = ([event for event in log.events if not is_transfer(event)] for log in logs)
    assert own.count("hold") == own.count("release") == 1
    if layout == DATA:  # Megatron releases before the last forward pass there, and nothing depends on it
        theirs, own = ([event for event in events if event != "release"] for events in (theirs, own))
    assert own == theirs


def test_of_several_buckets_gradients_are_released_once_and_tokens_add_up(make: Callable[..., Any]) -> None:
    model, log = make(), Log()
    log.attach(model.config)
    ours(multi_bucket(BUCKETS), model, counted, [iter(batches_of(bucket)) for bucket in BUCKETS])
    even = sum(int((labels % 2 == 0).sum()) for bucket in BUCKETS for _, labels in batches_of(bucket))
    assert log.events.count("hold") == log.events.count("release") == 1
    last = max(i for i, event in enumerate(log.events) if event == ("start", "backward-compute", 2, False))
    is_first = dist.get_rank() == 0
    assert (log.events.index("release") < last) is is_first
    assert [e[0] for e in log.events if e[0] in ("sync", "finalize")] == ["finalize"] * is_first + [
        "sync",
        "finalize",
    ] * (not is_first)
    assert log.events[-2] == ("finalize", 1, 0 if is_first else even, False)


def test_forward_alone(make: Callable[..., Any]) -> None:
    model, log = make(), Log()
    log.attach(model.config)
    schedule = multi_bucket(BUCKETS)

    def data() -> list[Iterator[Batch]]:
        return [iter(batches_of(bucket)) for bucket in BUCKETS]

    told: list[bool] = []
    model.set_is_first_microbatch = lambda: told.append(True)
    with torch.no_grad():
        expected = [
            loss for bucket in BUCKETS for loss in megatrons(model, counted, bucket, forward_only=True)
        ]
        told.clear()
        found = ours(schedule, model, counted, data(), forward_only=True, first_val_step=True)
        sums = ours(
            schedule,
            model,
            counted,
            data(),
            forward_only=True,
            first_val_step=False,
            collect_non_loss_data=True,
        )
    assert len(told) == 1, "fp8 weights are cached in the first of all micro-batches"
    assert_same((found, {}), (expected, {}))
    assert len(sums) == len(found) and all(isinstance(one, Tensor) and one.dim() == 0 for one in sums)
    assert all(gradient is None for gradient in gradients(model).values())
    assert not any(event[0] in ("sync", "finalize") for event in log.events)


REFUSALS: dict[str, dict[str, Any]] = {
    "model is a list of 2": {"model": 2},
    "virtual_pipeline_model_parallel_size=2": {"config": {"virtual_pipeline_model_parallel_size": 2}},
    "num_moe_experts=4": {"config": {"num_moe_experts": 4}},
    "variable_seq_lengths": {
        "config": {"variable_seq_lengths": True},
        "schedule": forward_backward_multi_bucket,
    },
    "decoder_seq_length": {"decoder_seq_length": 4},
    "adjust_tensor_shapes_fn": {"adjust_tensor_shapes_fn": lambda receive, send: (receive, send)},
    "collect_non_loss_data": {"collect_non_loss_data": True},
    "both p2p_communicator and pg_collection": {"p2p_communicator": object()},
    r"9, but the buckets were bound with 5 \(short\) \+ 2 \(long\)": {"num_microbatches": 9},
    r"list of 2 for 3 bucket\(s\)": {"data": [None, None]},
    r"memory_limit is for 3 stage\(s\), not for 2": {"schedule": multi_bucket(BUCKETS, (1e9, 1e9, 1e9))},
}


@pytest.mark.parametrize("message", REFUSALS)
def test_what_is_not_done_is_refused_by_name(message: str, make: Callable[..., Any]) -> None:
    given = dict(REFUSALS[message])
    model = make()
    for name, value in given.pop("config", {}).items():
        setattr(model.config, name, value)
    schedule, data = given.pop("schedule", multi_bucket(BUCKETS)), given.pop("data", None)
    chunks = [model] * given.pop("model", 1)
    with pytest.raises(ValueError, match=message):
        ours(schedule, chunks, mean, data, **given)


def test_a_length_that_is_not_that_of_the_data_is_named(make: Callable[..., Any]) -> None:
    model = make()
    if dist.get_rank() == 0:  # who fails before anything is sent
        wrong = multi_bucket([Bucket("wrong", 1, 7, 2)])
        with pytest.raises(
            ValueError, match=r"'wrong' is said to send \[7, 2, 16\] .* micro-batch 0 made \[6, 2, 16\]"
        ):
            ours(wrong, model, mean, iter(batches_of(BUCKETS[0])), num_microbatches=1)
    dist.barrier()
