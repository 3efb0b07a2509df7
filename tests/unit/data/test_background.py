"""Tokenising in a process of its own gives what tokenising here gives, tells what is wrong, and can be cancelled."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from megatron_mux.data.background import BackgroundTokenising, work
from megatron_mux.data.dataset import DataFiles
from megatron_mux.data.token_cache import TokenCacheWriter
from megatron_mux.data.tokenised_file import Reading, TokenisedFile, as_source
from megatron_mux.errors import UserError


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A directory with a tokenizer."""
    directory = tmp_path_factory.mktemp("backbone")
    tokenizer.save_pretrained(directory)
    return directory


def reading(path: str | Path) -> Reading:
    return Reading(as_source(path))


def key(path: str) -> str:
    return reading(path).key


def records(path: Path, count: int) -> str:
    path.write_text("".join(json.dumps({"text": f"hello world {i}"}) + "\n" for i in range(count)))
    return str(path)


def wait(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_it_gives_what_tokenising_here_gives(
    tmp_path: Path, backbone: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two good files, a bad one, and one that is not there."""
    monkeypatch.setenv("RANK", "1")  # of this process, not of the other
    good = records(tmp_path / "good.jsonl", 30)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "a"}\n{\n')
    missing = str(tmp_path / "missing.jsonl")
    process = BackgroundTokenising(
        backbone, [reading(path) for path in (good, bad, missing)], tmp_path / "tokens", niceness=0
    )
    wait(process.poll)
    assert process.results is not None
    found = process.results[key(good)]
    assert isinstance(found, TokenisedFile)

    def forbidden(*arguments: object) -> None:
        raise AssertionError("tokenised again")

    monkeypatch.setattr(TokenCacheWriter, "__init__", forbidden)
    files = DataFiles(tokenizer, print, tmp_path / "tokens", process.results)
    data = files.open(good, 8)
    assert len(data) == 30 and Path(data.tokenised[0].entry).parent == tmp_path / "tokens"
    for path, said in ((str(bad), f"{bad}: line 2: not valid JSON"), (missing, f"{missing}: no such file")):
        with pytest.raises(UserError) as caught:
            files.open(path, 8)
        assert str(caught.value).startswith(said)


def test_the_end_of_its_process_is_an_error(tmp_path: Path, backbone: Path) -> None:
    path = records(tmp_path / "data.jsonl", 3)
    process = BackgroundTokenising(backbone, [reading(path)], None, niceness=0)
    process._process.kill()
    wait(process.poll)
    assert process.results is not None
    assert str(process.results[key(path)]) == f"{path}: the process that tokenises was killed by signal 9"
    process = BackgroundTokenising(tmp_path / "nowhere", [reading(path)], None, niceness=0)
    wait(process.poll)
    assert process.results is not None
    said = str(process.results[key(path)])
    assert said.startswith(f"{path}: the process that tokenises failed: ") and "nowhere" in said


def test_it_can_be_cancelled(tmp_path: Path, backbone: Path) -> None:
    process = BackgroundTokenising(
        backbone, [reading(records(tmp_path / "data.jsonl", 3))], tmp_path / "tokens"
    )
    assert not process.poll()
    process.cancel()
    with pytest.raises(ProcessLookupError):
        os.kill(process._process.pid, 0)
    assert not (tmp_path / "tokens").exists()


def test_it_has_idle_priority_and_leaves_with_its_parent(
    tmp_path: Path, backbone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nice: list[int] = []
    mine, its = Pipe()
    monkeypatch.setattr(os, "nice", nice.append)
    path = records(tmp_path / "data.jsonl", 1000)
    monkeypatch.setattr("subprocess.Popen", lambda command, **more: None)
    asks = BackgroundTokenising(backbone, [reading(path)], tmp_path / "tokens")
    request = (backbone, asks.readings, tmp_path / "tokens", 19)
    mine.send(request)
    work(its)
    assert nice == [19] and list(mine.recv()) == [key(path)]
    (entry,) = (tmp_path / "tokens").iterdir()
    shutil.rmtree(entry)
    mine.send(request)
    mine.close()
    with pytest.raises(SystemExit):
        work(its)
    assert list((tmp_path / "tokens").iterdir()) == []
