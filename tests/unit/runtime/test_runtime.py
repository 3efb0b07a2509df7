"""Sizes, environments and devices; what importing must not do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from megatron_mux import runtime
from megatron_mux.errors import UserError
from megatron_mux.runtime import has_varlen

pytestmark = pytest.mark.versions


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_one_process_is_a_whole_world() -> None:
    parallel = runtime.initialize(device="cpu")
    assert (parallel.rank, parallel.world_size) == (0, 1)
    assert (parallel.tp_size, parallel.pp_size, parallel.dp_size) == (1, 1, 1)
    assert parallel.is_first_stage and parallel.is_last_stage
    assert runtime.initialize(device="cpu") is parallel
    runtime.shutdown()
    runtime.shutdown()
    assert runtime.initialize(device="cpu") is not parallel


@pytest.mark.parametrize("start", [runtime.initialize, runtime.Parallel.alone])
def test_a_cpu_does_without_amx_unless_it_is_asked_for(
    start: Callable[..., runtime.Parallel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(runtime.ISA_VARIABLE, raising=False)
    runtime.Parallel.alone("meta")
    assert runtime.ISA_VARIABLE not in os.environ
    start(device="cpu")
    assert os.environ[runtime.ISA_VARIABLE] == runtime.ISA
    monkeypatch.setenv(runtime.ISA_VARIABLE, "DEFAULT")
    start(device="cpu")
    assert os.environ[runtime.ISA_VARIABLE] == "DEFAULT"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"tensor_parallel": 2}, "torchrun --nproc-per-node 2"),
        ({"pipeline_parallel": 3}, "start a multiple of 3"),
        ({"tensor_parallel": 0}, "tensor parallel size must be at least 1"),
        ({"pipeline_parallel": -1}, "pipeline parallel size must be at least 1"),
        ({"sequence_parallel": True}, "at least 2"),
    ],
)
def test_sizes_that_cannot_be(arguments: dict[str, int], said: str) -> None:
    with pytest.raises(UserError, match=said):
        runtime.initialize(**arguments, device="cpu")  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(UserError, match="CPU only"):
        runtime.initialize(device="cuda")


def test_a_torch_without_variable_length_attention_is_refused_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert runtime._choose_device(None) == torch.device("cuda", 0) and chosen
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    has_varlen.cache_clear()
    try:
        with pytest.raises(UserError, match=r"torch .* has no variable-length .* torch 2.11 or newer"):
            runtime._choose_device(None)
        assert runtime._choose_device("cpu") == torch.device("cpu")
    finally:
        has_varlen.cache_clear()


def alone(code: str, **environment: str) -> str:
    """Run Python in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ".", **environment},
        check=False,
    )
    return done.stdout + done.stderr


def test_an_incomplete_environment_is_refused() -> None:
    code = "from megatron_mux import runtime; runtime.initialize(device='cpu')"
    said = alone(code, RANK="0", WORLD_SIZE="2")
    assert "UserError" in said and "MASTER_ADDR, MASTER_PORT" in said
    said = alone(code, RANK="zero", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="1")
    assert "RANK must be a number" in said


def test_leaving_gives_torch_back() -> None:
    runtime.shutdown()
    theirs = torch.cuda.current_device, torch.cuda.synchronize
    runtime.initialize(device="cpu")
    assert str(torch.cuda.current_device()) == "cpu"
    torch.cuda.synchronize()
    runtime.shutdown()
    assert theirs == (torch.cuda.current_device, torch.cuda.synchronize)


def test_importing_changes_nothing() -> None:
    code = (
        "import sys, torch; before = torch.cuda.current_device, torch.cuda.synchronize\n"
        "import megatron_mux.runtime, megatron_mux.backbone\n"
        "assert before == (torch.cuda.current_device, torch.cuda.synchronize)\n"
        "assert not any(m.split('.')[0] in ('megatron', 'transformers') for m in sys.modules), 'heavy'\n"
        "print('fine')"
    )
    assert alone(code).strip().endswith("fine")
