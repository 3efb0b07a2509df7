"""What was answered before: as long as nothing has changed that it depends on."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_mux.gpus import TABLE_VARIABLE
from megatron_mux.memory import store as module
from megatron_mux.memory.store import Answers, SavedOutput, Store

SAID = SavedOutput("one\ntwo\n", ["a warning"])


@pytest.fixture
def ask(tmp_path: Path) -> Callable[..., Answers]:
    """Answers about a model's directory and a task file."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "data.jsonl").write_text("1")
    (tmp_path / "tasks.yaml").write_text("tasks: [{data: {path: data.jsonl}, adapter: {start: adapter}}]")

    def about(width: int = 80, **more: object) -> Answers:
        arguments = Namespace(model=tmp_path / "model", tasks=tmp_path / "tasks.yaml", gpus=4, **more)
        return Answers(Store("answers", tmp_path / "kept"), arguments, width)

    return about


def test_an_answer_is_given_once(ask: Callable[..., Answers]) -> None:
    assert ask().read() is None
    ask().write(SAID)
    assert ask().read() == SAID
    assert ask(width=120).read() is None and ask(json=True).read() is None


@pytest.mark.parametrize(
    "name", ["model/config.json", "tasks.yaml", "data.jsonl", "adapter/adapter_config.json"]
)
def test_a_file_that_changes_is_looked_at_again(
    ask: Callable[..., Answers], tmp_path: Path, name: str
) -> None:
    ask().write(SAID)
    with (tmp_path / name).open("a") as file:
        file.write(" ")
    assert ask().read() is None


def test_a_file_written_anew_may_say_the_same(ask: Callable[..., Answers], tmp_path: Path) -> None:
    ask().write(SAID)
    file = tmp_path / "model" / "config.json"
    text = file.read_text()
    file.unlink()
    file.write_text(text)
    assert ask().read() == SAID
    (tmp_path / "data.jsonl").write_text("2" * (1 << 21))
    ask().write(SAID)
    assert ask().read() == SAID
    (tmp_path / "data.jsonl").write_text("3" * (1 << 21))
    assert ask().read() is None, "a large one is not read"


def test_what_is_no_part_of_a_model_may_be_written_beside_it(
    ask: Callable[..., Answers], tmp_path: Path
) -> None:
    ask().write(SAID)
    (tmp_path / "model" / "answer.json").write_text("{}")
    assert ask().read() == SAID


def test_the_environment_and_the_code_count(
    ask: Callable[..., Answers], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask().write(SAID)
    with monkeypatch.context() as patch:
        patch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        assert ask().read() is None
    assert ask().read() == SAID
    monkeypatch.setattr(module, "versions", lambda: {"sources": "other"})
    assert ask().read() is None


def test_a_users_table_of_gpus_counts(
    ask: Callable[..., Answers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask().write(SAID)
    (tmp_path / "gpus.toml").write_text('[A100]\nlike = "A100"\nlink_gb_s = 32\n')
    monkeypatch.setenv(TABLE_VARIABLE, str(tmp_path / "gpus.toml"))
    assert ask().read() is None
