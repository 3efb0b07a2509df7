"""The quickstart's preparation: what it reads and how it leaves its folder, without fetching anything."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import yaml

pytestmark = pytest.mark.versions

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a file of the quickstart as running it by path would, and forgets it afterwards."""
    monkeypatch.syspath_prepend(str(QUICKSTART))
    before = set(sys.modules)

    def run(name: str) -> ModuleType:
        return __import__(name)

    yield run
    for name in {"fetch", "corpora", "prepare", "convert_gguf", "r_data", "fastest_dtype"} & (
        set(sys.modules) - before
    ):
        del sys.modules[name]


# --- tasks.yaml ------------------------------------------------------------------------------------------------------


def test_the_task_file_is_valid_and_names_what_is_prepared(load: Callable[[str], ModuleType]) -> None:
    from megatron_mux.tasks import TaskSpec

    tasks = yaml.safe_load((QUICKSTART / "tasks.yaml").read_text())["tasks"]
    prepared = load("corpora").BUILDERS
    for task in tasks:
        TaskSpec.model_validate(task)
        path = Path(task["data"]["path"])
        assert path.name.removesuffix(".jsonl") in prepared
        assert Path(task["eval"]["path"]).name == path.name.replace(".jsonl", ".eval.jsonl")
    kinds = [task["adapter"]["peft_type"] for task in tasks]
    assert kinds.count("LORA") == 2 and "BOTTLENECK" in kinds and len(set(kinds)) == 3


@pytest.mark.parametrize(
    ("fp32", "bf16", "chosen"), [(4.0, 1.0, "bf16"), (1.1, 1.0, "fp32"), (1.0, 3.0, "fp32")]
)
def test_the_dtype_is_the_one_that_measures_faster(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    fp32: float, bf16: float, chosen: str,
) -> None:  # fmt: skip
    fastest = load("fastest_dtype")
    taken = {fastest.torch.float32: fp32, fastest.torch.bfloat16: bf16}
    monkeypatch.setattr(fastest, "seconds", lambda dtype, device: taken[dtype])
    monkeypatch.setattr(fastest.torch, "set_num_threads", lambda count: None)
    fastest.main()
    assert capsys.readouterr().out == f"{chosen}\n"


# --- weights ---------------------------------------------------------------------------------------------------------


def test_rotary_order_is_undone(load: Callable[[str], ModuleType]) -> None:
    heads, size, width = 3, 8, 5
    original = np.random.default_rng(0).normal(size=(heads * size, width)).astype(np.float32)
    # What llama.cpp's converter does to query and key weights.
    shuffled = original.reshape(heads, 2, size // 2, width).swapaxes(1, 2).reshape(original.shape)
    assert (load("convert_gguf").undo_rotary_order(shuffled, heads) == original).all()


def test_names_of_tensors(load: Callable[[str], ModuleType]) -> None:
    name = load("convert_gguf").hugging_face_name
    assert name("blk.12.ffn_gate.weight") == "model.layers.12.mlp.gate_proj.weight"
    assert name("token_embd.weight") == "model.embed_tokens.weight"
    with pytest.raises(ValueError, match="rope_freqs"):
        name("rope_freqs.weight")


# --- R's data --------------------------------------------------------------------------------------------------------


def _strings(lines: list[str]) -> bytes:
    """A character vector as R serialises it (format 3)."""
    encoded = [line.encode() for line in lines]
    body = b"".join(struct.pack(">ii", 0x00040009, len(line)) + line for line in encoded)
    return _HEADER + struct.pack(">ii", 16, len(lines)) + body


_HEADER = b"X\n" + struct.pack(">iiii", 3, 0x040201, 0x030500, 5) + b"UTF-8"


def _named_list(pairs: dict[str, bytes]) -> bytes:
    """A list with names, without a header; its values are serialised already."""
    names = b"".join(struct.pack(">ii", 0x00040009, len(n)) + n.encode() for n in pairs)
    attributes = struct.pack(">iii", 0x402, 1, 0x00040009) + struct.pack(">i", 5) + b"names"
    attributes += struct.pack(">ii", 16, len(pairs)) + names + struct.pack(">i", 254)
    return struct.pack(">ii", 0x200 | 19, len(pairs)) + b"".join(pairs.values()) + attributes


@pytest.mark.parametrize("method", ["none", "zlib", "bz2", "xz"])
def test_r_character_vectors(load: Callable[[str], ModuleType], tmp_path: Path, method: str) -> None:
    lines = ["It was a dark night.", "", "Élinor — 1811"]
    value = _strings(lines)
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6}]
    packed = {
        "none": lambda: b"0" + value,
        "zlib": lambda: zlib.compress(value),
        "bz2": lambda: b"2" + bz2.compress(value),
        "xz": lambda: b"Z" + lzma.compress(value, lzma.FORMAT_RAW, filters=filters),
    }[method]()
    chunk = struct.pack(">i", len(value)) + packed
    (tmp_path / "data.rdb").write_bytes(b"????" + chunk)
    place = struct.pack(">iiii", 13, 2, 4, len(chunk))
    index = _HEADER + _named_list({"variables": _named_list({"novel": place})})
    (tmp_path / "data.rdx").write_bytes(gzip.compress(index))
    assert load("r_data").character_vectors(tmp_path / "data") == {"novel": lines}


