"""Triton's element-wise kernels against torch's operators and autograd.

`test_triton_interpreted.py` runs them in Triton's interpreter, `tests/gpu/test_triton_on_gpu.py` on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from megatron_mux.kernels.pointwise import functions as fused_pointwise
from megatron_mux.kernels.pointwise import triton as triton_pointwise
from megatron_mux.kernels.pointwise.arguments import Heads, Norm
from megatron_mux.kernels.pointwise.reference import ACTIVATIONS

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
assert (DEVICE.type == "cpu") == triton.knobs.runtime.interpret
FULL, HALF = torch.float32, torch.float16
TOLERANCES = {FULL: 2e-6, HALF: 3e-3}

ROWS = 3
Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernels compute all but fp64, on a CPU too."""

    def kernels(kind: type[Tensor], device: torch.device, dtype: torch.dtype) -> Any:
        return None if dtype == torch.float64 else triton_pointwise

    monkeypatch.setattr(fused_pointwise, "pointwise_kernels", kernels)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE)


def run(function: Function, inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """What a function makes of inputs in a dtype, and their gradients for random ones of its results."""
    own = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
    made = function(own, dtype)
    made = [x for x in (made if isinstance(made, tuple) else (made,)) if x is not None]
    gradients = [random(*x.shape, seed=7 + i).to(dtype) for i, x in enumerate(made)]
    torch.autograd.backward(made, gradients)
    found = [*made, *(x.grad for x in own)]
    return [x.detach() for x in found if x is not None]


def check(function: Function, inputs: list[Tensor], dtype: torch.dtype) -> None:
    """In a dtype as in fp64 of the same rounded inputs; and a row alone as among others, whatever these are."""
    rounded = [x.to(dtype) for x in inputs]
    found, wanted = run(function, rounded, dtype), run(function, rounded, torch.float64)
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == dtype and ours.shape == theirs.shape
        assert (ours - theirs).norm() <= TOLERANCES[dtype] * theirs.norm()
    spoilt = [x.clone() for x in rounded]
    for x in spoilt:
        x[1] = float("nan")
    for ours, among in zip(found, run(function, spoilt, dtype), strict=True):
        assert torch.equal(ours[::2], among[::2])


@pytest.mark.parametrize(
    ("gate", "biased", "dtype"), [(True, False, FULL), (False, True, HALF)], ids=["gated", "with a bias"]
)
@pytest.mark.parametrize("name", sorted(set(ACTIVATIONS) - {"swish", "gelu_fast", "gelu_pytorch_tanh"}))
def test_activations(name: str, gate: bool, biased: bool, dtype: torch.dtype) -> None:
    check_activation(name, gate, biased, dtype)


def test_gated_activation_with_a_bias() -> None:
    check_activation("gelu", True, True, FULL)


def check_activation(name: str, gate: bool, biased: bool, dtype: torch.dtype) -> None:
    width = 2 * 2057 if gate else 2057  # more than a block
    bias = random(width, seed=3).to(dtype)

    def function(inputs: list[Tensor], of: torch.dtype) -> Tensor:
        return fused_pointwise.activate(inputs[0], bias.to(of) if biased else None, name=name, gate=gate)

    check(function, [random(ROWS, 1, width)], dtype)


def norm_of(dtype: torch.dtype, of: torch.dtype, centred: bool, width: int, seed: int) -> Norm:
    weight, bias = (random(width, seed=seed + i).to(dtype).to(of) for i in range(2))
    return Norm(weight, bias if centred else None, 1e-5, centred)


@pytest.mark.parametrize(("centred", "width", "dtype"), [(False, 577, HALF), (True, 96, FULL)])
def test_norms(centred: bool, width: int, dtype: torch.dtype) -> None:
    def forked(inputs: list[Tensor], of: torch.dtype) -> Any:
        return fused_pointwise.fork(inputs[0], norm_of(dtype, of, centred, width, 1))

    def normed(inputs: list[Tensor], of: torch.dtype) -> Any:
        return fused_pointwise.normalise(inputs[0], norm_of(dtype, of, centred, width, 1))

    check(forked, [random(ROWS, 1, width)], dtype)
    check(normed, [random(ROWS, 1, width)], dtype)


@pytest.mark.parametrize(
    ("parts", "centred", "dtype"),
    [
        ("outer", False, FULL),
        ("bias, outer", True, HALF),
        ("inner", True, FULL),
        ("inner, outer", False, HALF),
        ("bias, inner, outer", True, FULL),
    ],
)
def test_sums(centred: bool, parts: str, dtype: torch.dtype) -> None:
    width = 200
    bias = random(width, seed=3).to(dtype)

    def function(inputs: list[Tensor], of: torch.dtype) -> Any:
        return fused_pointwise.join(
            inputs[0],
            bias.to(of) if "bias" in parts else None,
            inputs[1],
            norm_of(dtype, of, centred, width, 11) if "inner" in parts else None,
            norm_of(dtype, of, centred, width, 21) if "outer" in parts else None,
        )

    check(function, [random(ROWS, 1, width), random(ROWS, 1, width, seed=9)], dtype)


def test_parts_without_a_gradient() -> None:
    """A sum whose norm nobody back-propagates, and a norm whose sum nobody does."""
    for last in (0, 1):
        found = []
        for dtype in (torch.float32, torch.float64):
            inputs = [random(ROWS, 1, 64, seed=i).to(dtype, copy=True).requires_grad_() for i in range(2)]
            norm = norm_of(torch.float32, dtype, False, 64, 1)
            output = fused_pointwise.join(inputs[0], None, inputs[1], None, norm)[last]
            assert output is not None
            output.square().sum().backward()
            found.append([x.grad for x in inputs])
        for ours, theirs in zip(*found, strict=True):
            assert (ours - theirs).norm() <= 2e-6 * theirs.norm()


HEADS = {
    "grouped": (Heads(32, 4), 2, 16, True, FULL),
    "as many keys": (Heads(24, 1), 3, 12, False, HALF),
    "partial, normalised": (Heads(40, 3), 2, 12, True, HALF),
    "partial": (Heads(40, 3), 2, 12, False, FULL),
    "several programs a row": (Heads(128, 19), 1, 64, False, FULL),
}
"""Heads, groups, rotated pairs, whether queries and keys are normalised, and the dtype."""


@pytest.mark.parametrize("case", HEADS)
def test_heads(case: str) -> None:
    heads, groups, pairs, normed, dtype = HEADS[case]
    weights = [random(heads.size, seed=i).to(dtype) for i in range(2)]
    turns = random(ROWS, 1, pairs, seed=5)

    def function(inputs: list[Tensor], of: torch.dtype) -> Any:
        own = (weights[0].to(of), weights[1].to(of)) if normed else (None, None)
        angles = turns.cos().to(dtype).to(of), turns.sin().to(dtype).to(of)
        return fused_pointwise.turn(inputs[0], angles, replace(heads, weights=own, eps=1e-5))

    check(function, [random(ROWS, 1, groups * (heads.queries + 2) * heads.size)], dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("first", "size"), [(0, 16), (24, 40)])
def test_rotation_of_a_part(first: int, size: int, interleaved: bool) -> None:
    """Of heads that are a part of wider ones, their gradient a part of a wider tensor."""
    turns = random(ROWS, 1, 8, seed=5)

    def function(inputs: list[Tensor], of: torch.dtype) -> Any:
        cos, sin = turns.cos().to(of), turns.sin().to(of)
        x = inputs[0][..., 8 : 8 + size]
        return torch.cat((fused_pointwise.rotate_heads(x, cos, sin, first, interleaved), x), dim=-1)

    check(function, [random(ROWS, 3, 56)], torch.float32)
