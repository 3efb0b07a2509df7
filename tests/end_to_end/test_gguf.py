"""A GGUF adapter holds, in the order of llama.cpp's weights, what the adapter adds in `peft`; llama.cpp loads it."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.end_to_end.conftest import PathOf
from tests.end_to_end.families import lora, vera
from tests.reference import peft_solo
from tools import export_gguf

Array = NDArray[np.float32]

_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "llama",
        lora(
            "all-linear",
            4,
            use_rslora=True,
            lora_alpha=3,
            rank_pattern={"k_proj": 2},
            alpha_pattern={"o_proj": 7},
        ),
    ),
    "untied embedding and head": ("llama", lora(["embed_tokens", "lm_head", "q_proj"], 4)),
    "vera": ("llama-one-kv-head", vera("all-linear", 6)),
    "gpt2": ("gpt2", lora(["c_attn", "attn.c_proj", "mlp.c_proj"], 4)),
    "experts": ("qwen3_moe", lora(["k_proj"], 3, target_parameters=_EXPERTS, alpha_pattern={"down_proj": 2})),
}


ARCHITECTURES = {"llama": "LLAMA", "llama-one-kv-head": "LLAMA", "gpt2": "GPT2", "qwen3_moe": "QWEN3MOE"}


def undo_rotary_order(weight: Array, heads: int) -> Array:
    """Rows of each head from llama.cpp's pairs of neighbours back to transformers' two halves."""
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def saved(backbone: Path, section: dict[str, Any], directory: Path) -> Any:
    """An adapter that does something, as peft saves it, on its backbone."""
    initial = peft_solo.random_adapter(backbone, section, seed=3)
    model: Any = peft_solo.load_model(backbone)
    for key in initial:
        if ".base_layer.weight" in key:  # peft stores the embedding as it is
            name = key.removeprefix("base_model.model.").replace(".base_layer", "")
            initial[key] = model.get_parameter(name).data.clone()
    model = peft_solo.wrap(model, section, initial)
    model.save_pretrained(directory)
    return model


def export(backbone: Path, adapter: Path, output: Path, *more: str) -> int:
    words = ["--backbone", str(backbone), "--adapter", str(adapter), "--output", str(output)]
    return export_gguf.main([*words, *more])


def updates(path: Path) -> dict[str, Array]:
    """What llama.cpp adds to each weight, `[out, in]`, by its name."""
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.type"] == "adapter" and fields["adapter.type"] == "lora"
    tensors = {tensor.name: np.asarray(tensor.data, dtype=np.float32) for tensor in reader.tensors}
    found = {}
    for name in {name.rpartition(".")[0] for name in tensors}:
        a, b = tensors[f"{name}.lora_a"], tensors[f"{name}.lora_b"]
        # The rank is the inner dimension of B; an embedding's A is read row by row.
        product = b @ (a.T if name.startswith("token_embd") else a)
        found[name] = product * (fields["adapter.lora.alpha"] / b.shape[-1])
    return found


def expected(backbone: Path, model: Any) -> dict[str, Array]:
    """The same, of what peft merges into the weights, by transformers' name."""
    bare = peft_solo.load_model(backbone).state_dict()
    merged = model.merge_and_unload().state_dict()
    return {
        name: (merged[name] - weight).numpy()
        for name, weight in bare.items()
        if not torch.equal(merged[name], weight)
    }


