"""What a layer of the engine keeps, by its structure: counted by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_mux.base_ops import BaseOpName
from megatron_mux.gpus import Gpu
from megatron_mux.memory.forms.architecture import Architecture
from megatron_mux.memory.forms.engine_layer import EngineLayer
from tests.unit.memory.architectures import gpt2, llama


def layer(architecture: Architecture, size: int = 2, **more: Any) -> EngineLayer:
    """A layer in sequences of 128 tokens."""
    return EngineLayer(architecture, size, 128, **more)


def of(architecture: Architecture, *inputs: BaseOpName, first: Any = None) -> float:
    """Bytes of a row."""
    found = layer(architecture)
    return found.bytes(found.kept(frozenset(inputs), first))


def test_an_input_is_kept_only_for_an_adapter() -> None:
    plain = of(llama())
    # Inputs of two norms, of the activation; q, k, v and the output of attention; log-sum-exp in fp32.
    assert plain == 2 * (2 * 256 + 2 * 704 + 2 * 256 + 2 * 128) + 4 * 8
    assert of(llama(), "linear_qkv") - plain == 2 * 256
    assert of(llama(), "linear_proj") == plain, "attention keeps its output anyway"
    assert of(llama(), "linear_fc2") - plain == 2 * 704


def test_below_the_first_adapter_nothing_is_kept() -> None:
    assert of(llama()) - of(llama(), first="linear_qkv") == 2 * 256, "the first norm's input"
    assert of(llama(), first="core_attention") == of(llama(), first="linear_qkv"), (
        "a prefix needs all of attention"
    )
    normed = replace(llama(), qk_norm=True)
    assert of(normed, first="core_attention") == of(llama(), first="linear_qkv"), "but no norm before it"
    above = of(llama(), first="linear_proj") - of(llama(), first="linear_fc1")
    assert above == 2 * 256, "the second norm's input"
    assert of(llama(), first="linear_fc1") == 2 * 2 * 704
    assert of(llama(), "linear_fc2", first="linear_fc2") == 2 * 704


@pytest.mark.parametrize(
    ("one", "qkv"),
    [
        (layer(llama()), 256 + 128 + 128),  # rotated queries and keys, values copied for the kernel
        (
            replace(layer(llama(), 4, device="cpu"), length=600),
            256 + 128 + 512,
        ),  # values as they lie in the product
        (
            layer(llama(), 4, device="cpu", prefixed=True),
            256 + 256,
        ),  # keys and values are copied behind the prefix
        (
            layer(replace(llama(), qk_norm=True)),
            512 + 512,
        ),  # and the product: the norms' inputs
        (layer(replace(llama(kv_heads=8), qk_norm=True)), 768 + 768),
        (layer(gpt2()), 768 + 256),  # the product, of which queries and keys are views; values are copied
        (layer(replace(gpt2(), kv_heads=4)), 512 + 128 + 256),  # queries that share keys are copied, too
    ],
    ids=[
        "rotated",
        "rotated, on a CPU",
        "behind a prefix",
        "normalised",
        "normalised, one key each",
        "as they are",
        "shared",
    ],
)
def test_queries_keys_and_values(one: EngineLayer, qkv: int) -> None:
    names = {"queries", "keys", "values", "product of linear_qkv", "queries before their norm"}
    names |= {"copied keys and values"}
    assert sum(row.width for row in one.kept() if row.what in names) == qkv


def test_short_attention_keeps_padded_tensors_and_weights_of_pairs() -> None:
    one = replace(layer(llama(), 4, device="cpu"), length=10)
    kept = {row.what: row.width for row in one.kept()}
    assert "product of linear_qkv" not in kept and "log-sum-exp" not in kept
    assert kept["padded queries, keys and values"] == (256 + 2 * 128) * 16 / 10
    assert kept["attention's weights"] == 8 * 16 * 16 / 10


@pytest.mark.parametrize(("size", "gpu"), [(4, Gpu()), (4, Gpu((7, 5), False)), (2, Gpu((7, 5), False))])
def test_keys_are_copied_for_every_head_where_the_kernel_shares_none(size: int, gpu: Gpu) -> None:
    kept = {row.what: row.width for row in layer(llama(), size, gpu=gpu).kept()}
    assert kept["keys and values of every head"] == 2 * 256 and kept["queries"] == 256
    assert kept["log-sum-exp"] == 8 and "attention's weights" not in kept
    assert not {"keys", "values", "product of linear_qkv"} & set(kept)
    own = {row.what for row in layer(llama(kv_heads=8), size, gpu=gpu).kept()}
    assert "log-sum-exp" in own and "keys and values of every head" not in own


def test_a_gpu_without_a_kernel_keeps_the_weights_of_attention() -> None:
    """In fp64 PyTorch multiplies all pairs of tokens."""
    kept = {row.what: row.width for row in layer(llama(), 8).kept()}
    assert kept["queries, and keys and values of every head"] == 3 * 256
    assert kept["attention's weights"] == 8 * 128
    assert not {"queries", "keys", "values", "product of linear_qkv", "log-sum-exp"} & set(kept)


def test_norms() -> None:
    statistics = {one.what: one.width for one in layer(gpt2()).kept() if "statistics" in one.what}
    assert set(statistics.values()) == {0}, "kernels of our own compute them again"
    elsewhere = {one.what: one.width for one in layer(gpt2(), 8).kept() if "statistics" in one.what}
    assert set(elsewhere.values()) == {2}, "of a LayerNorm, mean and deviation"
    more = of(replace(llama(), output_norms=True)) - of(llama())
    assert more == 2 * 2 * 256, "inputs of two norms more"
    many = llama(kv_heads=8)
    heads = of(replace(many, qk_norm=True)) - of(many)
    assert heads == 2 * 3 * 256, "the product, in which their norms' inputs lie"


def test_activations() -> None:
    def inside(architecture: Architecture, size: int = 2) -> float:
        found = layer(architecture, size)
        return found.bytes(found.kept(first="linear_fc1"))

    assert inside(gpt2()) == 2 * 1024 and inside(llama()) == 2 * 2 * 704, "its input alone"
    assert inside(replace(llama(), activation="gelu_pytorch_tanh")) == 2 * 2 * 704
    assert inside(replace(llama(), activation="relu")) == 2 * 2 * 704
    assert inside(replace(gpt2(), activation="quick_gelu")) == 2 * 1024
    assert inside(replace(llama(), activation="relu"), 8) == 8 * 3 * 704, "by torch, and the activated half"
    assert inside(replace(gpt2(), activation="quick_gelu"), 8) == 8 * 2 * 1024, "and the sigmoid"


def test_relu_and_an_adapter_keep_the_same_output() -> None:
    relu = gpt2(activation="relu")
    assert of(relu, "linear_fc2") == of(relu) == of(gpt2())
    assert of(gpt2(), "linear_fc2") - of(gpt2()) == 2 * 1024
    assert of(relu, "linear_fc2", first="linear_fc2") == 2 * 1024, "no ReLU goes backward there"


def test_ranks_divide_columns_always_and_rows_with_sequence_parallelism() -> None:
    def rank(tensor: int, sequence_parallel: bool) -> float:
        return layer(llama(), tensor=tensor, sequence_parallel=sequence_parallel).bytes(saved)

    saved = layer(llama()).kept(inputs=frozenset({"linear_qkv"}))
    whole, rows, columns = (
        sum(s.width * (s.size or 2) for s in saved if s.where == where)
        for where in ("all", "rows", "columns")
    )
    assert rank(4, False) == whole + rows + columns / 4
    assert rank(4, True) == whole + (rows + columns) / 4


def test_a_layer_goes_backward() -> None:
    """Gradients of hidden states; of the MLP, where half of a gated one is made again; of attention, the MLP gone."""
    one, other = (layer(model, 4, device="cpu") for model in (llama(), gpt2()))
    assert one.bytes(one.mlp_backward()) == 4 * (256 + 4 * 704)
    assert other.bytes(other.mlp_backward()) == 4 * (256 + 2 * 1024)
    assert one.bytes(one.linear_fc2_backward()) == 4 * (256 + 704)
    assert one.bytes(one.attention_backward()) == 4 * (2 * 256 + 3 * 256 + 2 * 128 - 2 * 704)
