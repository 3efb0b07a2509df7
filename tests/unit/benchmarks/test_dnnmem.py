from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.papers.dnnmem import Constants, DNNMem
from megatron_mux.errors import UserError
from megatron_mux.memory.tensors import Skeleton
from tests.unit.memory.configs import CONFIGS, write

Models = Callable[[str], Skeleton]
BARE = Constants(context=0, buffer=0)


def small(directory: Path, layers: int) -> Skeleton:
    config = {
        **CONFIGS["llama-7b"],
        "hidden_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 8192,
    }
    return Skeleton(write(directory, config))


def test_resident_memory(tmp_path: Path) -> None:
    found = DNNMem(small(tmp_path, 2), 16).breakdown(2)
    assert found["base"] == 512 << 20 and found["buffer"] == 64 << 20
    # Every tensor of this model is a multiple of 512 bytes but the norms' 256, which take 512.
    tensors = small(tmp_path, 2).tensors
    norms = sum(tensor.count == 64 for tensor in tensors.tensors)
    assert found["parameters"] == found["gradients"] == tensors.total * 4 + norms * 256


def test_a_layer_more_keeps_its_output(tmp_path: Path) -> None:
    peaks = [DNNMem(small(tmp_path, layers), 16, BARE).breakdown(8)["outputs"] for layers in (2, 3, 6)]
    hidden = 8 * 16 * 64 * 4
    assert peaks[1] - peaks[0] == hidden and peaks[2] - peaks[1] == 3 * hidden


def test_logits_are_the_peak(tmp_path: Path) -> None:
    found = DNNMem(small(tmp_path, 2), 16, BARE).breakdown(8)["outputs"]
    logits = 8 * 16 * 8192 * 4
    assert logits < found < 1.1 * logits


def test_long_sequences_peak_in_attention(tmp_path: Path) -> None:
    found = DNNMem(small(tmp_path, 2), 2048, BARE).breakdown(8)["outputs"]
    scores = 8 * 4 * 2048 * 2048 * 4
    assert 2 * scores <= found < 4 * scores


@pytest.mark.parametrize(
    "name", sorted({config["model_type"]: name for name, config in CONFIGS.items()}.values())
)
def test_every_family_can_be_followed(tmp_path: Path, name: str) -> None:
    config = dict(CONFIGS[name])
    for field in ("num_hidden_layers", "n_layer", "num_layers"):
        if field in config:
            config[field] = 2
    if "attention_types" in config:
        config["attention_types"] = [[["global", "local"], 1]]
    graph = DNNMem(Skeleton(write(tmp_path, config)), 512)
    one, two, four = graph.peak(1), graph.peak(2), graph.peak(4)
    assert four - two == pytest.approx(2 * (two - one), rel=1e-3)


def test_a_model_that_cannot_be_traced_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skeleton = small(tmp_path, 1)

    def forward(**_: object) -> None:
        raise RuntimeError("data\ndependent")

    monkeypatch.setattr(skeleton.module, "forward", forward)
    with pytest.raises(UserError, match=r"dnnmem: .*its forward pass cannot be traced: data dependent"):
        DNNMem(skeleton, 16)


def test_terms_of_opt_125m_by_hand(model: Models) -> None:
    """72 sequences of 512 tokens, hidden 768, 12 layers, a vocabulary of 50,272; everything in fp32."""
    found = DNNMem(model("facebook/opt-125m"), 512).breakdown(72)
    assert found["parameters"] == found["gradients"] == 4 * 125_239_296
    rows = 72 * 512
    logits, hidden = 4 * rows * 50_272, 4 * rows * 768
    # Of each layer its output; of the rest two embeddings, their sum, and the norm's output.
    rest = found["outputs"] - logits - (12 + 4) * hidden
    masks = 72 * 512 * 512 * (4 + 1)  # who sees whom, in fp32 and as a truth value
    assert 0 < rest - masks < 12 * rows * 8, "token numbers, positions and the like"
