"""Full fine-tuning: peaks of steps against traces of `transformers` at full depth, at batches that nobody traced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_mux.gpus import known
from megatron_mux.memory import untraced
from megatron_mux.memory.estimate import predict
from megatron_mux.memory.forms.full_training import FullTrainingMemory
from megatron_mux.memory.forms.method import ParallelConfig, Recompute
from megatron_mux.memory.forms.recipe import Recipe
from megatron_mux.memory.forms.skeleton import read_architecture
from megatron_mux.memory.sizes import MIB
from megatron_mux.memory.stream.insertion import buckets
from megatron_mux.memory.tensors import Skeleton
from megatron_mux.memory.trace.case import Options
from megatron_mux.memory.trace.training import trace
from tests.unit.memory import profiles
from tests.unit.memory.configs import write
from tests.unit.memory.stream.peak import peak_of
from tests.unit.memory.trace.test_families import FAMILIES, USUAL
from tests.unit.memory.traced import on_a_fake_gpu

pytestmark = on_a_fake_gpu

WIDE_LLAMA = {
    "model_type": "llama", "vocab_size": 8000, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 2048,
}  # fmt: skip
WIDE: dict[str, dict[str, Any]] = {
    "llama": WIDE_LLAMA,
    "gpt2": {
        "model_type": "gpt2", "n_embd": 512, "n_layer": 4, "n_head": 8, "vocab_size": 8000, "n_positions": 2048,
    },
}  # fmt: skip
WAYS = {
    "bf16": (Options(master_weights=False), 48),
    "bf16, recomputed": (Options(master_weights=False, recompute=True), 60),
    "autocast": (Options(optimizer="rmsprop"), 60),
    "autocast, recomputed": (Options(optimizer="rmsprop", recompute=True), 48),
    "fp32, eager": (Options(precision="fp32", attention="eager"), 36),
}
CHOSEN = ("falcon", "gemma2", "gpt_bigcode", "mixtral")
"""One of each way to compute attention and MLP. Falcon copies the keys that its heads share, but not those of a single
sequence; GPT-BigCode loads a mask beside its weights."""


def memory(
    config: dict[str, Any],
    directory: Path,
    length: int,
    options: Options,
    method: ParallelConfig,
    device: str = "cpu",
) -> FullTrainingMemory:
    """An estimate whose profile is traced here."""
    architecture = read_architecture(Skeleton(write(directory, config)))
    recipe = Recipe(length, options.precision, options.optimizer, options.master_weights, options.attention)
    of = profiles.traced(config, directory, length, options)
    gpu = known(options.device).gpu
    return FullTrainingMemory(architecture, recipe, method, of, gpu=gpu, device=device)


def held(found: FullTrainingMemory, rows: int) -> int:
    """Bytes at the peak without fragmentation and the context."""
    parts = found.worst(rows).breakdown
    return sum(parts.values()) - parts["fragmentation"] - parts["context"]


@pytest.mark.parametrize("number", range(len(CHOSEN)), ids=CHOSEN)
def test_peaks_of_families(number: int, tmp_path: Path) -> None:
    """Each family in one of the ways; benchmarks/full_training_memory.py has all of them in all ways."""
    name = CHOSEN[number]
    (options, length), batch = list(WAYS.values())[number % len(WAYS)], (1, 150)[number % 2]
    more, _, layers = FAMILIES[name]
    config = {"model_type": name, **USUAL, **more}
    config |= {"num_hidden_layers": layers, "n_layer": layers, "n_layers": layers}
    found = memory(
        config, tmp_path, length, options, ParallelConfig(recompute="full" if options.recompute else "none"),
    )  # fmt: skip
    skeleton = Skeleton(tmp_path)
    peak = peak_of(trace(options.case(skeleton.raw, skeleton.tensors, length, batch))).size
    assert held(found, batch * length) == pytest.approx(peak, rel=0.002)


def test_a_family_that_is_not_understood_is_refused_by_its_name(tmp_path: Path) -> None:
    from megatron_mux.errors import UserError

    config = {"model_type": "deepseek_v3", **USUAL, **FAMILIES["deepseek_v3"][0], "num_hidden_layers": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="the attention of model_type 'deepseek_v3' is not understood"):
        read_architecture(Skeleton(tmp_path))


@pytest.mark.parametrize("optimizer", ["adamw_torch", "adafactor"])
def test_peaks_with_every_optimizer(optimizer: str, tmp_path: Path) -> None:
    """So few rows that weights, states and gradients are the peak, with cuBLAS's workspaces."""
    options = Options("H100", master_weights=False, optimizer=optimizer)
    found = memory(WIDE_LLAMA, tmp_path, 128, options, ParallelConfig(), device="cuda")
    skeleton = Skeleton(tmp_path)
    case = options.case(skeleton.raw, skeleton.tensors, 128, 1)
    stream = trace(case)
    peak = peak_of(predict(stream, case.gpu).stream)
    assert peak.size - peak_of(stream).size == 64 * MIB
    # Adafactor's update of the tensor before the largest is still there.
    least = -0.02 if optimizer == "adafactor" else -0.001
    assert least < held(found, 128) / peak.size - 1 < 0.002