@pytest.mark.parametrize("case", CASES)
def test_a_file_holds_what_peft_adds(case: str, path_of: PathOf, tmp_path: Path) -> None:
    family, section = CASES[case]
    backbone = path_of(family)
    model = saved(backbone, section, tmp_path / "adapter")
    assert export(backbone, tmp_path / "adapter", tmp_path / "adapter.gguf") == 0
    config = json.loads((backbone / "config.json").read_text())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[ARCHITECTURES[family]], 4)
    found = updates(tmp_path / "adapter.gguf")
    wanted = expected(backbone, model)
    assert len(found) == len(wanted) + sum("gate_up_proj" in name for name in wanted)
    for name, update in wanted.items():
        if "gate_up_proj" in name:
            layer = name.split(".")[2]
            ours = np.concatenate(
                [found[f"blk.{layer}.ffn_{half}_exps.weight"] for half in ("gate", "up")], axis=1
            )
        else:
            ours = found[f"{names.get_name(name.removesuffix('.weight'))}.weight"]
        if family == "gpt2":
            ours = ours.T
        if family.startswith("llama") and ".q_proj." in name:
            ours = undo_rotary_order(ours, config["num_attention_heads"])
        if family.startswith("llama") and ".k_proj." in name:
            ours = undo_rotary_order(ours, config["num_key_value_heads"])
        if name.endswith("embed_tokens.weight"):
            ours = ours.T
        np.testing.assert_allclose(ours, update, rtol=0, atol=2e-6, err_msg=name)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no architecture": ("opt", lora(["q_proj"], 2), "no architecture for a opt"),
    "dora": ("llama", lora(["q_proj"], 2, use_dora=True), "not DoRA: merge the adapter instead"),
    "saved module": (
        "llama",
        lora(["q_proj"], 2, modules_to_save=["lm_head"]),
        "not base_model.model.lm_head.weight",
    ),
    "other kind": (
        "llama",
        {"peft_type": "IA3", "target_modules": ["k_proj"], "feedforward_modules": []},
        "not IA3",
    ),
    "tied": ("qwen3", lora(["embed_tokens"], 2), "which llama.cpp holds once"),
    "latent attention": ("deepseek_v2", lora(["kv_a_proj_with_mqa"], 2), "cannot be adapted in llama.cpp"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_llama_cpp_cannot_apply_is_refused(
    case: str, path_of: PathOf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family, section, message = REFUSED[case]
    saved(path_of(family), section, tmp_path / "adapter")
    assert export(path_of(family), tmp_path / "adapter", tmp_path / "adapter.gguf") == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("*.gguf"))


def test_llama_cpp_computes_as_peft(path_of: PathOf, tmp_path: Path) -> None:
    """Runs where llama-cpp-python is installed."""
    pytest.importorskip("llama_cpp")
    backbone = path_of("llama")
    model = saved(backbone, CASES["llama"][1], tmp_path / "adapter")
    write_backbone(backbone, tmp_path / "backbone.gguf")
    ids = torch.randint(3, 90, (20,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = model(input_ids=ids[None], use_cache=False).logits[0]
        bare = peft_solo.load_model(backbone)(input_ids=ids[None], use_cache=False).logits[0]
    assert float((wanted - bare).abs().max()) > 0.1
    for outtype, tolerance in (("f32", 1e-4), ("f16", 1e-2)):
        adapter = tmp_path / f"{outtype}.gguf"
        assert export(backbone, tmp_path / "adapter", adapter, "--outtype", outtype) == 0
        found = in_llama_cpp(tmp_path / "backbone.gguf", adapter, ids)
        assert float((found - wanted).abs().max()) <= tolerance


def write_backbone(source: Path, target: Path) -> None:
    """A Llama backbone in fp32 as GGUF, without a vocabulary."""
    config = json.loads((source / "config.json").read_text())
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads["q_proj"])
    writer.add_head_count_kv(heads["k_proj"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads["q_proj"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    for name, weight in peft_solo.load_model(source).state_dict().items():
        module = name.split(".")[-2]
        values = weight.numpy()
        if module in heads:  # the inverse of what undoes it
            order = undo_rotary_order(np.arange(len(values), dtype=np.float32)[:, None], heads[module])
            values = values[np.argsort(order[:, 0])]
        writer.add_tensor(
            f"{names.get_name(name.removesuffix('.weight'))}.weight", np.ascontiguousarray(values)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def in_llama_cpp(backbone: Path, adapter: Path, ids: Tensor) -> Tensor:
    """Logits of a sequence."""
    import llama_cpp as lib

    model = lib.llama_model_load_from_file(str(backbone).encode(), lib.llama_model_default_params())
    settings = lib.llama_context_default_params()
    settings.n_ctx, settings.type_k, settings.type_v, settings.flash_attn_type = 64, 0, 0, 0
    context = lib.llama_init_from_model(model, settings)
    loaded = lib.llama_adapter_lora_init(model, str(adapter).encode())
    assert loaded, "llama.cpp does not load the adapter"
    one = (lib.llama_adapter_lora_p_ctypes * 1)(loaded), 1, (ctypes.c_float * 1)(1.0)
    assert lib.llama_set_adapters_lora(context, *one) == 0
    batch = lib.llama_batch_init(64, 0, 1)
    batch.n_tokens = len(ids)
    for place, token in enumerate(ids.tolist()):
        batch.token[place], batch.pos[place], batch.logits[place] = token, place, 1
        batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
    assert lib.llama_decode(context, batch) == 0
    width = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    found = np.ctypeslib.as_array(lib.llama_get_logits(context), shape=(len(ids), width))
    return torch.from_numpy(found.copy())
