"""What cannot be merged is refused by name, and nothing is left behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_mux.adapters.registry import KINDS
from megatron_mux.backbone.registry import read_backbone_info
from megatron_mux.errors import UserError
from megatron_mux.merging.kinds import MERGES, UNMERGEABLE
from megatron_mux.merging.merge import merge
from megatron_mux.merging.provenance import Provenance
from megatron_mux.quantised.scheme import QuantMethod
from tests import tiny_models

_Q = "base_model.model.model.layers.0.self_attn.q_proj."


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make(tmp_path_factory.mktemp("models"), "llama")


def write(directory: Path, config: dict[str, Any], **shapes: tuple[int, ...]) -> Path:
    """An adapter of ones."""
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, **config}))
    tensors = {_Q + name.replace("_weight", ".weight"): torch.ones(shape) for name, shape in shapes.items()}
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def lora(directory: Path, **config: Any) -> Path:
    """A LoRA adapter that fits."""
    return write(directory, config, lora_A_weight=(2, 32), lora_B_weight=(32, 2))


def with_tensor(directory: Path, key: str, value: torch.Tensor) -> Path:
    """The same with one more tensor, or another value of one."""
    path = directory / "adapter_model.safetensors"
    save_file({**load_file(path), key: value}, path)
    return directory


WRONG: dict[str, tuple[Callable[[Path], Path], str]] = {
    "bottleneck": (
        lambda path: lora(path, peft_type="BOTTLENECK"),
        "BOTTLENECK cannot be merged.*network of its own",
    ),
    "prefix": (
        lambda path: lora(path, peft_type="PREFIX_TUNING"),
        "PREFIX_TUNING cannot be merged.*no weight holds",
    ),
    "unknown kind": (lambda path: lora(path, peft_type="OFT"), "OFT cannot be merged.*only LORA, VERA, IA3"),
    "variant": (
        lambda path: lora(path, alora_invocation_tokens=[1]),
        "alora_invocation_tokens is not supported",
    ),
    "mutated backbone": (lambda path: lora(path, init_lora_weights="pissa"), "path_initial_model_for_weight"),
    "other backbone": (
        lambda path: write(path, {}, lora_A_weight=(2, 64), lora_B_weight=(32, 2)),
        r"shape \[32, 64\] do not fit the backbone, which needs \[32, 32\]",
    ),
    "no partner": (lambda path: write(path, {}, lora_A_weight=(2, 32)), "lora_A.weight without"),
    "dora without magnitudes": (lambda path: lora(path, use_dora=True), "lacks .*lora_magnitude_vector"),
    "bias for none": (
        lambda path: with_tensor(lora(path), f"{_Q}lora_B.bias", torch.ones(32)),
        "has no bias to be added to",
    ),
    "left over": (
        lambda path: with_tensor(lora(path), f"{_Q}lora_C.weight", torch.ones(2)),
        "holds model.layers.0.self_attn.q_proj.lora_C.weight, for which",
    ),
    "unknown module": (
        lambda path: with_tensor(
            with_tensor(
                lora(path), "base_model.model.model.layers.9.mlp.up_proj.lora_A.weight", torch.ones(2, 32)
            ),
            "base_model.model.model.layers.9.mlp.up_proj.lora_B.weight",
            torch.ones(32, 2),
        ),
        "has no model.layers.9.mlp.up_proj",
    ),
    "changed vocabulary": (
        lambda path: with_tensor(lora(path), "base_model.model.lm_head.weight", torch.ones(97, 32)),
        "changed vocabulary cannot be merged",
    ),
    "diverged": (
        lambda path: with_tensor(lora(path), f"{_Q}lora_A.weight", torch.full((2, 32), torch.nan)),
        "holds NaN or infinity",
    ),
    "tokens that are not said": (
        lambda path: with_tensor(
            lora(path),
            "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta",
            torch.ones(1, 32),
        ),
        "trainable_token_indices does not say",
    ),
    "no adapter": (lambda path: path, "holds no adapter_config.json"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_merged_is_refused(wrong: str, backbone: Path, tmp_path: Path) -> None:
    make, message = WRONG[wrong]
    with pytest.raises(UserError, match=message):
        merge(backbone, make(tmp_path / "adapter"), tmp_path / "merged")
    assert not list(tmp_path.glob("*merged*"))


def test_another_backbone_is_said_and_another_quantisation_refused(backbone: Path, tmp_path: Path) -> None:
    plain, made = read_backbone_info(backbone), read_backbone_info(backbone, "int8")
    warnings: list[str] = []

    def merged(trained_on: Provenance, quantise: QuantMethod | None, name: str) -> None:
        adapter = lora(tmp_path / name, base_model_name_or_path="theirs")
        path = adapter / "adapter_model.safetensors"
        save_file(load_file(path), path, trained_on.header)
        merge(backbone, adapter, tmp_path / f"{name}-merged", quantise=quantise, warn=warnings.append)

    merged(Provenance(plain.fingerprint), None, "same")
    merged(Provenance(made.fingerprint, "int8", "float32", "cpu"), "int8", "made")
    assert not warnings
    assert "was dequantised (INT8, made on load)" in (tmp_path / "made-merged/README.md").read_text()
    with pytest.raises(UserError, match="quantised on load in int8: give --backbone-dtype int8"):
        merged(Provenance(made.fingerprint, "int8", "float32", "cpu"), None, "made, not asked for")
    with pytest.raises(UserError, match="as it is stored, not quantised: leave out --backbone-dtype"):
        merged(Provenance(plain.fingerprint), "int8", "asked for, not made")
    merged(Provenance("ab" * 32), None, "other")
    assert len(warnings) == 1 and "another backbone (theirs, fingerprint abababababababab)" in warnings[0]


def test_every_kind_is_merged_or_refused_with_a_reason() -> None:
    assert KINDS.keys() <= MERGES.keys() | UNMERGEABLE.keys()
    assert not MERGES.keys() & UNMERGEABLE.keys()
