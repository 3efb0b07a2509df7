"""Which modules a task targets: peft's rules, and words for what matches nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils import constants
from transformers.pytorch_utils import Conv1D

from megatron_mux.adapters.targets import (
    check_bottleneck,
    feedforward_of,
    match_feedforward,
    match_targets,
    targets_of,
)
from megatron_mux.backbone import BackboneShape, read_shape
from megatron_mux.backbone.registry import FAMILIES
from megatron_mux.errors import UserError
from tests.tiny_models import build, config
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


def shape_of(name: str, directory: Path) -> BackboneShape:
    config(name).save_pretrained(directory)
    return read_shape(directory)


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_pefts(family: str, tmp_path: Path) -> None:
    shape = shape_of(family, tmp_path)
    tables = (
        constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING,
        constants.TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING,
        constants.TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING,
    )
    ia3 = task("t", peft_type="IA3", target_modules=None, feedforward_modules=None).adapter
    lora = task("t", peft_type="LORA", target_modules=None).adapter
    found = [targets_of(lora, shape), targets_of(ia3, shape), feedforward_of(ia3, shape)]
    for names, table in zip(found, tables, strict=True):
        assert match_targets(names, shape.module_paths)
        assert names == table.get(family, names)  # peft knows no defaults for some families
    bottleneck = task("t", peft_type="BOTTLENECK", target_modules=None).adapter
    check_bottleneck(match_targets(targets_of(bottleneck, shape), shape.module_paths), shape)


def test_bottlenecks_follow_sublayers() -> None:
    check_bottleneck(match_targets(["o_proj", "down_proj"], PATHS), sizes())
    with pytest.raises(UserError, match=r"not q_proj, up_proj.*self_attn.o_proj, mlp.down_proj"):
        check_bottleneck(match_targets(["q_proj", "o_proj", "up_proj"], PATHS), sizes())


@pytest.mark.parametrize("name", FAMILIES)
def test_module_shapes_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    shape, model = shape_of(name, tmp_path), build(name)
    seen = []
    for path, module in model.named_modules():
        if isinstance(module, (torch.nn.Linear, Conv1D)) and "lm_head" not in path:
            size = tuple(module.weight.shape)
            assert shape.module_shape(path) == (size[::-1] if shape.transposed else size), path
            assert shape.transposed == isinstance(module, Conv1D)
            seen.append(path)
    assert sorted(seen) == sorted(shape.module_paths)
