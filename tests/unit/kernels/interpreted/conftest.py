"""Shared by the tests that run in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from triton.runtime import interpreter


class LaunchRecord:
    """Names of the kernels that were launched, and where each program of the current launch stores."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._stored: dict[tuple[int, ...], list[Any]] = {}

    def store(self, program: tuple[int, ...], pointers: Any, mask: Any) -> None:
        """Note the addresses that a program stores to."""
        pointers, mask = np.broadcast_arrays(pointers, mask)
        self._stored.setdefault(program, []).append(pointers[mask])

    def finish(self) -> None:
        """Check that no two programs of the launch stored to one address: on a GPU their order is anyone's guess."""
        by_program = [np.unique(np.concatenate(parts)) for parts in self._stored.values()]
        self._stored = {}
        together = np.concatenate([*by_program, np.empty(0, np.uint64)])
        assert len(np.unique(together)) == len(together), f"programs of {self.names[-1]} store to one address"


@pytest.fixture(autouse=True)
def record(monkeypatch: pytest.MonkeyPatch) -> Iterator[LaunchRecord]:
    """Every launch of every test in this folder is held to one program for each address."""
    found = LaunchRecord()
    run = interpreter.InterpretedFunction.run

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.names.append(self.__name__)
        result = run(self, *args, **kwargs)
        found.finish()
        return result

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", recorded)
    for name in ("create_masked_store", "create_atomic_rmw", "create_atomic_cas"):
        monkeypatch.setattr(interpreter.InterpreterBuilder, name, _recording(name, found))
    yield found


def _recording(name: str, record: LaunchRecord) -> Any:
    made = getattr(interpreter.InterpreterBuilder, name)

    def call(self: Any, *args: Any) -> Any:
        pointers = args[1 if name == "create_atomic_rmw" else 0].data
        masks = {"create_masked_store": 2, "create_atomic_rmw": 3}
        mask = args[masks[name]].data if name in masks else True
        record.store(tuple(self.grid_idx), pointers, mask)
        return made(self, *args)

    return call


@pytest.fixture
def launches(record: LaunchRecord) -> list[str]:
    """Names of the kernels that the test launches."""
    return record.names
