"""INT8 and FP8 made on load have the values of torchao's weight-only quantisation."""

from __future__ import annotations

import pytest
import torch

from megatron_mux.quantised import eight_bit
from megatron_mux.quantised.scheme import Quantisation


def _theirs(weights: torch.Tensor, to: eight_bit.Format) -> torch.Tensor:
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    model = torch.nn.Sequential(torch.nn.Linear(weights.shape[1], weights.shape[0], bias=False))
    model[0].weight.data = weights.clone()
    quantize_(model, Int8WeightOnlyConfig(version=2) if to == "int8" else Float8WeightOnlyConfig())
    return model[0].weight.dequantize()  # type: ignore[operator]


@pytest.mark.parametrize("to", ["int8", "fp8"])
def test_values_are_those_of_torchao(to: eight_bit.Format) -> None:
    weights = 0.1 * torch.randn(40, 96, generator=torch.Generator().manual_seed(0))
    held = eight_bit.quantise(weights.split(16), to)
    found = torch.empty_like(weights)
    held.dequantise_into(found)
    wanted = _theirs(weights, to)
    assert torch.equal(found, wanted), (found - wanted).abs().max()
    assert held.nbytes == Quantisation(to).nbytes(40, 96, [(40, 96)])


def test_blocks_are_cut_with_their_scales() -> None:
    codes = torch.randint(0, 256, (5, 384), dtype=torch.uint8)
    held = eight_bit.EightBitMatrix.of(codes, torch.rand(5, 3), "int8")
    whole, part = torch.empty(5, 384), torch.empty(2, 256)
    held.dequantise_into(whole)
    held.cut(range(128, 384)).take(torch.tensor([4, 1])).dequantise_into(part)
    assert torch.equal(part, whole[[4, 1], 128:])