@pytest.mark.parametrize(("name", "recompute"), [("llama", "none"), ("gpt2", "full")])
def test_peaks_with_autocast(name: str, recompute: Recompute, tmp_path: Path) -> None:
    """fp32 weights, and copies of them: with layers recomputed, the peak may be the end of the forward pass."""
    options = Options(optimizer="rmsprop", recompute=recompute == "full")
    found = memory(WIDE[name], tmp_path, 512, options, ParallelConfig(recompute=recompute))
    skeleton = Skeleton(tmp_path)
    for batch in (1, 4):
        peak = peak_of(trace(options.case(skeleton.raw, skeleton.tensors, 512, batch))).size
        assert held(found, batch * 512) == pytest.approx(peak, rel=0.01)


def test_buckets_of_gradients(tmp_path: Path) -> None:
    """On two GPUs, each with the whole model, as torch's `DistributedDataParallel` has it."""
    options = Options(optimizer="rmsprop")
    found = memory(WIDE_LLAMA, tmp_path, 128, options, ParallelConfig(data=2), device="cuda")
    skeleton = Skeleton(tmp_path)
    for batch in (1, 16):  # the peak is the optimizer's step; the loss, while there are no gradients yet
        case = options.case(skeleton.raw, skeleton.tensors, 128, batch)
        stream = trace(case)
        traced = predict(stream, case.gpu, communicators=1, blocks=buckets(stream))
        parts = found.worst(batch * 128).breakdown
        assert held(found, batch * 128) == pytest.approx(peak_of(traced.stream).size, rel=0.004)
        assert parts["communication"] == 4 * skeleton.tensors.total
        assert parts["context"] == untraced.CONTEXT_BYTES + traced.communicators * untraced.COMMUNICATOR_BYTES
        least, most = found.interval(batch * 128)
        assert least < sum(parts.values()) < most


@pytest.mark.parametrize("device", ["H100", "V100"])
def test_peaks_in_attention(device: str, tmp_path: Path) -> None:
    """An MLP and a vocabulary so small that attention's backward pass decides; a V100 keeps scores."""
    config = {**WIDE_LLAMA, "vocab_size": 64, "hidden_size": 256, "intermediate_size": 64}
    options = Options(device, "fp16" if device == "V100" else "bf16", False, "sgd", recompute=True)
    method = ParallelConfig(recompute="full")
    found = memory(config, tmp_path, 512, options, method)
    skeleton = Skeleton(tmp_path)
    peak = peak_of(trace(options.case(skeleton.raw, skeleton.tensors, 512, 5))).size
    assert held(found, 5 * 512) == pytest.approx(peak, rel=0.01)


def test_attention_that_is_recomputed_keeps_no_scores(tmp_path: Path) -> None:
    options = Options(attention="eager", master_weights=False)
    none, selective = (
        memory(WIDE_LLAMA, tmp_path, 512, options, ParallelConfig(recompute=recompute))
        for recompute in ("none", "selective")
    )
    scores = 4 * 8 * 512 * (4 + 2)  # of four layers and eight heads: probabilities in fp32, and rounded
    saved = (held(none, 64 << 10) - held(selective, 64 << 10)) / (64 << 10)
    assert 0.7 * scores < saved <= scores
