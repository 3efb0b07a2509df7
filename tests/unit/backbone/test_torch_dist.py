"""Megatron's `torch_dist` checkpoints: conversion there and back, what is refused, and pickles that name code."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_mux.backbone.model_directory import open_checkpoint, read_config, tokenizer_directory
from megatron_mux.backbone.registry import read_backbone_info, read_shape
from megatron_mux.backbone.torch_dist.arguments import to_config
from megatron_mux.backbone.torch_dist.storage import read_contents
from megatron_mux.backbone.torch_dist.unpickle import Record, unpickle
from megatron_mux.cli import convert
from megatron_mux.errors import UserError
from tests import tiny_models
from tests.tiny_models import words

BOTH_WAYS = ("llama-tied", "mistral", "qwen3", "gpt2", "mixtral", "qwen3_moe")


def converted(source: Path, output: Path) -> Path:
    assert convert.main(["--input", str(source), "--output", str(output)]) == 0
    return output


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory `llama`, and beside it `torch_dist`."""
    place = tmp_path_factory.mktemp("models")
    converted(words(tiny_models.make(place, "llama", sharded=True)), place / "torch_dist")
    return place


@pytest.fixture
def checkpoint(llama: Path, tmp_path: Path) -> Path:
    """A Megatron checkpoint to spoil."""
    return Path(shutil.copytree(llama / "torch_dist", tmp_path / "checkpoint"))


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    model = words(tiny_models.make(tmp_path, name))
    before = read_backbone_info(model)
    megatrons = converted(model, tmp_path / "torch_dist")
    (megatrons / "config.json").unlink()  # then Megatron's own arguments say what the model is
    back = converted(megatrons, tmp_path / "back")
    was, now = load_file(model / "model.safetensors"), load_file(back / "model.safetensors")
    assert was.keys() == now.keys()
    assert all(torch.equal(was[key], now[key]) and was[key].dtype == now[key].dtype for key in was)
    after = read_shape(back)
    for field in (
        "hidden",
        "ffn",
        "heads",
        "kv_heads",
        "head_dim",
        "vocab",
        "tied",
        "ropes",
        "windows",
        "experts",
    ):
        assert getattr(after, field) == getattr(before.shape, field), field
    assert after.family == before.shape.family
    assert json.loads((back / "config.json").read_text())["eos_token_id"] == 2


def test_any_part_of_a_tensor(llama: Path) -> None:
    """Rows over the boundaries of heads, and columns: as from safetensors."""
    shape = read_shape(llama / "torch_dist")
    with (
        open_checkpoint(llama / "llama-sharded", shape) as theirs,
        open_checkpoint(llama / "torch_dist", shape) as ours,
    ):
        assert ours.tensors.keys() == theirs.tensors.keys()
        for name in ("model.layers.2.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight"):
            part = slice(3, 21), slice(5, 17)
            assert torch.equal(ours.read(name, *part), theirs.read(name, *part))
        name = "model.layers.3.input_layernorm.weight"
        assert torch.equal(ours.read(name, slice(4, 9)), theirs.read(name, slice(4, 9)))


