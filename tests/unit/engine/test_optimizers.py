"""Optimizers against the libraries that users know them from; skipped steps, saved states and their bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers.optimization import Adafactor

from megatron_mux.adapters.parameter import AdapterParameter
from megatron_mux.optimizers import adafactor
from megatron_mux.optimizers.optimizer import Optimizer, Options, ParamGroup, ParamLayout, ParamSlice
from megatron_mux.optimizers.registry import OPTIMIZERS
from megatron_mux.optimizers.schedules import SCHEDULES, problem_of_kwargs, schedule
from megatron_mux.tasks import TrainingSpec

RATE, BETAS = 1e-2, (0.8, 0.95)
SHAPES = ((8, 64), (128, 8), (64, 96), (100,), (2, 6, 5))  # (64, 96): large enough for 8 bits

Groups = list[dict[str, Any]]


def theirs(name: str, groups: Groups) -> torch.optim.Optimizer:
    """The library's optimizer, as `transformers.Trainer` makes it."""
    import bitsandbytes

    optim: Any = bitsandbytes.optim

    made: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "adamw_torch_fused": lambda: torch.optim.AdamW(groups, lr=RATE, betas=BETAS, fused=True),
        "adamw_torch": lambda: torch.optim.AdamW(groups, lr=RATE, betas=BETAS),
        "adamw_8bit": lambda: optim.AdamW(groups, lr=RATE, betas=BETAS, optim_bits=8),
        "lion_32bit": lambda: optim.Lion(groups, lr=RATE, betas=BETAS, optim_bits=32),
        "adafactor": lambda: Adafactor(groups, lr=RATE, scale_parameter=False, relative_step=False),
        "sgd": lambda: torch.optim.SGD(groups, lr=RATE),
    }
    return made[name]()


def make(name: str, tensors: Sequence[Tensor], values: Tensor, gradients: Tensor) -> Optimizer:
    """Ours over the same tensors, laid end to end."""
    slices, at = [], 0
    for i, tensor in enumerate(tensors):
        value = torch.nn.Parameter(torch.empty(0))
        run = ParamGroup(at, at + tensor.numel(), 0.1 if tensor.dim() > 1 else 0.0, 1.0 + i % 2)
        slices.append(
            ParamSlice(AdapterParameter(str(i), value, tuple(tensor.shape)), tuple(tensor.shape), run)
        )
        at += tensor.numel()
    layout = ParamLayout(values, gradients, [param.group for param in slices], slices)
    return OPTIMIZERS[name](layout, Options(*BETAS))


