"""However many processes meet a mistake, it is said once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import pretrain_mux
from megatron_mux import errors
from megatron_mux.errors import SharedError, UserError, failed_allocation, tell, told_elsewhere

Said = Callable[[int, UserError], list[str]]

ALONE = UserError("weights.safetensors cannot be read", "nor can others")
VARIABLES = ("RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
LOST = RuntimeError("Connection closed by peer")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(errors, "_has_joined", lambda: True)


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The store that torchrun keeps."""
    store = dist.TCPStore("localhost", 0, is_master=True, timeout=timedelta(seconds=10))  # type: ignore[attr-defined]
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    yield
    del store


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Said:
    """What a rank says of an error, line by line."""

    def by(rank: int, error: UserError) -> list[str]:
        monkeypatch.setenv("RANK", str(rank))
        tell(error, "program")
        return capsys.readouterr().err.splitlines()

    return by


def test_one_process_says_every_problem_on_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    tell(ALONE, "program")
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["program: weights.safetensors cannot be read", "program: nor can others"]


def test_without_a_launcher_to_ask_each_rank_says_its_own(said: Said) -> None:
    assert said(0, UserError("a")) == ["program: a"]
    assert said(2, UserError("a")) == ["program: rank 2: a"]
    assert said(0, SharedError("a")) == ["program: a"]
    assert said(2, SharedError("a")) == [], "rank 0 says it"


def test_before_joining_rank_0_speaks_for_all(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_has_joined", lambda: False)
    assert said(0, UserError("a")) == ["program: a"]
    assert said(2, UserError("a")) == []
    monkeypatch.setenv("GROUP_RANK", "1")
    assert said(8, UserError("a")) == ["program: rank 8: a"], "another machine, other files"


def test_the_first_to_meet_it_says_it(said: Said, launcher: None) -> None:
    assert said(3, UserError("a")) == ["program: rank 3: a"]
    assert said(0, UserError("a")) == [] and said(1, UserError("a")) == []
    assert said(0, UserError("b")) == ["program: b"]
    assert said(1, SharedError("c")) == ["program: c"]
    assert said(0, SharedError("c")) == []


def test_a_launcher_that_does_not_answer_silences_nobody(
    said: Said, launcher: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", "none")
    assert said(3, UserError("a")) == ["program: rank 3: a"]
    assert said(0, UserError("a")) == ["program: a"]


def test_a_lost_connection_is_explained_by_what_was_told(
    said: Said, launcher: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "_SECONDS_TO_BE_TOLD", 0.3)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not told_elsewhere(LOST), "nobody has told anything"
    said(1, UserError("a"))
    assert told_elsewhere(LOST)
    assert not told_elsewhere(torch.OutOfMemoryError("no memory")), "that is this process's own"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not told_elsewhere(LOST), "that was in an attempt before"


def test_without_a_launcher_to_ask_nothing_is_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not told_elsewhere(LOST)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not told_elsewhere(LOST)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert not told_elsewhere(LOST), "an address is missing"


def test_of_an_out_of_memory_error_the_allocation_is_said() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...\nmore")
    assert failed_allocation(error) == "Tried to allocate 2.00 GiB"
    assert failed_allocation(torch.OutOfMemoryError("nothing left")) == "nothing left"


def test_an_interrupt_before_training_is_said_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(argv: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pretrain_mux, "parse_args", interrupted)
    assert pretrain_mux.main([]) == 130
    assert capsys.readouterr().err == "pretrain_mux.py: interrupted: no task was training\n"
