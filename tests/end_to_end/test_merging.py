"""A merged model gives, in `transformers` alone, the logits of its backbone with the adapter in `peft`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from megatron_mux.merging.merge import merge
from tests import quantised_models
from tests.end_to_end.conftest import PathOf
from tests.end_to_end.families import FAMILIES, diff_pruning, ia3, loha, lora, vera
from tests.reference import peft_solo
from tools import merge_adapter

LOGITS = 5e-4  # largest absolute difference

_LLAMA, _GPT2 = FAMILIES["llama"], FAMILIES["gpt2"]
_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
_PATTERNS = {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {r"model.layers.[12].self_attn.q_proj": 3}}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "patterns": ("llama", lora(["q_proj", "v_proj", "down_proj"], 4, **_PATTERNS)),
    "dora": ("llama", lora(["k_proj", "up_proj"], 4, use_dora=True, use_rslora=True)),
    "bias": ("llama-biases", lora("all-linear", 3, lora_bias=True)),
    "transposed": ("gpt2", lora(["c_attn", "c_fc"], 4, use_rslora=True)),
    "dora-transposed": ("gpt2", lora(["c_attn", "mlp.c_proj"], 4, use_dora=True)),
    "vera": ("llama", vera("all-linear", 6)),
    "vera-drawn": ("gpt2", vera(_GPT2.mixed, 5, save_projection=False, projection_prng_key=9)),
    "loha": ("llama", loha("all-linear", 3, **_PATTERNS)),
    "ia3": ("gpt2", ia3(_GPT2)),
    "ia3-no-bias": ("qwen3", ia3(_LLAMA)),
    "head": ("llama", lora(["q_proj"], 4, modules_to_save=["lm_head", "norm"])),
    "head-untied": ("qwen3", lora(["q_proj"], 4, modules_to_save=["lm_head"])),
    "embedding-untied": ("qwen3", lora(["q_proj", "embed_tokens"], 4)),
    "saved-embedding-untied": ("llama-tied", lora(["q_proj"], 4, modules_to_save=["embed_tokens"])),
    "saved-embedding-and-head": (
        "qwen3",
        lora(["q_proj"], 4, modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    ),
    "embedding-and-head": ("llama-tied", lora(["q_proj", "embed_tokens"], 4, ensure_weight_tying=True)),
    "tokens-of-head-untied": ("qwen3", lora(["o_proj"], 4, trainable_token_indices={"lm_head": [9, 1]})),
    "tokens-of-both-untied": (
        "qwen3",
        lora(["o_proj"], 4, trainable_token_indices={"embed_tokens": [3], "lm_head": [9, 1]}),
    ),
    "tokens": ("qwen3", lora(["o_proj"], 4, trainable_token_indices=[3, 50, 7])),
    "tokens-of-head": (
        "llama",
        lora(["o_proj"], 4, trainable_token_indices={"embed_tokens": [3, 9], "lm_head": [9, 1]}),
    ),
    "experts": ("qwen3_moe", lora(["v_proj"], 3, target_parameters=_EXPERTS, alpha_pattern={"down_proj": 2})),
    "experts-of-mixtral": ("mixtral", lora(["q_proj"], 2, target_parameters=_EXPERTS[1:])),
    "shared-experts": (
        "deepseek_v3",
        lora(
            ["kv_b_proj", "q_a_proj"],
            3,
            target_parameters=["gate_up_proj", "shared_experts.down_proj.weight"],
        ),
    ),
}


def logits(model: nn.Module) -> Tensor:
    """Of a few random tokens."""
    ids = torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found: Tensor = model(input_ids=ids, use_cache=False).logits
    return found


def largest(difference: Tensor) -> float:
    return float(difference.abs().max())


def load(path: Path) -> nn.Module:
    """The merged model; nothing may be missing or left over."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, dtype=torch.float32)
    model, about = loaded
    assert not about["missing_keys"] and not about["unexpected_keys"] and not about["mismatched_keys"]
    made: nn.Module = model.eval()
    return made


def saved(backbone: Path, section: dict[str, Any], directory: Path) -> tuple[nn.Module, Tensor]:
    """An adapter that does something, as peft saves it: its model, and the backbone's logits without it."""
    bare = logits(peft_solo.load_model(backbone))
    initial = peft_solo.random_adapter(backbone, section, seed=3)
    model = peft_solo.wrap(peft_solo.load_model(backbone), section, initial)
    model.save_pretrained(directory)  # type: ignore[operator]
    return model, bare


