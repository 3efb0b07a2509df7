"""Memory of processes that dispatch does not see: sizes by hand."""

from __future__ import annotations

import pytest

from megatron_mux.gpus import Gpu
from megatron_mux.memory import untraced
from megatron_mux.memory.sizes import MIB


@pytest.mark.parametrize(
    ("capability", "config", "size"),
    [
        ((8, 0), None, 8_519_680),
        ((7, 5), None, 8_519_680),
        ((9, 0), None, 32 * MIB),
        ((12, 0), None, 32 * MIB),
        ((9, 0), ":4096:2:16:8", 8_519_680),
        ((9, 0), ":0:0", 0),
        ((8, 0), "nonsense", 8_519_680),
    ],
)
def test_workspaces_of_cublas(
    capability: tuple[int, int], config: str | None, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if config is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
    assert untraced.cublas_of(Gpu(capability, False)) == size
