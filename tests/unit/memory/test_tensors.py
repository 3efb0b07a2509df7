from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_mux.errors import UserError
from megatron_mux.memory.store import Store
from megatron_mux.memory.tensors import Skeleton
from tests.unit.memory.configs import CONFIGS, PARAMETERS, write

Models = Callable[[str], Skeleton]
LLAMA = CONFIGS["llama-7b"]


@pytest.mark.parametrize("name", CONFIGS)
def test_as_many_parameters_as_published(model: Models, name: str) -> None:
    assert model(name).tensors.total == PARAMETERS[name]


@pytest.mark.parametrize(
    ("name", "tied", "embeddings", "own"),
    [
        ("facebook/opt-350m", True, 2, []),
        ("bigscience/bloom-560m", True, 1, []),
        ("Salesforce/codegen-350M-nl", False, 1, ["lm_head.weight", "lm_head.bias"]),
        ("EleutherAI/gpt-neo-1.3B", True, 2, []),
        ("llama-7b", False, 1, ["lm_head.weight"]),
    ],
)
def test_embeddings_and_output_layer(
    model: Models, name: str, tied: bool, embeddings: int, own: list[str]
) -> None:
    tensors = model(name).tensors
    found = [tensor for tensor in tensors.tensors if tensor.operator == "Embedding"]
    assert tensors.is_tied is tied and len(found) == embeddings
    assert [tensor.name for tensor in tensors.head_tensors] == own
    assert tensors.tensor(tensors.embedding).operator == "Embedding"


def test_sizes_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Store("models", tmp_path / "kept")
    file = write(tmp_path, {**LLAMA, "num_hidden_layers": 1})
    assert not Skeleton(file, kept).is_known and not Skeleton(file).is_known
    measured = Skeleton(file, kept).tensors
    assert measured == Skeleton(file).tensors
    monkeypatch.setattr(Skeleton, "module", None)
    known = Skeleton(file, kept)
    assert known.is_known and known.tensors == measured
    write(tmp_path, {**LLAMA, "num_hidden_layers": 2})
    assert not Skeleton(file, kept).is_known


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ([], "must hold a JSON object"),
        ({}, "has no model_type"),
        ({"model_type": 3}, "has no model_type"),
        ({"model_type": "lama"}, "model_type 'lama' is not a causal language model"),
        ({"model_type": "vit"}, "model_type 'vit' is not a causal language model"),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers = 0: must be a whole number from 1"),
        ({**LLAMA, "num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000: must be"),
        ({**LLAMA, "hidden_size": -4096}, "hidden_size = -4096: must be"),
        ({**LLAMA, "vocab_size": 10**15}, "vocab_size = 1000000000000000: must be"),
        ({**LLAMA, "intermediate_size": 0}, "intermediate_size = 0: must be"),
        ({**LLAMA, "hidden_size": "wide"}, "hidden_size"),
        ({**LLAMA, "num_attention_heads": 7}, "llama"),
        ({**CONFIGS["EleutherAI/gpt-neo-1.3B"], "num_layers": 7}, "attention_layers"),
    ],
)
def test_what_no_model_has(tmp_path: Path, config: Any, said: str) -> None:
    with pytest.raises(UserError) as error:
        assert Skeleton(write(tmp_path, config)).tensors.total
    (problem,) = error.value.problems
    assert said in problem and str(tmp_path) in problem and "\n" not in problem


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json cannot be read: No such file"):
        Skeleton(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA)[:-9])
    with pytest.raises(UserError, match="is not valid JSON"):
        Skeleton(tmp_path)