@pytest.mark.parametrize("case", CASES)
def test_a_merged_model_is_backbone_and_adapter(case: str, path_of: PathOf, tmp_path: Path) -> None:
    family, section = CASES[case]
    backbone = path_of(family)
    model, bare = saved(backbone, section, tmp_path / "adapter")
    wanted = logits(model)
    assert largest(wanted - bare) > 10 * LOGITS, "the adapter does too little to tell"
    merged = merge(backbone, tmp_path / "adapter", tmp_path / "merged")
    assert merged.untied == ("untied" in case)
    assert largest(logits(load(tmp_path / "merged")) - wanted) <= LOGITS


def test_a_pruned_difference_is_added(path_of: PathOf, tmp_path: Path) -> None:
    section = diff_pruning(["c_attn", "mlp.c_proj"])
    (tmp_path / "adapter_config.json").write_text(json.dumps(section))
    model = peft_solo.load_model(path_of("gpt2"))
    tensors = {}
    generator = torch.Generator().manual_seed(2)
    for name, module in model.named_modules():
        if name.endswith(("c_attn", "mlp.c_proj")):
            stored: Any = module.weight  # [in, out]
            difference, mask = (torch.randn(stored.t().shape, generator=generator) for _ in range(2))
            tensors[f"base_model.model.{name}.diff.weight"] = difference * 0.1
            tensors[f"base_model.model.{name}.diff.log_alpha"] = mask
            stored.data += (difference * 0.1 * (3 * mask.sigmoid() - 1.5).clamp(0, 1)).t()
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    merge(path_of("gpt2"), tmp_path, tmp_path / "merged")
    assert largest(logits(load(tmp_path / "merged")) - logits(model)) <= 1e-5


@pytest.mark.parametrize("form", ["nf4", "int8", "nf4 on load"])
def test_a_quantised_backbone_is_dequantised(form: str, tmp_path: Path) -> None:
    plain = quantised_models.make_plain(tmp_path)
    how: dict[str, Any] = {}
    if form == "nf4 on load":
        backbone, how = plain, {"quantization_config": quantised_models.bitsandbytes_config()}
    elif form == "nf4":
        backbone = quantised_models.make_nf4(plain, double=True)
    else:
        backbone = quantised_models.make_torchao(plain, "int8")
    model, _ = saved(plain, lora("all-linear", 4), tmp_path / "adapter")
    bare: Any = AutoModelForCausalLM.from_pretrained(
        backbone, dtype=torch.float32, local_files_only=True, **how
    )
    # In eval(), bitsandbytes computes otherwise on a CPU.
    wanted = logits(PeftModel.from_pretrained(bare, tmp_path / "adapter").train())
    words = ["--backbone", backbone, "--adapter", tmp_path / "adapter", "--output", tmp_path / "merged"]
    words += ["--backbone-dtype", "nf4"] if how else []
    assert merge_adapter.main([str(word) for word in words]) == 0
    assert "quantization_config" not in json.loads((tmp_path / "merged/config.json").read_text())
    assert largest(logits(load(tmp_path / "merged")) - wanted) <= LOGITS
    assert largest(logits(model) - wanted) > 10 * LOGITS, "quantisation does too little to tell"


def test_the_tool_writes_shards_in_another_dtype(
    path_of: PathOf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, _ = saved(path_of("llama-tied"), lora(["q_proj"], 4), tmp_path / "adapter")
    words = ["--backbone", str(path_of("llama-tied")), "--adapter", str(tmp_path / "adapter")]
    words += ["--output", str(tmp_path / "merged"), "--max-shard-size", "20KB"]
    assert merge_adapter.main([*words, "--dtype", "bfloat16", "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    files = sorted(tmp_path.glob("merged/*.safetensors"))
    assert about["files"] == len(files) > 2
    assert about["changed"] == 4 and not about["untied"]
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert about["size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert "lm_head.weight" not in tensors
    config = json.loads((tmp_path / "merged/config.json").read_text())
    assert config["dtype"] == "bfloat16" and config["tie_word_embeddings"]
    # As peft merges and rounds.
    wanted = model.merge_and_unload().state_dict()  # type: ignore[operator]
    for name, tensor in tensors.items():
        assert torch.equal(tensor, wanted[name].bfloat16()), name
    # A second run would overwrite.
    assert merge_adapter.main(words) == 2
    assert "exists already" in capsys.readouterr().err
