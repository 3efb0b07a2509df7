"""LoHa: where peft has none it is refused, and its change has the square of its rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_mux.adapters.loha import LohaSpec
from megatron_mux.backbone.registry import read_shape
from megatron_mux.errors import UserError
from tests import tiny_models
from tests.unit.adapters.toy import sizes


def test_it_is_refused_where_peft_has_none(tmp_path: Path) -> None:
    shape = read_shape(tiny_models.make(tmp_path, "gpt2"))
    with pytest.raises(UserError, match="transposed weights of a gpt2, as in peft: choose LORA"):
        LohaSpec(peft_type="LOHA", target_modules=["c_attn"]).modules(shape)


def test_seconds_go_by_the_rank_of_its_change() -> None:
    spec = LohaSpec(peft_type="LOHA", r=3, rank_pattern={"k_proj": 5}, target_modules=["q_proj", "k_proj"])
    first = [module for module in spec.modules(sizes()) if module.layer == 0]
    assert spec.curve_of(first).size == 3 * 3 + 5 * 5
    assert {sample.section("linear_qkv", ["q_proj"]).r for sample in LohaSpec.samples()} == {4, 16}  # type: ignore[attr-defined]
