"""An export has the client's layers and nothing else, and is refused once it is not as it was made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_mux.backbone.registry import read_backbone_info
from megatron_mux.errors import UserError
from megatron_mux.split import export_client
from megatron_mux.split.client.backbone import load_ends
from megatron_mux.split.client.files import read_client_info
from tests import tiny_models
from tests.end_to_end.workplace import write_tokenizer
from tests.unit.split.splitting import ALONE


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_models.make(tmp_path_factory.mktemp("whole"), "llama", sharded=True)
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def exported(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exports") / "client"
    words = ["--backbone", str(whole), "--cut-front", "2", "--cut-back", "1", "--out", str(out)]
    assert export_client.main(words) == 0
    return out


def test_it_has_the_clients_layers_alone(whole: Path, exported: Path) -> None:
    tensors = load_file(exported / "model.safetensors")
    layers = {name.split(".")[2] for name in tensors if ".layers." in name}
    assert layers == {"0", "1", "3"}
    others = {name for name in tensors if ".layers." not in name}
    assert others == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    weights = {path.name for path in whole.glob("model*")}
    names = {path.name for path in exported.iterdir()} - {"model.safetensors", "split.json"}
    assert names == {path.name for path in whole.iterdir()} - weights - {"generation_config.json"}
    assert not list(exported.parent.glob(".partial*"))


@pytest.mark.parametrize("cuts", [(2, 1), (1, 1), (1, 0)])
def test_clients_read_the_same_of_both(whole: Path, exported: Path, cuts: tuple[int, int]) -> None:
    infos = [read_client_info(path, *cuts) for path in (whole, exported)]
    assert infos[0].fingerprint == infos[1].fingerprint == read_backbone_info(whole).fingerprint
    wanted, found = (load_ends(info, ALONE, *cuts) for info in infos)
    for stage, other in zip(wanted, found, strict=True):
        for (name, parameter), (_, same) in zip(
            stage.model.named_parameters(), other.model.named_parameters(), strict=True
        ):
            assert torch.equal(parameter, same), name


@pytest.mark.parametrize("name", ["gpt2", "llama-tied"])
def test_families_with_tied_embeddings(tmp_path: Path, name: str) -> None:
    path = tiny_models.make(tmp_path, name)
    write_tokenizer(path)
    export_client.export_client(path, 1, 1, tmp_path / "out")
    front, back = load_ends(read_client_info(tmp_path / "out", 1, 1), ALONE, 1, 1)
    embedding = front.model.get_parameter("embedding.word_embeddings.weight")
    assert back.model.get_parameter("output_layer.weight") is embedding


def test_an_export_can_be_exported(exported: Path, tmp_path: Path) -> None:
    export_client.export_client(exported, 1, 0, tmp_path / "less")
    assert (
        read_client_info(tmp_path / "less", 1, 0).fingerprint == read_client_info(exported, 1, 0).fingerprint
    )


@pytest.mark.parametrize(
    ("cuts", "said"),
    [
        ((3, 0), "--cut-front 3 and --cut-back 0: .* was exported with 2 and 1 layers: export it again"),
        ((2, 2), "leave no layer of 4 for the server"),
        ((0, 1), "--cut-front 0: whoever sees embeddings knows every token"),
    ],
)
def test_other_cuts_are_refused(exported: Path, cuts: tuple[int, int], said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_client_info(exported, *cuts)


def test_changes_are_noticed(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="lacks"):
        read_backbone_info(exported)  # by what needs a whole backbone
    copy = tmp_path / "copy"
    shutil.copytree(exported, copy)
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(UserError, match="are not as they were exported: export them again"):
        read_client_info(copy, 1, 1)
    (copy / "split.json").write_text(json.dumps({"format": 1, "cut_front": 0}))
    with pytest.raises(UserError, match=r"split\.json: "):
        read_client_info(copy, 1, 1)


def test_what_fails_leaves_nothing(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def export(out: Path) -> str:
        assert export_client.main(["--backbone", str(whole), "--out", str(out)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("mine")
    assert export(tmp_path / "used").endswith("used: exists already: choose another directory")
    assert (tmp_path / "used" / "file").read_text() == "mine"

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megatron_mux.tensor_file.write_tensors", full)
    assert export(tmp_path / "new").endswith("new: cannot be written: No space left on device")
    assert [path.name for path in tmp_path.iterdir()] == ["used"]
