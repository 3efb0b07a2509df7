"""A backbone's architecture from its shape is the one that is read from the model of `transformers`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_mux.backbone.registry import read_shape
from megatron_mux.memory.forms.architecture import Unit
from megatron_mux.memory.forms.backbones import architecture_of
from megatron_mux.memory.forms.skeleton import read_architecture
from megatron_mux.memory.tensors import Skeleton
from tests import tiny_models

NAMES = ("llama", "llama-tied", "llama-biases", "mistral", "qwen2", "qwen3", "gpt2", "gpt_neo", "opt")


@pytest.mark.parametrize("name", NAMES)
def test_families(name: str, tmp_path: Path) -> None:
    tiny_models.make(tmp_path, name)
    found = architecture_of(read_shape(tmp_path / name))
    # Structure that is not read from parameters: only the engine's forms use it.
    found = replace(found, qk_norm=False, output_norms=False, rotations=1)
    wanted = read_architecture(Skeleton(tmp_path / name))
    if name == "opt":  # its final norm stands before the layers there
        norm = 2 * found.hidden
        behind = replace(wanted.embedding, copied=wanted.embedding.copied - norm)
        wanted = replace(wanted, embedding=behind, final=wanted.final + Unit(copied=norm))
    assert found == wanted
