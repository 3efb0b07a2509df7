"""Flags for what is not run here, by Megatron's own parser and checks; and its own report of memory."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_mux.choice.engine_step import step_memory
from megatron_mux.choice.flags import megatron_flags
from megatron_mux.memory.forms.architecture import Architecture, ParamCounts
from megatron_mux.memory.forms.method import ParallelConfig, methods
from megatron_mux.memory.forms.recipe import Precision, Recipe
from megatron_mux.memory.optimizers import DEFAULT
from megatron_mux.memory.trace.case import Options
from tests.unit.memory.architectures import at_stage, gpt2, llama
from tests.unit.memory.profiles import by_hand, traced
from tests.unit.memory.traced import on_a_fake_gpu

USUAL = [
    "--num-layers", "8", "--hidden-size", "256", "--ffn-hidden-size", "704", "--num-attention-heads", "8",
    "--group-query-attention", "--num-query-groups", "4", "--max-position-embeddings", "128",
    "--tokenizer-type", "NullTokenizer", "--vocab-size", "1024", "--swiglu", "--normalization", "RMSNorm",
    "--disable-bias-linear", "--position-embedding-type", "rope", "--untie-embeddings-and-output-weights",
    "--train-iters", "1", "--lr", "1e-4", "--attention-backend", "unfused",
    # Fused kernels of transformer-engine and apex need not be here.
    "--transformer-impl", "local", "--no-masked-softmax-fusion", "--no-persist-layer-norm",
    "--no-gradient-accumulation-fusion", "--no-bias-swiglu-fusion", "--no-rope-fusion", "--no-bias-dropout-fusion",
]  # fmt: skip


@pytest.fixture(scope="module")
def training() -> Any:
    """Megatron-LM's arguments, where they are shipped."""
    return pytest.importorskip("megatron.training.arguments")


def parsed(
    training: Any,
    words: Sequence[str],
    method: ParallelConfig,
    patch: pytest.MonkeyPatch,
    validate: bool = True,
) -> Any:
    """The arguments as Megatron has them on so many GPUs."""
    patch.setattr(sys, "argv", ["pretrain_gpt.py", *USUAL, *words])
    patch.setenv("WORLD_SIZE", str(method.gpus))
    patch.setenv("RANK", str(method.gpus - 1))  # a later one does not print
    patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8" if method.zero > 1 else "1")
    patch.setattr("torch.cuda.get_device_capability", lambda *_: (9, 0))
    patch.setattr("torch.cuda.get_device_properties", lambda *_: type("H100", (), {"major": 9, "minor": 0}))
    found = training.parse_args()
    return training.validate_args(found) if validate else found


@pytest.mark.parametrize(
    ("precision", "optimizer", "gpus"), [("bf16", DEFAULT, 4), ("fp16", "adamw_torch", 2), ("fp32", "sgd", 2)]
)
def test_printed_flags_are_taken(
    training: Any, monkeypatch: pytest.MonkeyPatch, precision: Precision, optimizer: Any, gpus: int
) -> None:
    recipe = Recipe(128, precision, optimizer)
    wrong: dict[str, list[ParallelConfig]] = {}
    for method in methods(gpus, llama(8), recipe):
        words = megatron_flags(method, recipe, 3)
        try:
            found = parsed(training, words, method, monkeypatch)
        except (AssertionError, ValueError, SystemExit) as error:
            wrong.setdefault(str(error), []).append(method)
            continue
        assert found.tensor_model_parallel_size == method.tensor
        assert found.pipeline_model_parallel_size == method.pipeline
        assert found.data_parallel_size == method.data
        assert found.global_batch_size == 3 * method.data * method.micro_batches
        assert found.sequence_parallel == method.sequence_parallel
        assert bool(found.use_distributed_optimizer) == (method.zero > 0 or method.offload)
        assert bool(found.use_megatron_fsdp) == (method.zero > 1)
        assert found.optimizer_cpu_offload == method.offload
        assert (found.recompute_granularity or "none") == method.recompute
    assert not wrong, {said: (len(own), own[0]) for said, own in wrong.items()}


EXPERTS = replace(
    llama(8, experts=8, experts_per_token=2),
    layers=(ParamCounts(196_608, 512 + 2048, 8 * 3 * 256 * 704),) * 8,
)
"""Attention, norms with the router, experts."""