def test_other_files_are_not_taken_for_r_data(load: Callable[[str], ModuleType], tmp_path: Path) -> None:
    (tmp_path / "data.rdx").write_bytes(gzip.compress(b"something else"))
    (tmp_path / "data.rdb").write_bytes(b"")
    with pytest.raises(ValueError, match="not R data"):
        load("r_data").character_vectors(tmp_path / "data")


# --- text ------------------------------------------------------------------------------------------------------------


def test_passages_are_whole_paragraphs_of_the_wanted_length(load: Callable[[str], ModuleType]) -> None:
    paragraph = " ".join(["word"] * 49) + " end."
    lines = ["CHAPTER I", "", *[part for _ in range(9) for part in (paragraph, "")]]
    passages = load("corpora")._passages(lines)
    assert [len(record["text"].split()) for record in passages] == [150, 150, 150]
    assert all("CHAPTER" not in record["text"] for record in passages)


def test_split_keeps_evaluation_apart(load: Callable[[str], ModuleType]) -> None:
    records = [{"text": f"Passage {i % 40}"} for i in range(100)]
    train, evaluation = load("corpora").split(records, "text", 10, 100)
    texts = [record["text"] for record in [*train, *evaluation]]
    assert len(evaluation) == 10 and len(train) == 30 and len(set(texts)) == 40
    assert load("corpora").split(records, "text", 10, 100) == [train, evaluation]


# --- the folder ------------------------------------------------------------------------------------------------------


def test_a_part_is_built_once_and_anew_when_its_recipe_changes(
    load: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    prepare = load("prepare")
    folder = tmp_path / "part"

    def fill(target: Path) -> dict[str, object]:
        (target / "file").write_text("contents")
        return {"source": "here"}

    assert not prepare.is_prepared(folder, "one")
    prepare.build(folder, "one", fill)
    assert prepare.is_prepared(folder, "one") and not prepare.is_prepared(folder, "two")
    assert json.loads((folder / prepare.STAMP).read_text())["source"] == "here"
    (folder / "file").write_text("cut")
    assert not prepare.is_prepared(folder, "one")
    prepare.build(folder, "two", fill)
    assert prepare.is_prepared(folder, "two")


def test_an_interrupted_part_leaves_the_old_one_and_nothing_else(
    load: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    prepare = load("prepare")

    def fill(target: Path) -> dict[str, object]:
        (target / "file").write_text("good")
        return {}

    def fail(target: Path) -> dict[str, object]:
        (target / "file").write_text("half")
        raise OSError("disk full")

    prepare.build(tmp_path / "part", "one", fill)
    with pytest.raises(OSError, match="disk full"):
        prepare.build(tmp_path / "part", "two", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["part"]
    assert (tmp_path / "part" / "file").read_text() == "good"


def test_what_cannot_be_fetched_is_said_in_words(
    load: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = load("fetch")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    package = fetch.Pinned("no-such-package", "1.0", "no_such_package-1.0.tar.gz", "0" * 64, "none")
    with pytest.raises(fetch.FetchError, match=r"no-such-package==1\.0"):
        fetch.pip_file(package, tmp_path / "cache")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(fetch.FetchError, match="has no apt-get"):
        fetch.apt_unpacked("no-such-package", tmp_path / "cache")
    assert not any((tmp_path / "cache").iterdir())


# --- run.sh ----------------------------------------------------------------------------------------------------------


def test_an_unknown_dtype_is_refused() -> None:
    environment = {**os.environ, "QUICKSTART_DTYPE": "foo"}
    command = ["bash", str(QUICKSTART / "run.sh")]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == "QUICKSTART_DTYPE=foo: must be auto, fp32 or bf16\n"