def state_of(optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    """A copy of what a save holds."""
    return {
        key: {n: stored.tensor.clone() for n, stored in own.items()} for key, own in optimizer.state().items()
    }


@pytest.mark.parametrize(
    "name", ["adamw_torch_fused", "adamw_torch", "adamw_8bit", "lion_32bit", "adafactor", "sgd"]
)
def test_twenty_steps_are_the_librarys_skipped_ones_change_nothing_and_states_are_restored(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for shape in SHAPES]
    parameters = [torch.nn.Parameter(tensor.clone()) for tensor in tensors]
    groups = [
        {"params": [p], "weight_decay": 0.1 if p.dim() > 1 else 0.0, "lr": RATE * (1.0 + i % 2)}
        for i, p in enumerate(parameters)
    ]
    reference = theirs(name, groups)
    values = torch.cat([tensor.flatten() for tensor in tensors])
    gradients = torch.zeros_like(values)
    optimizer = make(name, tensors, values, gradients)
    for step in range(20):
        gradients.normal_(generator=generator)
        for param, parameter in zip(optimizer.layout.slices, parameters, strict=True):
            parameter.grad = param.of(gradients).clone()
        reference.step()
        optimizer.update(step, RATE, torch.zeros(()))
        if step == 10:
            before, state = values.clone(), state_of(optimizer)
            gradients.fill_(torch.nan)
            optimizer.update(step + 1, RATE, torch.ones(()))
            assert torch.equal(values, before)
            assert all(
                torch.equal(t, state[key][n])
                for key, own in state_of(optimizer).items()
                for n, t in own.items()
            )
            optimizer = make(name, tensors, values, gradients)
            for param in optimizer.layout.slices if state else ():
                optimizer.load(param, state[param.parameter.key])
    for param, parameter in zip(optimizer.layout.slices, parameters, strict=True):
        assert torch.dist(param.of(values), parameter) <= 1e-6 * parameter.norm()


@pytest.mark.parametrize("name", ["adamw_8bit", "adafactor"])
def test_tensors_that_are_stepped_together_are_those_stepped_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, in groups and in pieces of them: sizes that are whole blocks and others, small ones among them."""
    from megatron_mux.optimizers import adamw_8bit

    shapes = ((64, 96), (64, 96), (16, 16), (16, 16), (5000,), (64, 96), (96, 64))
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    start = torch.cat([tensor.flatten() for tensor in tensors])
    found = []
    for at_once in (1 << 20, 2048):
        monkeypatch.setattr(adamw_8bit, "_AT_ONCE", at_once)
        monkeypatch.setattr(adafactor, "_AT_ONCE", at_once)
        values, gradients = start.clone(), torch.zeros_like(start)
        optimizer, own = make(name, tensors, values, gradients), []
        draws = torch.Generator().manual_seed(4)
        for step in range(3):
            gradients.normal_(generator=draws)
            optimizer.update(step, RATE, torch.zeros(()))
            own.append(values.clone())
        found.append((own, state_of(optimizer)))
    (values_of, states), (others_of, others) = found
    assert all(map(torch.equal, values_of, others_of))
    assert all(torch.equal(t, others[key][n]) for key, kept in states.items() for n, t in kept.items())


def test_eight_bit_states_of_other_shards_are_rounded_to_their_blocks() -> None:
    """What two tensor ranks saved continues on one: codes with the scale of each value, rounded once more."""
    shape = (64, 96)
    halves = [AdapterParameter("w", cast(Any, None), shape, 1, half) for half in torch.arange(96).split(48)]
    own = [ParamSlice(half, (64, 48), ParamGroup(0, 64 * 48), 1) for half in halves]
    kinds, parts = OPTIMIZERS["adamw_8bit"], []
    for rank, param in enumerate(own):
        gradients = torch.randn(64 * 48, generator=torch.Generator().manual_seed(rank)) * (1 + 9 * rank)
        optimizer = kinds(ParamLayout(torch.zeros(64 * 48), gradients, [param.group], [param]), Options())
        optimizer.update(0, RATE, torch.zeros(()))
        parts.append(optimizer.state()["w"])
    full = {name: torch.cat([part[name].tensor for part in parts], dim=1) for name in parts[0]}
    again = kinds(ParamLayout(torch.zeros(64 * 48), torch.zeros(64 * 48), [own[1].group], own[1:]), Options())
    again.load(own[1], full)
    assert all(torch.equal(again.state()["w"][name].tensor, parts[1][name].tensor) for name in full), "exact"
    whole = ParamSlice(AdapterParameter("w", cast(Any, None), shape), shape, ParamGroup(0, 64 * 96))
    alone = kinds(ParamLayout(torch.zeros(64 * 96), torch.zeros(64 * 96), [whole.group], [whole]), Options())
    alone.load(whole, full)
    found = {name: stored.tensor for name, stored in alone.state()["w"].items()}
    codes = cast(Any, alone)._codes
    for name, code in zip(("exp_avg", "exp_avg_sq"), codes, strict=True):
        scales = found[f"{name}_scale"].repeat_interleave(256).view(shape)
        before, after = code[full[name].int()] * full[f"{name}_scale"], code[found[name].int()] * scales
        assert torch.dist(before, after) <= 0.02 * before.norm()


SCHEDULED: dict[str, dict[str, Any]] = {
    "linear": {},
    "cosine": {"num_cycles": 1.5},
    "cosine_with_restarts": {"num_cycles": 3},
    "polynomial": {"lr_end": 1e-5, "power": 2.0},
    "constant": {},
    "constant_with_warmup": {},
    "inverse_sqrt": {"timescale": 7},
    "cosine_with_min_lr": {"min_lr": 1e-5},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1, "warmup_lr_rate": 0.2},
    "warmup_stable_decay": {"num_decay_steps": 6, "decay_type": "1-sqrt", "min_lr_ratio": 0.1},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_are_those_of_transformers(name: str) -> None:
    from transformers import get_scheduler

    warmup = 0 if name == "constant" else 4
    kwargs = SCHEDULED[name]
    assert not problem_of_kwargs(name, kwargs, RATE)
    reference = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    scheduler = get_scheduler(name, reference, warmup, 20, kwargs)
    factor = schedule(name, RATE, warmup, 20, kwargs)
    for step in range(20):
        assert RATE * factor(step) == scheduler.get_last_lr()[0]
        reference.step()
        scheduler.step()


def test_schedules_take_what_those_of_transformers_take() -> None:
    import inspect

    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION
    from transformers.trainer_utils import SchedulerType

    given = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch", "_", "kwargs"}
    wanted = {
        kind.value: set(inspect.signature(cast(Any, TYPE_TO_SCHEDULER_FUNCTION[kind])).parameters) - given
        for kind in SchedulerType
        if kind.value not in ("reduce_lr_on_plateau", "greedy")
    }
    assert {name: set(takes) for name, takes in SCHEDULES.items()} == wanted


@pytest.mark.parametrize(
    ("name", "kwargs", "wrong"),
    [
        ("linear", {"power": 2}, "'power' is unknown: linear takes none"),
        ("cosine", {"cycles": 2}, "'cycles' is unknown: cosine takes num_cycles"),
        ("cosine_with_restarts", {"num_cycles": 1.5}, "num_cycles must be a whole number of at least 1"),
        ("cosine_with_min_lr", {}, "needs one of min_lr and min_lr_rate"),
        ("warmup_stable_decay", {}, "needs num_decay_steps"),
        (
            "warmup_stable_decay",
            {"num_decay_steps": 2, "decay_type": "exp"},
            "decay_type must be one of linear",
        ),
        ("polynomial", {"lr_end": 1.0}, "lr_end (1.0) must be smaller than learning_rate (0.01)"),
    ],
)
def test_wrong_kwargs_are_refused_with_what_the_schedule_takes(
    name: str, kwargs: dict[str, Any], wrong: str
) -> None:
    assert wrong in problem_of_kwargs(name, kwargs, RATE)


def test_groups_of_lora_plus() -> None:
    spec = TrainingSpec(loraplus_lr_ratio=16.0, loraplus_weight_decay=0.1, learning_rate=1e-3)
    at = "base_model.model.q_proj."
    assert spec.decay_and_rate(at + "lora_A.weight", (4, 8), True) == (0.1, 1.0)
    assert spec.decay_and_rate(at + "lora_B.weight", (8, 4), True) == (0.1, 16.0)
    assert spec.decay_and_rate(at + "lora_B.bias", (8,), False) == (0.0, 16.0)
