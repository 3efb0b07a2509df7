"""Adapters of experts one by one, as older versions of peft wrote them: the same update of every weight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_mux.adapters.lora import LoraSpec
from megatron_mux.adapters.peft_format import read_adapter
from megatron_mux.backbone.registry import read_shape
from megatron_mux.errors import UserError
from megatron_mux.tasks.start import with_stored_config
from tests import tiny_models

RANK, ALPHA = 3, 6.0
NAMES = {
    "mixtral": ("block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"}),
    "deepseek_v3": ("mlp", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}),
}


def stored(directory: Path, family: str, roles: tuple[str, ...], **config: Any) -> dict[str, Tensor]:
    """Write an adapter of `o_proj` and of each expert."""
    tiny_models.config(family).save_pretrained(directory / "model")
    shape = read_shape(directory / "model")
    assert shape.experts is not None
    block, names = NAMES[family]
    sizes = {
        f"model.layers.{i}.self_attn.o_proj": (shape.hidden, shape.in_features("linear_proj"))
        for i in range(4)
    }
    wide = (shape.experts.ffn, shape.hidden)
    for layer in shape.experts.layers(shape.layers):
        for expert in range(shape.experts.count):
            for role in roles:
                path = f"model.layers.{layer}.{block}.experts.{expert}.{names[role]}"
                sizes[path] = wide if role != "down" else wide[::-1]
    generator, tensors = torch.Generator().manual_seed(0), {}
    for path, (out, inputs) in sizes.items():
        tensors[f"base_model.model.{path}.lora_A.weight"] = torch.randn(RANK, inputs, generator=generator)
        tensors[f"base_model.model.{path}.lora_B.weight"] = torch.randn(out, RANK, generator=generator)
    fields = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": ["o_proj", *names.values()],
    }
    (directory / "adapter_config.json").write_text(json.dumps({**fields, **config}))
    save_file(tensors, directory / "adapter_model.safetensors")
    return tensors


@pytest.mark.parametrize("roles", [("gate", "up", "down"), ("gate", "up"), ("down",)], ids="+".join)
@pytest.mark.parametrize("family", NAMES)
def test_the_update_of_every_weight_is_the_same(family: str, roles: tuple[str, ...], tmp_path: Path) -> None:
    old = stored(tmp_path, family, roles)
    section, problems = with_stored_config({"adapter_name_or_path": str(tmp_path)}, tmp_path)
    assert not problems
    spec, shape = LoraSpec(**section), read_shape(tmp_path / "model")
    found = read_adapter(tmp_path, spec, shape)
    block, names = NAMES[family]
    assert shape.experts is not None
    for layer in shape.experts.layers(shape.layers):
        prefix = f"base_model.model.model.layers.{layer}"

        def update(path: str, prefix: str = prefix) -> Tensor:
            b, a = (old[f"{prefix}.{path}.lora_{side}.weight"] for side in "BA")
            return b @ a * (ALPHA / RANK)

        whole = f"{prefix}.self_attn.o_proj.lora_"
        new = found[f"{whole}B.weight"] @ found[f"{whole}A.weight"] * spec.lora_alpha / spec.r
        torch.testing.assert_close(new, update("self_attn.o_proj"), rtol=0, atol=1e-5)
        for role in {"gate": ("gate", "up"), "down": ("down",)}.values():
            if role[0] not in roles:
                continue
            inner = ".base_layer" if role[0] == "gate" and "down" in roles else ""
            a, b = (found[f"{prefix}.mlp.experts{inner}.lora_{side}.weight"] for side in "AB")
            a, b = a.view(shape.experts.count, spec.r, -1), b.view(len(b), spec.r, -1)
            for expert in range(shape.experts.count):
                old_update = torch.cat([update(f"{block}.experts.{expert}.{names[own]}") for own in role])
                new = b[:, :, expert] @ a[expert] * spec.lora_alpha / spec.r
                torch.testing.assert_close(new, old_update, rtol=0, atol=1e-5)


def test_what_cannot_be_represented_is_refused_by_name(tmp_path: Path) -> None:
    stored(tmp_path, "mixtral", ("gate", "down"))
    _, (problem,) = with_stored_config({"adapter_name_or_path": str(tmp_path)}, tmp_path)
    assert "one of the experts' gate and up projections" in problem
    tensors = stored(tmp_path, "mixtral", ("gate", "up"), use_rslora=True)
    _, (problem,) = with_stored_config({"adapter_name_or_path": str(tmp_path)}, tmp_path)
    assert "use_rslora" in problem
    tensors = stored(tmp_path, "mixtral", ("down",))
    save_file(
        {k: v for k, v in tensors.items() if ".1.block_sparse_moe.experts.2" not in k},
        tmp_path / "adapter_model.safetensors",
    )
    section, _ = with_stored_config({"adapter_name_or_path": str(tmp_path)}, tmp_path)
    with pytest.raises(UserError, match=r"layers\.1: expert 2 lacks"):
        read_adapter(tmp_path, LoraSpec(**section), read_shape(tmp_path / "model"))
