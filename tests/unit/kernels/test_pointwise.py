"""Hand-written gradients against autograd's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megatron_mux.kernels.loss import cross_entropy
from megatron_mux.kernels.loss.cross_entropy import is_fused
from megatron_mux.kernels.pointwise import choice
from megatron_mux.kernels.pointwise.arguments import Norm
from megatron_mux.kernels.pointwise.choice import DryPointwise, pointwise_kernels
from megatron_mux.kernels.pointwise.functions import normalise
from megatron_mux.kernels.pointwise.reference import gated, rms_norm, rotate


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return (
        torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
        .to(dtype)
        .requires_grad_(True)
    )


def test_gradients() -> None:
    weight = random(10).detach()
    cos, sin = random(5, 1, 3).detach().cos(), random(5, 1, 3).detach().sin()
    assert torch.autograd.gradcheck(lambda x: rms_norm(x, weight, 1e-5), random(4, 1, 10))
    for activation in ("silu", "gelu", "gelu_pytorch_tanh"):
        function = gated(activation)
        assert function is not None and torch.autograd.gradcheck(function, random(4, 1, 12))
    assert gated("relu") is None
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin), random(5, 2, 6))
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin), random(5, 2, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_agrees_with_torch(dtype: torch.dtype) -> None:
    weight = random(32, dtype=dtype).detach()
    found = []
    for function in (rms_norm, lambda x, w, eps: F.rms_norm(x.double(), (32,), w.double(), eps)):
        x = random(7, 1, 32, dtype=dtype)
        out = function(x, weight, 1e-5)
        out.double().square().sum().backward()
        assert x.grad is not None
        found.append((out.double(), x.grad.double()))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for ours, wanted in zip(*found, strict=True):
        assert (ours - wanted).norm() <= tolerance * wanted.norm()


def test_rows_do_not_touch() -> None:
    weight = random(10).detach()
    swiglu = gated("silu")
    assert swiglu is not None
    for function, width in ((lambda x: rms_norm(x, weight, 1e-5), 10), (swiglu, 12)):
        clean, bad = random(4, 1, width), random(4, 1, width)
        with torch.no_grad():
            bad[2] = float("nan")
        for x in (clean, bad):
            function(x).sum().backward()
        assert clean.grad is not None and bad.grad is not None
        assert torch.equal(clean.grad[[0, 1, 3]], bad.grad[[0, 1, 3]])


def test_kernels_are_chosen_once_for_all_tensors_alike(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    asked: list[torch.dtype] = []

    def suits_triton(device: torch.device, dtype: torch.dtype) -> bool:
        asked.append(dtype)
        return device.type == "cuda"

    for module, choose in ((choice, pointwise_kernels), (cross_entropy, is_fused)):
        monkeypatch.setattr(module, "suits_triton", suits_triton)
        choose.cache_clear()
        request.addfinalizer(choose.cache_clear)
    for dtype in (torch.float32, torch.float64):
        for _ in range(2):
            normalise(random(3, 8, dtype=dtype), Norm(torch.ones(8, dtype=dtype), None, 1e-5, centred=False))
    assert asked == [torch.float32, torch.float64]
    gpu = torch.device("cuda", 0)
    assert pointwise_kernels(FakeTensor, gpu, torch.bfloat16) is DryPointwise
    assert is_fused(FakeTensor, gpu, torch.bfloat16) and not is_fused(
        Tensor, torch.device("cpu"), torch.float32
    )
