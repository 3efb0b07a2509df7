"""LLMem's equations by hand on a small model, and what its tables publish."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.papers.base_range import LENGTH, Choices, ranges_of_table
from benchmarks.papers.decision import layouts
from benchmarks.papers.llmem import Constants, LLMem
from megatron_mux.errors import UserError
from megatron_mux.memory.sizes import MIB
from megatron_mux.memory.tensors import Skeleton
from tests.unit.memory.configs import CONFIGS, TABLE_3, write

Models = Callable[[str], Skeleton]
CDP, ADP, TP, BOTH = layouts(4)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> LLMem:
    """A Llama of two layers, hidden 8, an untied output layer; pages of 64 bytes, sequences of 4 tokens."""
    config = {
        **CONFIGS["llama-7b"],
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 16,
        "vocab_size": 10,
    }
    tensors = Skeleton(write(tmp_path_factory.mktemp("small"), config)).tensors
    return LLMem(tensors, 4, Constants(base_memory=1000, page=64))


def test_terms_by_hand(small: LLMem) -> None:
    # Embedding and output layer 80 each; a layer 4 x 64 + 3 x 128 + 2 x 8 = 656, two and the last norm 1320.
    assert small.chunk_size == 1320  # less than the least chunk: one that holds it exactly
    assert small.parameters(6) == 8448  # 1400 x 6 = 8400, to whole pages
    assert small.parameters(2) == 2816 and small.parameters(4) == 5632
    # Two fp32 values for each: embedding 640, q k v o 512 each, gate up down 1024 each. All whole pages.
    assert small.optimizer == 640 + 2 * (4 * 512 + 3 * 1024)
    assert small.outputs(3) == 576  # (1 + 2) x 3 x 4 x 8 x 2
    # 3 x 4 x 10 x 2 = 240 -> 256; twice 3 x 3 x 10 x 2 = 180 -> 192; the output layer 160, not in pages.
    assert small.head(3) == 256 + 2 * 192 + 160
    assert small.backward_gather(3, 4) == 320  # 2 x 3 x 4 x 8 x 2 x 3/4 = 288
    assert small.backward_gather(3, 1) == 0


def test_peaks_by_hand(small: LLMem) -> None:
    rest = 1000 + 576 + 800  # base, outputs, logits
    assert small.peak(CDP, 3) == rest + 8448 + 10880
    assert small.peak(ADP, 3) == rest + 2816 + (5632 + 10880) // 4
    assert small.peak(TP, 3) == rest + (8448 + 10880) // 4 + 320
    assert small.peak(BOTH, 3) == small.peak(ADP, 3) - 2816 // 2 + small.backward_gather(3, 2)


def test_an_output_layer_counts_whether_it_is_tied_or_not(model: Models) -> None:
    tensors = model("bigscience/bloom-560m").tensors
    logits = LLMem(tensors, 8).head(1) - LLMem(tensors, 8).model.tensor(tensors.head).count * 2
    assert (
        tensors.is_tied and logits == 3 * 2 * 2 * MIB
    )  # three times up to 8 x 250880 x 2 bytes, in whole pages


def test_positions_and_biases(model: Models) -> None:
    forms = LLMem(model("EleutherAI/gpt-neo-1.3B").tensors, 512)
    pages = [50257 * 2048, 2048 * 2048, *[2048 * 2048] * 4 * 24, *[2048 * 8192] * 2 * 24]
    assert forms.optimizer == sum(-(-count * 8 // (2 * MIB)) * 2 * MIB for count in pages)
    assert forms.outputs(1) == (2 + 24) * 512 * 2048 * 2


@pytest.mark.parametrize(("name", "width"), [("Salesforce/codegen-350M-nl", 4), ("llama-7b", 2)])
def test_logits_by_family(model: Models, name: str, width: int) -> None:
    forms = LLMem(model(name).tensors, 512)
    tensors = forms.model
    own = tensors.vocabulary * tensors.hidden * 2
    exact = 16 * (512 + 2 * 511) * tensors.vocabulary * width
    assert 0 <= forms.head(16) - own - exact < 3 * 2 * MIB


def test_another_family_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 128}
    with pytest.raises(UserError, match="model_type 'gpt2' is not supported; supported are opt, bloom"):
        LLMem(Skeleton(write(tmp_path, config)).tensors, 8)


def test_table_3_agrees_for_as_many_models_as_is_said(model: Models) -> None:
    choices = {n: Choices(LLMem(model(n).tensors, LENGTH, Constants(base_memory=0))) for n in TABLE_3}
    assert ranges_of_table(choices, TABLE_3) == []  # no base memory gives all nine
    same = [name for name, wanted in TABLE_3.items() if choices[name].selected_method(512 * MIB) == wanted]
    assert len(same) == 6, same


def test_terms_of_opt_125m_by_hand(model: Models) -> None:
    """60 sequences of 512 tokens, hidden 768, 12 layers, a vocabulary of 50,272; in whole pages of 2 MiB."""
    found = LLMem(model("facebook/opt-125m").tensors, 512).breakdown(CDP, 60)
    assert found["outputs"] == (2 + 12) * 60 * 512 * 768 * 2
    # Token and position embeddings; q, k, v, o of 2.25 pages each and two products of 9 pages in every layer.
    assert found["optimizer"] == (148 + 7 + 12 * (4 * 3 + 2 * 9)) * 2 * MIB
    assert found["logits"] == (1473 + 2 * 1470) * 2 * MIB + 50272 * 768 * 2
    assert 0 <= found["parameters"] - 6 * 125_239_296 < 0.02 * 6 * 125_239_296, "what chunks waste"
