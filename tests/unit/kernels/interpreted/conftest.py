"""Shared by the tests that run in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import triton


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that the test launches."""
    names: list[str] = []
    run = triton.runtime.interpreter.InterpretedFunction.run

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(self.__name__)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(triton.runtime.interpreter.InterpretedFunction, "run", counted)
    return names
