"""On a GPU: a neighbour that is not finite leaves the others' numbers as they are, in every kernel of a step.

Variable-length attention adds gradients up in an order that varies, so the comparisons have tolerances.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_mux import runtime
from megatron_mux.backbone.model import Backbone
from megatron_mux.kernels.attention.segments import Segment, segment_attention
from tests import tiny_models
from tests.end_to_end.families import FAMILIES, lora
from tests.end_to_end.harness import assert_close, train
from tests.end_to_end.test_isolation import ADAMW, POISONS, kinds, make_cases
from tests.gpu.needs_gpu import NEEDS_GPU

pytestmark = NEEDS_GPU
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
DEVICE = "cuda"


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("poison", POISONS)
def test_a_poisoned_neighbour_changes_nothing(poison: str, dtype: torch.dtype, tmp_path: Path) -> None:
    path = tiny_models.make(tmp_path, "llama")
    sections = kinds(FAMILIES["llama"])
    first = dict(list(sections.items())[:3])
    poisoned = {"poisoned": lora(FAMILIES["llama"].query_value, r=4)}
    cases = make_cases(path, {**first, **poisoned, **sections}, ADAMW, torch.float32)
    parallel = runtime.initialize(device=DEVICE)
    backbone = Backbone.load(path, parallel, dtype)
    healthy = train(backbone, parallel, list(cases.values()), 1)
    with POISONS[poison](backbone, cases["poisoned"]):
        sick = train(backbone, parallel, list(cases.values()), 1)
    runtime.shutdown()
    (failed,) = sick.results["poisoned"]
    assert failed.status == "failed"
    for name in cases.keys() - poisoned:
        assert sick.losses(name) == pytest.approx(healthy.losses(name), rel=TOLERANCE[dtype]), name
        assert_close(sick.tensors[name], healthy.tensors[name], TOLERANCE[dtype], name)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_attention_of_a_segment_knows_its_own_rows_only(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    lengths = (64, 7, 128, 64)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    segments = [Segment("ab"[i % 2], starts[i], lengths[i], i) for i in range(len(lengths))]
    shapes = [(sum(lengths), heads, 64) for heads in (8, 2, 2)]
    healthy = [torch.randn(shape, device=DEVICE, dtype=dtype) for shape in shapes]
    spoiled = [x.clone() for x in healthy]
    sick = slice(starts[1], starts[2])
    for x in spoiled:
        x[sick] = float("nan")
    found = []
    for inputs in (healthy, spoiled):
        leaves = [x.requires_grad_(True) for x in inputs]
        query, key, value = leaves
        out = segment_attention(query, key, value, segments, scale=0.125)
        out.backward(torch.ones_like(out))
        gradients = [x.grad for x in leaves if x.grad is not None]
        found.append([out.detach(), *gradients])
    assert len(found[0]) == 4
    rest = torch.ones(sum(lengths), dtype=torch.bool, device=DEVICE)
    rest[sick] = False
    for a, b in zip(*found, strict=True):
        assert b[rest].isfinite().all()
        assert float((a[rest] - b[rest]).norm() / a[rest].norm()) < TOLERANCE[dtype]