def sizes(architecture: Architecture, method: ParallelConfig) -> SimpleNamespace:
    """The arguments that Megatron's report reads."""
    several = architecture.experts > 1
    return SimpleNamespace(
        num_layers=8, hidden_size=256, ffn_hidden_size=704, num_attention_heads=8, kv_channels=32,
        group_query_attention=True, num_query_groups=4, padded_vocab_size=1024, swiglu=True, normalization="RMSNorm",
        untie_embeddings_and_output_weights=True, multi_latent_attention=False, mtp_num_layers=None,
        add_bias_linear=False, num_experts=8 if several else None, moe_layer_freq=1, moe_ffn_hidden_size=704,
        moe_router_topk=2, moe_latent_size=None, moe_shared_expert_intermediate_size=None,
        world_size=method.gpus, tensor_model_parallel_size=method.tensor, data_parallel_size=method.data,
        pipeline_model_parallel_size=method.pipeline, expert_model_parallel_size=method.expert,
        expert_tensor_parallel_size=method.tensor, use_distributed_optimizer=method.zero == 1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "method"),
    [
        (llama(8), ParallelConfig()),
        (llama(8), ParallelConfig(tensor=4)),
        (llama(8), ParallelConfig(data=4)),
        (llama(8), ParallelConfig(data=4, zero=1)),
        (llama(8), ParallelConfig(data=2, tensor=2, zero=1)),
        (llama(8), ParallelConfig(pipeline=4)),
        (llama(8), ParallelConfig(tensor=2, pipeline=2)),
        (EXPERTS, ParallelConfig(data=8, expert=4)),
        (EXPERTS, ParallelConfig(data=8, expert=4, zero=1)),
        (EXPERTS, ParallelConfig(data=8, expert=2, tensor=2, zero=1)),
    ],
    ids=lambda value: f"{value.name} {value.details}" if isinstance(value, ParallelConfig) else value.experts,
)
def test_weights_and_optimizer_are_those_of_megatrons_report(
    architecture: Architecture, method: ParallelConfig
) -> None:
    report = pytest.importorskip("megatron.training.theoretical_memory_usage")
    theirs = report.compute_weight_and_optimizer_memory(sizes(architecture, method))
    parts = at_stage(step_memory(architecture, Recipe(128), method, by_hand(architecture)), 0, 128)
    ours = parts["parameters"] + parts["gradients"] + parts["optimizer"]
    if method.pipeline > 1:
        theirs -= (
            18 * 256 / method.pipeline
        )  # they share the final norm out among all stages, we leave it to the last
    assert ours == pytest.approx(theirs, abs=64), "but for shares that are rounded up"


def theirs_of_a_layer(architecture: Architecture, tensor: int, sequence_parallel: bool) -> float:
    """Bytes of a row that a layer keeps by Megatron's report, with selective recomputation.

    It has a layer of the first GPTs: dropout, LayerNorm, a plain MLP of four times the width, as many keys as queries.
    """
    report = pytest.importorskip("megatron.training.theoretical_memory_usage")

    def of(layers: int) -> float:
        arguments = SimpleNamespace(
            num_layers=layers, seq_length=128, micro_batch_size=2, hidden_size=architecture.hidden,
            ffn_hidden_size=architecture.ffn, padded_vocab_size=1024, tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=1, virtual_pipeline_model_parallel_size=None,
        )  # fmt: skip
        if sequence_parallel:
            return float(report.compute_activation_memory(arguments, None))
        return float(report.compute_activation_memory_without_sp(arguments, None)) / 1.05  # "buffer"

    return (of(8) - of(7)) / (2 * 128)


@on_a_fake_gpu
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_activations_are_close_to_megatrons_report(
    tensor: int, sequence_parallel: bool, tmp_path: Path
) -> None:
    """Of a GPT-2 as `transformers` traces it: what another layer of a tensor rank keeps of a row."""
    config = {
        "model_type": "gpt2", "n_embd": 256, "n_head": 8, "vocab_size": 1024, "n_positions": 128,
        "activation_function": "gelu",
    }  # fmt: skip
    profiles = traced({**config, "n_layer": 8}, tmp_path, 128, Options(master_weights=False))
    method = ParallelConfig(tensor=tensor, pipeline=2, sequence_parallel=sequence_parallel, parts=1)
    memory = step_memory(gpt2(8), Recipe(128), method, profiles)
    first, last = (
        next(p for p in memory.phases(512) if p.name == f"the {name} layer's backward pass" and not p.stage)
        for name in ("first", "last")
    )
    found = (last.breakdown["activations"] - first.breakdown["activations"]) / (3 * 512)
    theirs = theirs_of_a_layer(gpt2(8), tensor, sequence_parallel)
    assert found == pytest.approx(theirs, rel=0.1)
