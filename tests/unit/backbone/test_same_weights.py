"""Which of several files are read, and that the same weights in other files are the same backbone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_mux.backbone.checkpoint import Checkpoint
from megatron_mux.backbone.registry import read_backbone_info
from megatron_mux.errors import UserError
from megatron_mux.merging.backbone_source import BackboneSource

Made = Callable[..., Path]
NORM = "model.layers.1.input_layernorm.weight"


def test_a_single_file_comes_before_an_older_index_as_in_transformers(copied: Made, tmp_path: Path) -> None:
    path = copied("llama", sharded=True)
    model: Any = AutoModelForCausalLM.from_pretrained(path)
    torch.nn.init.constant_(model.get_parameter(NORM), 7.0)
    model.save_pretrained(tmp_path / "newer")
    shutil.copy(tmp_path / "newer" / "model.safetensors", path)
    theirs: Any = AutoModelForCausalLM.from_pretrained(path)
    info = read_backbone_info(path)
    with Checkpoint(path) as checkpoint:
        assert {stored.file.name for stored in checkpoint.tensors.values()} == {"model.safetensors"}
        merged = BackboneSource(info, checkpoint).read(NORM)
        assert torch.equal(merged, theirs.get_parameter(NORM)) and merged[0] == 7.0


def test_equal_weights_in_other_shards_are_the_same_backbone(copied: Made, tmp_path: Path) -> None:
    path = copied("llama")
    model: Any = AutoModelForCausalLM.from_pretrained(path)
    model.save_pretrained(tmp_path / "shards", max_shard_size="30KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    config = json.loads((tmp_path / "shards" / "config.json").read_text())
    (tmp_path / "shards" / "config.json").write_text(json.dumps({**config, "transformers_version": "4.40.0"}))
    first, second = read_backbone_info(path), read_backbone_info(tmp_path / "shards")
    assert first.fingerprint == second.fingerprint
    (path / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
    assert read_backbone_info(path).fingerprint != first.fingerprint
    torch.nn.init.constant_(model.get_parameter("model.layers.0.mlp.up_proj.weight"), 0.5)
    model.save_pretrained(tmp_path / "shards", max_shard_size="30KB")
    assert read_backbone_info(tmp_path / "shards").fingerprint != second.fingerprint


def test_leftover_and_missing_files_are_named(copied: Made) -> None:
    path = copied("llama", sharded=True)
    index = path / "model.safetensors.index.json"
    first = sorted(path.glob("*.safetensors"))[0]
    shutil.copy(first, path / "old.safetensors")
    index.rename(path / "index")
    with pytest.raises(UserError, match=rf"{first.name} both hold .* one is a leftover copy: remove it"):
        Checkpoint(path)
    (path / "index").rename(index)
    first.unlink()
    with pytest.raises(UserError, match=rf"index.json names {first.name}, which is not there"):
        Checkpoint(path)
