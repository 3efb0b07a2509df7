"""PEFT's sides of `vs_peft.py`: packed sequences never see each other, and operators have the right kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def pairs() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(3, 500, (length,), generator=generator) for length in (1, 7, 4)]
    return [(ids, torch.ones(len(ids), dtype=torch.bool)) for ids in tokens]


def test_a_packed_batch_has_positions_that_restart_and_no_label_across_sequences() -> None:
    import peft_side

    batch = peft_side.flatten(pairs(), torch.device("cpu"))
    assert set(batch) == {"input_ids", "position_ids", "labels"}
    assert batch["position_ids"].tolist() == [[0, *range(7), *range(4)]]
    assert (batch["labels"][0] == -100).nonzero().flatten().tolist() == [0, 1, 8]


def test_packed_logits_are_those_of_each_sequence_alone(tmp_path: Path) -> None:
    import peft_side
    from workload import write_random_backbone

    write_random_backbone("tiny", tmp_path, torch.float32)
    model = peft_side.load(tmp_path, torch.float32, torch.device("cpu"), "packed")
    batch = peft_side.flatten(pairs(), torch.device("cpu"))
    with torch.no_grad():
        together = model(**batch).logits[0]
        alone = torch.cat([model(input_ids=ids.unsqueeze(0)).logits[0] for ids, _ in pairs()])
    assert torch.allclose(together, alone, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::mm", "matrix products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("aten::copy_", "copies"),
        ("aten::mul", "element-wise"),
        ("aten::tanh", "element-wise"),
        ("aten::t", "views, allocation, autograd"),
        ("autograd::engine::evaluate_function: MmBackward0", "views, allocation, autograd"),
        ("aten::_softmax", "reductions and norms"),
        ("aten::_fused_adamw_", "optimizer"),
    ],
)
def test_kinds_of_operators(name: str, kind: str) -> None:
    from operator_profile import kind_of

    assert kind_of(name) == kind
