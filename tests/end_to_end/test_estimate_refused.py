"""What `tools/estimate_memory.py` refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_mux.memory.trace.tracer import Tracer
from megatron_mux.memory.worker import WorkerError
from tests.end_to_end.estimating import (
    OPT,
    OURS,
    Call,
    cache,
    estimate,
    tasks,
    tracer,
)
from tests.end_to_end.test_plans import tool
from tests.unit.memory.configs import CONFIGS, write

__all__ = ["cache", "estimate", "tasks", "tracer"]  # fixtures


def test_a_step_that_cannot_be_traced_is_refused(estimate: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise WorkerError("no GPU can be pretended")

    monkeypatch.setattr(Tracer, "step", fail)
    status, output, errors = estimate(OPT, "--json", "--method", "trace")
    (line,) = errors.splitlines()
    assert status == 2 and not output and "its step cannot be traced: no GPU can be pretended" in line


@pytest.mark.parametrize(
    ("config", "more", "said"),
    [
        (OPT, ["--gpus", "0"], "--gpus: must be a whole number of at least 1"),
        (OPT, ["--gpus", "100000000"], "--gpus 100000000: must be at most"),
        (OPT, ["--gpu-memory", "16 gigs"], "--gpu-memory: must be a size such as 16GiB"),
        (OPT, ["--gpu-memory", "16"], "--gpu-memory: 16 bytes is no GPU's: give a unit, such as 80GiB"),
        (OPT, ["--sequence-length", "1"], "--sequence-length: must be a whole number of at least 2"),
        (OPT, ["--sequence-length", "4096"], "--sequence-length 4096: is more than the 2048 positions"),
        (CONFIGS["bigscience/bloom-560m"], ["--sequence-length", "99999999"], "must be at most"),
        (OPT, ["--batch-size", "99999999"], "--batch-size 99999999: must be at most"),
        (OPT, ["--method", "guess"], "--method guess: must be one of all, ours, trace, dry-run"),
        (OPT, ["--optimizer", "adam"], "--optimizer: invalid choice: 'adam' (choose from"),
        (
            OURS,
            ["--method", "trace", "--optimizer", "adamw_8bit"],
            "--optimizer adamw_8bit: its kernels are bitsandbytes' own, and not traced: use --method ours",
        ),
        (OPT, ["--device", "H9000"], "--device H9000: is not known: choose from B200"),
        (OPT, ["--tasks", "nowhere.yaml"], "nowhere.yaml"),
        (OPT, ["--tasks", "x.yaml", "--batch-size", "4"], "--batch-size: --tasks defines it"),
        (OPT, ["--plot", "nowhere/memory.svg", "--method", "ours"], "there is no directory nowhere"),
        (OPT, ["--model", "nowhere"], "nowhere cannot be read: No such file"),
        (
            {
                "model_type": "deepseek_v3",
                "num_hidden_layers": 2,
                "hidden_size": 256,
                "vocab_size": 100,
                "n_routed_experts": 8,
                "moe_intermediate_size": 64,
            },
            ["--method", "ours"],
            "the attention of model_type 'deepseek_v3' is not understood",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    estimate: Call, config: object, more: list[str], said: str
) -> None:
    status, output, errors = estimate(config, *more)
    assert status == 2 and not output
    (line,) = errors.splitlines()
    assert line.startswith("estimate_memory.py: ") and said in line


def test_lengths_that_contradict(estimate: Call, tasks: str, tmp_path: Path) -> None:
    _, output, errors = estimate(OURS, "--tasks", tasks, "--sequence-length", "32")
    assert not output and "task 'a': data.max_length: 64 is more than --sequence-length 32" in errors
    assert len(errors.splitlines()) == 2, "one line for each task"
    short = {**OURS, "max_position_embeddings": 66}
    _, output, errors = estimate(short, "--tasks", tasks)
    (line,) = errors.splitlines()
    assert not output and "task 'b': data.max_length: 64 plus 4 virtual tokens is more than the 66" in line
    command = ["--model", str(tmp_path), "--gpus", "1", "--gpu-memory", "1GiB"]
    assert tool("estimate_memory").main([*command, "--tasks", tasks]) == 2, "of the short model still"
    write(tmp_path, OURS)
    assert tool("estimate_memory").main([*command, "--tasks", tasks]) == 0, "the file says all"
    assert tool("estimate_memory").main(command) == 2
