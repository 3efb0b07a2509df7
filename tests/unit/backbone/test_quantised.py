"""Which quantised backbones are read, which modules of them are quantised, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_mux.backbone.model import Backbone
from megatron_mux.backbone.registry import read_backbone_info
from megatron_mux.errors import UserError
from megatron_mux.quantised.config import read_quantisation
from megatron_mux.quantised.scheme import Quantisation
from megatron_mux.runtime import Parallel
from tests import quantised_models, tiny_models

PROJECTION = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantised_models.make_plain(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"quant_method": "gptq", "bits": 4}, '"gptq"'),
        ({"quant_method": "awq"}, '"awq"'),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "load_in_8bit"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 'bnb_4bit_quant_type = "fp4"'),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"format": "nvfp4-pack-quantized"}},
            },
            "nvfp4-pack-quantized",
        ),
        (
            {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}},
            "Int4Weight",
        ),
        ({"quant_method": "fp8", "scale_fmt": "ue8m0"}, "scale_fmt"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["mlp.("]}, 'modules_to_not_convert = "mlp.("'),
    ],
)
def test_other_formats_are_refused_by_name(section: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as caught:
        read_quantisation({"quantization_config": section})
    assert named in str(caught.value) and "supported is" in str(caught.value)


@pytest.mark.parametrize(
    ("how", "covered"),
    [
        (Quantisation("nf4"), True),
        (Quantisation("nf4", "bitsandbytes", skipped=("q_proj",)), False),
        (Quantisation("nf4", "bitsandbytes", skipped=("model.layers.0",)), False),
        (Quantisation("nf4", "bitsandbytes", skipped=("model.layers.0.self_attn.q",)), True),
        (Quantisation("int8", "compressed-tensors", targets=("Linear",), skipped=("lm_head",)), True),
        (
            Quantisation("int8", "compressed-tensors", targets=("Linear",), skipped=("re:.*self_attn.*",)),
            False,
        ),
        (Quantisation("int8", "compressed-tensors", targets=("re:.*mlp.*",)), False),
    ],
)
def test_modules_that_stay_as_they_are(how: Quantisation, covered: bool) -> None:
    assert how.covers(PROJECTION) == covered
    assert not how.covers("model.layers.0.mlp.experts.3.down_proj", expert=True)


def test_a_contradicting_flag_is_refused(plain: Path) -> None:
    path = quantised_models.make_blocks(plain)
    assert str(read_backbone_info(path, "fp8").shape.quantisation) == "FP8, by fp8"
    with pytest.raises(UserError, match=r"--mux-backbone-dtype int8: contradicts .* FP8, by fp8"):
        read_backbone_info(path, "int8")


def test_quantising_on_load_makes_another_backbone(plain: Path) -> None:
    prints = {read_backbone_info(plain, how).fingerprint for how in (None, "nf4", "int8", "fp8")}
    assert len(prints) == 4, "a run would continue with another backbone"


def test_tensor_ranks_that_cut_a_block_are_refused(plain: Path) -> None:
    read_backbone_info(plain, "int8").check_parallel(4, 1)
    read_backbone_info(plain, "nf4").check_parallel(2, 1)
    with pytest.raises(UserError, match=r"4 tensor ranks have 32 of the 128 input features of .*o_proj"):
        read_backbone_info(plain, "nf4").check_parallel(4, 1)


def test_a_missing_statistic_is_named(plain: Path) -> None:
    config = json.loads((plain / "config.json").read_text())
    section = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    path = plain.parent / "incomplete"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    (path / "model.safetensors").symlink_to(plain / "model.safetensors")
    with pytest.raises(UserError, match=r"q_proj.weight.*\.absmax|\.absmax"):
        read_backbone_info(path)


def test_a_fused_matrix_with_an_unquantised_part_is_held_unquantised(plain: Path) -> None:
    alone = Parallel.alone(torch.device("cpu"))
    path = quantised_models.make_compressed_tensors(plain, "fp8", "channel")
    config = json.loads((path / "config.json").read_text())
    tensors = quantised_models.load_file(path / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj"
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"].float() * tensors.pop(f"{name}.weight_scale")
    quantised_models.save_file(tensors, path / "model.safetensors", {"format": "pt"})
    whole = Backbone.load(path.parent / "plain", alone).model.decoder.layers[1].self_attention
    config["quantization_config"]["ignore"].append(name)
    (path / "config.json").write_text(json.dumps(config))
    backbone = Backbone.load(path, alone)
    quantised = backbone.offload.groups[1].dequantised
    assert quantised is not None and len(quantised.matrices) == 3
    fused = backbone.model.decoder.layers[1].self_attention.linear_qkv.weight
    assert torch.allclose(fused, whole.linear_qkv.weight, atol=0.02)


def test_transposed_weights_have_the_values_of_bitsandbytes(tmp_path: Path) -> None:
    from bitsandbytes import functional

    gpt2, alone = quantised_models.make_gpt2(tmp_path), Parallel.alone(torch.device("cpu"))
    module = "transformer.h.0.attn.c_attn"
    stored = quantised_models.load_file(gpt2 / "model.safetensors")[f"{module}.weight"]
    theirs = functional.quantize_4bit(stored.t().contiguous(), compress_statistics=True, quant_type="nf4")
    wanted = functional.dequantize_4bit(*theirs)
    made = Backbone.load(gpt2, alone, quantise="nf4")
    read = Backbone.load(quantised_models.make_nf4(gpt2, double=True), alone)
    whole = Backbone.load(quantised_models.dequantised(gpt2, made, tmp_path), alone)
    found = made.module_weight(module)
    assert found is not None and torch.equal(found, wanted)
    for backbone in (made, read):
        quantised = backbone.offload.groups[0].dequantised
        assert quantised is not None and len(quantised.matrices) == 4
        with backbone.offload.using(0):
            for name, parameter in whole.model.named_parameters():
                assert torch.equal(backbone.model.get_parameter(name), parameter), name


def test_an_nf4_state_of_another_dtype_is_refused(plain: Path) -> None:
    path = quantised_models.make_nf4(plain, double=False, dtype=torch.bfloat16)
    tensors = quantised_models.load_file(path / "model.safetensors")
    name = f"{PROJECTION}.weight.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(tensors[name].tolist())) | {"dtype": "float64"}
    tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    quantised_models.save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"q_proj.weight with dtype = float64: supported is float32 or"):
        Backbone.load(path, Parallel.alone(torch.device("cpu")))


def test_experts_that_bitsandbytes_quantised_one_by_one_are_refused(tmp_path: Path) -> None:
    """As `transformers` 4 did: version 5 leaves them as they are."""
    section = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    section["llm_int8_skip_modules"] = ["self_attn"]
    path, _ = quantised_models.make_experts(tiny_models.make(tmp_path, "qwen3_moe"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    message = r"experts\.0\.\w+\.weight as I8: supported are F64, .* \(\d+ more tensors like it\)"
    with pytest.raises(UserError, match=message):
        read_backbone_info(path)
