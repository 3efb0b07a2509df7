"""Which modules a task targets: peft's rules, and words for what matches nothing."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils import constants
from transformers.pytorch_utils import Conv1D

from megatron_mux.adapters.targets import (
    check_bottleneck,
    default_feedforward,
    default_targets,
    match_feedforward,
    match_targets,
    module_shape,
    targets_of,
)
from megatron_mux.errors import UserError
from tests.tiny_models import build
from tests.unit.adapters.toy import sizes, task

LLAMA = [
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
]
PATHS = [f"model.layers.{i}.{name}" for i in range(12) for name in LLAMA]
OF_GPT2 = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
GPT2 = [f"transformer.h.{i}.{name}" for i in range(2) for name in OF_GPT2]


@pytest.mark.parametrize(
    "targets",
    [
        ["q_proj", "v_proj"],
        ["self_attn.o_proj"],
        ["1.mlp.up_proj"],
        ["model.layers.11.self_attn.k_proj"],
        r".*\.[13]\.mlp\..*_proj",
    ],
)
def test_matches_as_peft_does(targets: str | list[str]) -> None:
    config = LoraConfig(target_modules=targets)
    assert match_targets(targets, PATHS) == [
        path for path in PATHS if check_target_module_exists(config, path)
    ]
    assert match_targets(targets, PATHS)


def test_all_linear_is_everything() -> None:
    assert match_targets("all-linear", PATHS) == PATHS == match_targets("All-Linear", PATHS)


@pytest.mark.parametrize("targets", [["q_proj", "query"], "query", "(", ["proj"], ["lm_head"]])
def test_unknown_targets_are_refused_with_what_there_is(targets: str | list[str]) -> None:
    with pytest.raises(UserError) as error:
        match_targets(targets, PATHS)
    text = str(error.value)
    assert "target_modules" in text and (targets == "(" or "q_proj, k_proj, v_proj, o_proj" in text)


def test_feedforward_matches_without_a_dot_as_peft_does() -> None:
    assert match_feedforward(["c_proj"], GPT2) == [path for path in GPT2 if path.endswith("c_proj")]
    assert match_feedforward(["mlp.c_proj"], GPT2) == [path for path in GPT2 if path.endswith("mlp.c_proj")]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gpt2", "gpt_neo", "opt"])
def test_defaults_are_pefts(family: str) -> None:
    assert (
        default_targets("LORA", family)
        == constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING[family]
    )
    assert (
        default_targets("IA3", family) == constants.TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING[family]
    )
    assert (
        default_feedforward(family)
        == constants.TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING[family]
    )
    assert targets_of(task("t", peft_type="LORA", target_modules=None).adapter, family)


def test_bottlenecks_follow_sublayers() -> None:
    check_bottleneck(match_targets(["o_proj", "down_proj"], PATHS))
    with pytest.raises(UserError, match="not q_proj, up_proj"):
        check_bottleneck(match_targets(["q_proj", "o_proj", "up_proj"], PATHS))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "gpt_neo", "opt"])
def test_module_shapes_are_those_of_transformers(name: str) -> None:
    model = build(name)
    config = model.config
    heads = config.num_attention_heads
    shape = sizes(
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", heads),
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        hidden=config.hidden_size,
        ffn=next(v for k in ("ffn_dim", "intermediate_size", "n_inner") if (v := getattr(config, k, None)))
        if name not in ("gpt2", "gpt_neo")
        else 4 * config.hidden_size,
    )
    seen = 0
    linear = (torch.nn.Linear, Conv1D)
    for path, module in model.named_modules():
        if not isinstance(module, linear) or "lm_head" in path:
            continue
        rows, columns = module.weight.shape
        assert module_shape(path, shape) == ((columns, rows) if name == "gpt2" else (rows, columns)), path
        seen += 1
    assert seen >= 16
