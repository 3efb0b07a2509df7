"""Sizes and units of models, from their config.json."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_mux.backbone.registry import read_shape
from megatron_mux.memory.forms.architecture import ParamCounts, architecture_of
from megatron_mux.memory.forms.method import ParallelConfig, impossible
from megatron_mux.memory.forms.skeleton import read_architecture
from megatron_mux.memory.forms.stages import stages
from megatron_mux.memory.tensors import Skeleton
from tests import tiny_models
from tests.unit.memory.architectures import gpt2, llama
from tests.unit.memory.configs import PARAMETERS, write

MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": 1000,
    "num_attention_heads": 8, "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("facebook/opt-350m", (1024, 64, 16, 4096, False)),
        ("bigcode/gpt_bigcode-santacoder", (2048, 128, 1, 8192, False)),
        ("llama-7b", (4096, 128, 32, 11008, True)),
    ],
)
def test_sizes(model: Callable[[str], Skeleton], name: str, sizes: tuple[Any, ...]) -> None:
    a = read_architecture(model(name))
    found = (a.hidden, a.head_dim, a.kv_heads, a.ffn, a.gated)
    assert found == sizes and a.total == PARAMETERS[name]
    assert len(a.layers) == model(name).tensors.layers and len(set(a.layers)) == 1


def test_experts(tmp_path: Path) -> None:
    a = read_architecture(Skeleton(write(tmp_path, MIXTRAL)))
    assert (a.experts, a.experts_per_token, a.ffn, a.gated) == (8, 2, 512, True)
    assert a.layers[0].experts == 8 * 3 * 256 * 512
    one, four = (stages(a, ParallelConfig(data=4, expert=size))[0] for size in (1, 4))
    assert one.values - four.values == 3 * 6 * 3 * 256 * 512, "six of eight experts in each of three layers"
    assert one.divided(ParallelConfig(4)) == four.divided(ParallelConfig(4, expert=4)), (
        "four ranks have all of them between them"
    )


def test_every_parameter_is_somewhere_once() -> None:
    for architecture in (llama(5), gpt2(5)):
        for method in (ParallelConfig(), ParallelConfig(pipeline=5), ParallelConfig(pipeline=2)):
            own = stages(architecture, method)
            copies = architecture.tied and method.pipeline > 1
            extra = architecture.embedding.divided if copies else 0  # the output layer is on another stage
            assert sum(stage.values for stage in own) == architecture.total + extra
            assert [layer for stage in own for layer in stage.layers] == list(range(5))
    whole = stages(llama(2), ParallelConfig())[0].values
    half = stages(llama(2), ParallelConfig(tensor=2))[0].values
    assert half == (whole + 5 * 256) / 2, "norms are not divided"


def test_what_keeps_tensor_ranks_from_sharing_a_layer() -> None:
    assert "4TP" not in impossible(4, llama()) and "8TP" not in impossible(8, llama(kv_heads=2))
    assert "8 attention heads" in impossible(3, llama())["3TP"]
    assert "MLP of width 700" in impossible(8, llama(ffn=700))["8TP"]


NAMES = (
    "llama",
    "llama-tied",
    "llama-biases",
    "mistral",
    "qwen2",
    "qwen3",
    "gpt2",
    "gpt_neo",
    "opt",
    "starcoder2",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_backbone_s_is_the_one_that_is_read_from_the_model_of_transformers(
    name: str, tmp_path: Path
) -> None:
    tiny_models.make(tmp_path, name)
    found = architecture_of(read_shape(tmp_path / name))
    found = replace(found, rotary=False)  # not read from parameters
    wanted = read_architecture(Skeleton(tmp_path / name))
    if name == "opt":  # its final norm stands before the layers there
        norm = 2 * found.hidden
        behind = replace(wanted.embedding, copied=wanted.embedding.copied - norm)
        wanted = replace(wanted, embedding=behind, final=wanted.final + ParamCounts(copied=norm))
    assert found == wanted


@pytest.mark.parametrize("name", ["qwen3_moe-some", "deepseek_v2-groups", "deepseek_v3"])
def test_parameters_of_backbones_with_experts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    tiny_models.make(tmp_path, name)
    shape = read_shape(tmp_path / name)
    experts, found = shape.experts, architecture_of(shape)
    assert experts is not None
    layers = len(experts.layers(shape.layers))
    biases = layers * experts.count * experts.routing.bias  # a buffer there
    tensors = Skeleton(tmp_path / name).tensors.tensors
    assert found.total - biases == sum(math.prod(tensor.shape) for tensor in tensors)
    assert [layer.experts > 0 for layer in found.layers] == [
        shape.has_experts(i) for i in range(shape.layers)
    ]
