"""Which modules a task targets: peft's rules, and words for what matches nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils import constants
from peft.utils.other import get_pattern_key
from transformers.pytorch_utils import Conv1D

from megatron_mux.adapters.bottleneck import BottleneckSpec
from megatron_mux.adapters.diff_pruning import DiffPruningSpec
from megatron_mux.adapters.ia3 import IA3Spec
from megatron_mux.adapters.lora import LoraSpec
from megatron_mux.adapters.prefix import PrefixTuningSpec
from megatron_mux.adapters.selection import check_matched, value_of
from megatron_mux.adapters.targets import match_targets
from megatron_mux.backbone.registry import FAMILIES, read_shape
from megatron_mux.errors import UserError
from megatron_mux.shape import BackboneShape, Module
from tests.tiny_models import build, config

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
MODULES = [Module(path, 0, "linear_qkv", 1, 1) for path in PATHS]
ShapeOf = Callable[[str], BackboneShape]


def matched(targets: str | list[str]) -> list[str]:
    return [module.path for module in match_targets(targets, MODULES)]


@pytest.fixture(scope="module")
def shape_of(tmp_path_factory: pytest.TempPathFactory) -> ShapeOf:
    def read(name: str) -> BackboneShape:
        where = tmp_path_factory.mktemp(name)
        config(name).save_pretrained(where)
        return read_shape(where)

    return lru_cache(read)


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
    theirs = LoraConfig(target_modules=targets)
    assert matched(targets) == [path for path in PATHS if check_target_module_exists(theirs, path)]
    assert matched(targets)


def test_all_linear_is_everything() -> None:
    assert matched("all-linear") == PATHS == matched("All-Linear")


@pytest.mark.parametrize("targets", [["q_proj", "query"], "query", "(", ["proj"], ["lm_head"]])
def test_unknown_targets_are_refused_with_what_there_is(targets: str | list[str]) -> None:
    with pytest.raises(UserError) as error:
        match_targets(targets, MODULES)
    text = str(error.value)
    assert "target_modules" in text and (targets == "(" or "q_proj, k_proj, v_proj, o_proj" in text)


def test_feedforward_matches_without_a_dot_as_peft_does(shape_of: ShapeOf) -> None:
    shape = shape_of("gpt2")
    every = IA3Spec(peft_type="IA3", target_modules=["c_attn", "c_proj"], feedforward_modules=["c_proj"])
    mlp = IA3Spec(
        peft_type="IA3", target_modules=["c_attn", "mlp.c_proj"], feedforward_modules=["mlp.c_proj"]
    )
    for spec, count in ((every, 2), (mlp, 1)):
        scaled = spec.scales_input(spec.modules(shape), shape)
        assert len(scaled) == count * shape.layers
        assert all(module.path.endswith("c_proj") for module in scaled)


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_pefts(family: str, shape_of: ShapeOf) -> None:
    shape, own = shape_of(family), IA3Spec(peft_type="IA3")
    maps: Any = (
        constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING,
        constants.TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING,
        constants.TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING,
    )
    lora = LoraSpec(peft_type="LORA")
    found = (lora.targets(shape), own.targets(shape), own.config(shape)["feedforward_modules"])
    for names, table in zip(found, maps, strict=True):
        theirs = table.get(family, names)  # peft knows no defaults for some families
        if isinstance(theirs, list) and shape.experts is not None:
            theirs = [name for name in theirs if name != "w2"]  # of routed experts
        assert names == theirs
    for spec in (lora, own, BottleneckSpec(peft_type="BOTTLENECK")):
        assert spec.modules(shape)
    assert own.scales_input(own.modules(shape), shape) or shape.experts is not None


def test_bottlenecks_follow_sublayers(shape_of: ShapeOf) -> None:
    shape = shape_of("llama")
    BottleneckSpec(peft_type="BOTTLENECK", target_modules=["o_proj", "down_proj"]).modules(shape)
    with pytest.raises(UserError, match=r"not q_proj, up_proj.*self_attn.o_proj, mlp.down_proj"):
        BottleneckSpec(peft_type="BOTTLENECK", target_modules=["q_proj", "o_proj", "up_proj"]).modules(shape)


@pytest.mark.parametrize("family", FAMILIES)
def test_module_widths_are_those_of_transformers(family: str, shape_of: ShapeOf) -> None:
    shape, seen = shape_of(family), dict(build(family).named_modules())
    for module in shape.modules:
        if module.experts:  # a parameter that holds all of them
            parent, _, leaf = module.path.rpartition(".")
            assert getattr(seen[parent], leaf).shape[1:] == (module.out_features, module.in_features)
            continue
        weight = seen[module.path].weight
        rows, columns = reversed(weight.shape) if isinstance(seen[module.path], Conv1D) else weight.shape
        assert (module.out_features, module.in_features) == (rows, columns), module.path


def test_what_latent_attention_does_not_take_is_refused_by_name(shape_of: ShapeOf) -> None:
    shape = shape_of("deepseek_v3")
    with pytest.raises(UserError, match="PREFIX_TUNING does not know multi-head latent attention"):
        PrefixTuningSpec(peft_type="PREFIX_TUNING", num_virtual_tokens=3).modules(shape)
    with pytest.raises(UserError, match="kv_a_proj_with_mqa cannot be pruned"):
        DiffPruningSpec(peft_type="DIFF_PRUNING", target_modules=["kv_a_proj_with_mqa", "o_proj"]).modules(
            shape
        )


def test_saves_name_shared_experts_as_peft_wants_them(shape_of: ShapeOf) -> None:
    shape = shape_of("deepseek_v3")
    spec = LoraSpec(peft_type="LORA", target_modules=["o_proj", "shared_experts.up_proj"])
    config = spec.config(shape)
    assert config["target_parameters"] == [
        f"model.layers.{layer}.mlp.shared_experts.up_proj.weight" for layer in (1, 2, 3)
    ]
    again = LoraSpec(**{name: config[name] for name in ("peft_type", "target_modules", "target_parameters")})
    assert again.tensors(shape).keys() == spec.tensors(shape).keys()
    with pytest.raises(UserError, match="lora_dropout"):
        LoraSpec(peft_type="LORA", target_modules="all-linear", lora_dropout=0.1).modules(shape)
    everything = LoraSpec(peft_type="LORA", target_modules="all-linear").modules(shape)
    assert everything and not any(module.path.endswith("mlp.gate") for module in everything)


@pytest.mark.parametrize(
    "patterns",
    [
        ["q_proj", "model.layers.1.self_attn.q_proj"],
        ["model.layers.1.self_attn.q_proj", "q_proj", "proj"],
        ["1.mlp.up_proj", "layers.11.mlp.up_proj", "up.proj", "mlp.up.proj", "1.self.attn.q.proj"],
        ["model.layers.[0-4].*", "q_proj", ".*mlp.*"],
        ["o_proj|q_proj", "self_attn.(k|v)_proj", "...._proj", "_proj", "", "a-b"],
    ],
)
def test_patterns_name_the_modules_that_peft_matches(patterns: list[str]) -> None:
    values = {pattern: i for i, pattern in enumerate(patterns)}
    for path in PATHS:
        assert value_of(values, path, -1) == values.get(get_pattern_key(patterns, path), -1), path
    used = {get_pattern_key([pattern], path) for pattern in patterns for path in PATHS} & values.keys()
    for pattern in patterns:
        if pattern in used:
            check_matched("rank_pattern", {**dict.fromkeys(used, 1), pattern: 1}, MODULES)
        else:
            with pytest.raises(UserError, match="matches no module"):
                check_matched("rank_pattern", {**dict.fromkeys(used, 1), pattern: 1}, MODULES)
