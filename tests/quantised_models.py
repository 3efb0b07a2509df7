"""Small Llamas whose weights other programs have quantised; inputs and tensor-parallel shards are multiples of 64."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file as load_file
from safetensors.torch import save_file as save_file
from torch import nn

from megatron_mux.backbone.checkpoint import Checkpoint

VOCABULARY = 96
CONFIG: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def make_plain(directory: Path) -> Path:
    """A Llama in fp32, with weights of everyday size."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.08)
    model.save_pretrained(directory / "plain")
    return directory / "plain"


def make_gpt2(directory: Path) -> Path:
    """A GPT-2 of one layer in fp32: its weights are stored transposed."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(6)
    sizes: dict[str, Any] = {
        "n_embd": 64,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 32,
        "vocab_size": VOCABULARY,
    }
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))
    model.save_pretrained(directory / "gpt2")
    return directory / "gpt2"


def make_experts(plain: Path) -> tuple[Path, Path]:
    """A backbone whose routed experts are INT8, and the same with their values in fp32."""
    tensors = load_file(plain / "model.safetensors")
    codes = dict(tensors)
    for name in (name for name in tensors if ".experts." in name):
        scale = tensors[name].abs().amax(dim=1, keepdim=True) / 127
        codes[name] = (tensors[name] / scale).round().to(torch.int8)
        codes[name.replace("weight", "weight_scale")] = scale
        tensors[name] = codes[name] * scale
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    section = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["re:.*experts.*"], "weights": weights}},
    }
    return _save(plain, "int8-experts", codes, section), _save(plain, "experts", tensors)


def bitsandbytes_config(double: bool = True) -> Any:
    """What a QLoRA script asks for, computed in fp32."""
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.float32,
    )


def make_nf4(plain: Path, double: bool, dtype: torch.dtype = torch.float32) -> Path:
    """As `transformers` with bitsandbytes saves it."""
    from transformers import AutoModelForCausalLM

    path = plain.parent / f"nf4-{'double' if double else 'single'}-{dtype}"
    model = AutoModelForCausalLM.from_pretrained(
        plain, dtype=dtype, quantization_config=bitsandbytes_config(double)
    )
    model.save_pretrained(path)
    return path


def make_torchao(plain: Path, method: str) -> Path:
    """As `transformers` with torchao saves it: `int8` or `fp8`, weights only."""
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig
    from transformers import AutoModelForCausalLM, TorchAoConfig

    asked = Int8WeightOnlyConfig(version=2) if method == "int8" else Float8WeightOnlyConfig()
    model = AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, quantization_config=TorchAoConfig(asked)
    )
    path = plain.parent / f"torchao-{method}"
    model.save_pretrained(path)
    return path


def make_compressed_tensors(plain: Path, method: str, strategy: str) -> Path:
    """As compressed-tensors lays it out; its own functions quantise."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    groups: dict[str, dict[str, Any]] = {"group": {"group_size": 64}, "block": {"block_structure": [64, 128]}}
    arguments = QuantizationArgs(
        num_bits=8,
        type="int" if method == "int8" else "float",
        strategy=QuantizationStrategy(strategy),
        symmetric=True,
        **groups.get(strategy, {}),
    )

    form = "pack-quantized" if method == "int8" else "naive-quantized"

    def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, columns = weight.shape
        if strategy == "tensor":
            blocks = weight.view(1, 1, -1)
        elif strategy == "block":
            blocks = weight.view(rows // 64, 64, columns // 128, 128).transpose(1, 2).flatten(2)
        else:
            blocks = weight.view(rows, columns // 64 if strategy == "group" else 1, -1)
        scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), arguments)
        scale, zero = (one.view(-1) if strategy == "tensor" else one for one in (scale, zero))
        return quantize(weight, scale, zero, arguments, dtype=arguments.pytorch_dtype()), scale

    tensors = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if "proj" not in name or "layers.0.self_attn.o_proj" in name:
            tensors[name] = tensor
            continue
        tensors[name], tensors[f"{name}_scale"] = quantised(tensor)
        if method == "int8":  # four to a word
            tensors[f"{name}_packed"] = pack_to_int32(tensors.pop(name), 8)
            tensors[f"{name}_shape"] = torch.tensor(tensor.shape)
    section = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*layers.0.self_attn.o_proj"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": arguments.model_dump(mode="json")}},
    }
    return _save(plain, f"compressed-{method}-{strategy}", tensors, section)


def make_blocks(plain: Path) -> Path:
    """In the layout of DeepSeek-V3: FP8 with a scale for each block of 128 by 128."""
    tensors = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if "proj" not in name:
            tensors[name] = tensor
            continue
        rows, columns = (-(-size // 128) for size in tensor.shape)
        padded = nn.functional.pad(
            tensor, (0, columns * 128 - tensor.shape[1], 0, rows * 128 - tensor.shape[0])
        )
        blocks = padded.view(rows, 128, columns, 128).transpose(1, 2)
        scale = blocks.abs().amax(dim=(2, 3)) / 448
        codes = (blocks / scale[:, :, None, None]).transpose(1, 2).reshape(padded.shape)
        tensors[name] = codes[: tensor.shape[0], : tensor.shape[1]].contiguous().to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
    section = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
    }
    return _save(plain, "fp8-blocks", tensors, section)


def _save(
    plain: Path, name: str, tensors: dict[str, torch.Tensor], section: dict[str, Any] | None = None
) -> Path:
    path = plain.parent / name
    path.mkdir()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    return path


def held_bytes(stages: Any) -> int:
    """Bytes that a rank's weights take between uses, wherever they are; tied ones count once."""
    found = {}
    for stage in stages:
        for parameter in stage.model.parameters():
            storage = parameter.untyped_storage()
            found[storage._cdata] = storage.nbytes()
        for group in stage.offload.groups.values():
            held = (
                []
                if group.dequantised is None
                else [t for m in group.dequantised.matrices for t in m.tensors]
            )
            for tensor in [*held, *([] if group.fetched is None else [group.fetched.share])]:
                found[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(found.values())


def predicted_bytes(stages: Any, size: int, sharded: bool = False) -> float:
    """The same by the sizes of the architecture's counts, of the rank's stages."""
    from megatron_mux.memory.forms import stages as forms
    from megatron_mux.memory.forms.architecture import architecture_of
    from megatron_mux.memory.forms.method import ParallelConfig

    shape, parallel = stages[0].shape, stages[0].parallel
    method = ParallelConfig(parallel.dp_size, parallel.tp_size, parallel.pp_size, zero=3 if sharded else 0)
    own = forms.stages(architecture_of(shape), method)[parallel.pp_rank]
    held = dataclasses.replace(own, counts=tuple(part.bytes(size) for part in own.counts))
    return float(held.divided(method) if sharded else held.values)


def dequantised(plain: Path, backbone: Any, directory: Path) -> Path:
    """The same model, unquantised, with the values of a quantised one that was made of it."""
    from megatron_mux.backbone.quantised_source import QuantisedSource
    from megatron_mux.backbone.resolve import quantised_weights

    tensors, transposed = load_file(plain / "model.safetensors"), backbone.shape.names.transposed
    with Checkpoint(plain) as checkpoint:
        how = backbone.shape.quantisation
        source = QuantisedSource(checkpoint, backbone.info.stored, how, torch.float32, on_gpu=False)
        for name, size in quantised_weights(backbone.shape).items():
            values = source.matrix(name, size, transposed).values(torch.float32)
            tensors[name] = values.t().contiguous() if transposed else values
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text((plain / "config.json").read_text())
    return directory
