"""Streams that are kept between runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from megatron_mux.memory import store
from megatron_mux.memory.store import Store
from megatron_mux.memory.stream.events import Moment, Stream, StreamBuilder
from megatron_mux.memory.trace.case import Case
from megatron_mux.memory.trace.tracer import Tracer

CASE = Case({"model_type": "llama"}, 2, 1, 8)


class CountingTracer(Tracer):
    """Notes what is traced, and makes a stream of as many blocks as there are layers."""

    def __init__(self, kept: Store) -> None:
        super().__init__(kept=kept)
        self.asked: list[Case] = []

    def submit(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Future[Any]:
        (case,) = arguments
        self.asked.append(case)
        future: Future[Stream] = Future()
        future.set_result(_stream(case.layers))
        return future


def _stream(blocks: int) -> Stream:
    builder = StreamBuilder()
    for size in range(blocks):
        builder.allocate(size + 1, Moment("load"))
    return builder.done()


def _ask(directory: Path) -> int:
    """How many cases had to be traced."""
    with CountingTracer(Store("traces", directory)) as tracer:
        assert tracer.step(CASE) == _stream(2)
    return len(tracer.asked)


def test_a_stream_is_traced_once(tmp_path: Path) -> None:
    assert [_ask(tmp_path), _ask(tmp_path)] == [1, 0]


@pytest.mark.parametrize("damage", ["", "{}", "[]\n{}", "cut", "changed"])
def test_a_damaged_file_is_traced_anew(tmp_path: Path, damage: str) -> None:
    _ask(tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_text()
    file.write_text({"cut": whole[:-9], "changed": whole.replace("[1,2]", "[1,3]")}.get(damage, damage))
    assert file.read_text() != whole
    assert [_ask(tmp_path), _ask(tmp_path)] == [1, 0]


def test_another_version_is_traced_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _ask(tmp_path)
    monkeypatch.setattr(store, "versions", lambda: {"torch": "another"})
    assert [_ask(tmp_path), _ask(tmp_path)] == [1, 0]


def test_a_directory_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert [_ask(tmp_path / "file"), _ask(tmp_path / "file")] == [1, 1]