def test_an_output_is_not_overwritten(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert.main(["--input", str(llama / "llama-sharded"), "--output", str(llama / "torch_dist")]) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["gemma3_text", "qwen2", "opt", "deepseek_v2", "llama-yarn"])
def test_what_megatron_would_compute_otherwise(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = words(tiny_models.make(tmp_path, name))
    assert convert.main(["--input", str(model), "--output", str(tmp_path / "out")]) == 2
    assert "Megatron" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


class Hostile:
    """Makes a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.file}",)


def spoil(directory: Path, place: str, value: Any) -> None:
    """Put an object into one of the pickles of a checkpoint."""
    if place == ".metadata":
        metadata = pickle.loads((directory / ".metadata").read_bytes())  # that this test has written
        metadata.planner_data = value
        (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    elif place == "common.pt":
        torch.save({"args": Namespace(num_layers=4, other=value)}, directory / "common.pt")
    else:
        chunk = read_contents(directory).tensors["decoder.final_layernorm.weight"].chunks[0]
        archive = io.BytesIO()
        torch.save(value, archive)
        content = bytearray(chunk.file.read_bytes())
        content[chunk.start : chunk.start + chunk.length] = archive.getvalue().ljust(chunk.length, b"\0")
        chunk.file.write_bytes(content)


@pytest.mark.parametrize("place", [".metadata", "common.pt", "values"])
def test_a_hostile_pickle_runs_nothing(place: str, checkpoint: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    spoil(checkpoint / "release", place, Hostile(made))
    (checkpoint / "config.json").unlink()
    with pytest.raises(UserError, match="system"):
        info = read_backbone_info(checkpoint)
        with open_checkpoint(checkpoint, info.shape) as opened:
            opened.read("model.norm.weight", slice(None))
    assert not made.exists()


def nested(depth: int) -> bytes:
    return pickle.NONE + depth * pickle.TUPLE1


@pytest.mark.parametrize(
    "code",
    [
        pickle.EMPTY_DICT + nested(10**6) + pickle.NONE + pickle.SETITEM,
        pickle.EMPTY_DICT
        + pickle.MARK
        + pickle.NONE
        + pickle.NONE
        + nested(10**6)
        + pickle.NONE
        + pickle.SETITEMS,
        pickle.MARK + nested(10**6) + pickle.NONE + pickle.DICT,
        pickle.EMPTY_SET + pickle.MARK + nested(10**6) + pickle.ADDITEMS,
        pickle.MARK + nested(10**6) + pickle.FROZENSET,
        b"cbuiltins\nset\n"
        + pickle.MARK
        + pickle.MARK
        + nested(10**6)
        + pickle.LIST
        + pickle.TUPLE
        + pickle.REDUCE,
        b"ccollections\nOrderedDict\n" + pickle.EMPTY_LIST + pickle.TUPLE1 + pickle.REDUCE,
    ],
    ids=["item", "items", "dict", "set", "frozenset", "set of list", "dict of list"],
)
def test_a_pickle_whose_keys_would_end_the_process(code: bytes) -> None:
    with pytest.raises(UserError, match=r"common\.pt cannot be read: "):
        unpickle(io.BytesIO(code + pickle.STOP), "common.pt")


def test_a_pickle_that_says_it_has_many_objects_takes_no_memory() -> None:
    code = pickle.EMPTY_LIST + pickle.LONG_BINPUT + b"\xff\xff\xff\xff" + pickle.STOP
    assert unpickle(io.BytesIO(code), "common.pt") == []


def test_objects_of_megatron_are_inert(checkpoint: Path) -> None:
    """An enum of a class that cannot be imported here is read, its code is not needed."""
    unknown = b"cmegatron.core.transformer.enums\nAttnBackend\n(I5\ntR."
    found = unpickle(io.BytesIO(unknown), "common.pt")
    assert isinstance(found, Record) and found.args == (5,)


def test_padding_of_the_vocabulary() -> None:
    """Tokens that the command line counts; without a number all rows, which Megatron computes with too."""
    known: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "ffn_hidden_size": 16,
    }
    assert to_config({**known, "vocab_size": 97}, 128, "float32")["vocab_size"] == 97
    assert to_config(known, 128, "float32")["vocab_size"] == 128
    null = {**known, "vocab_size": 97, "tokenizer_type": "NullTokenizer"}
    assert to_config(null, 128, "float32")["vocab_size"] == 128


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"multi_latent_attention": True}, "multi_latent_attention = True"),
        ({"rotary_interleaved": True, "normalization": "RMSNorm"}, "rotary_interleaved = True"),
        ({"normalization": "RMSNorm", "swiglu": False, "position_embedding_type": "rope"}, "swiglu = False"),
        (
            {"position_embedding_type": "rope"},
            "position_embedding_type = rope: supported is learned_absolute",
        ),
        ({"mtp_num_layers": 1}, "mtp_num_layers = 1"),
    ],
)
def test_arguments_that_change_what_is_computed(changed: dict[str, Any], said: str) -> None:
    known = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 16}
    with pytest.raises(UserError, match=said):
        to_config({**known, **changed}, 128, "float32")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"mp_rank_00/model_optim_rng.pt": ""}, "old format `torch`"),
        ({".metadata": ""}, "torch_dcp or fsdp_dtensor"),
        ({"metadata.json": '{"sharded_backend": "zarr"}'}, "format zarr"),
        ({"common.pt": ""}, "no complete checkpoint"),
    ],
)
def test_other_formats(files: dict[str, str], said: str, tmp_path: Path) -> None:
    for name, content in files.items():
        file = tmp_path / "iter_0000003" / name
        file.parent.mkdir(parents=True)
        file.write_text(content)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    with pytest.raises(UserError, match=said):
        read_config(tmp_path)


def test_without_a_tokenizer(checkpoint: Path) -> None:
    for file in checkpoint.glob("tokenizer*"):
        file.unlink()
    shutil.rmtree(checkpoint / "tokenizer", ignore_errors=True)
    torch.save({"args": Namespace(num_layers=4)}, checkpoint / "release" / "common.pt")
    with pytest.raises(UserError, match="--tokenizer-model DIR"):
        tokenizer_directory(checkpoint)
