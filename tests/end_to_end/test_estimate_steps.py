"""`tools/estimate_memory.py` on steps whose sequences are divided over several micro-batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_mux.choice.fit import SEQUENCES
from megatron_mux.cli import estimate as estimate_command
from tests.end_to_end.estimating import OPT, SHALLOW, TASKS, TWO, Call, cache, estimate, tasks, tracer

__all__ = ["cache", "estimate", "tasks", "tracer"]  # fixtures


def test_whether_a_step_is_accumulated_is_said(estimate: Call, capsys: pytest.CaptureFixture[str]) -> None:
    said = f"at least {SEQUENCES} sequences, in as many micro-batches"
    flags = ["--method", "ours", "--gpus", "1"]
    assert said in estimate(OPT, *flags)[1] and said not in estimate(OPT, *flags, "--batch-size", "2")[1]
    (one, *_) = json.loads(estimate(OPT, *flags, "--batch-size", "2", "--json")[1])["methods"]
    assert (one["batch_size"], one["micro_batches"]) == (2, 1)
    with pytest.raises(SystemExit):
        estimate_command.parse(["--help"])
    assert f"a step of at least {SEQUENCES})" in " ".join(capsys.readouterr().out.split())


def test_what_does_not_fit_at_once_fits_in_more_micro_batches(estimate: Call, tasks: str) -> None:
    Path(tasks).write_text(TASKS.replace("max_steps: 1", "max_steps: 1, gradient_accumulation_steps: 3"))

    def found(memory: str) -> dict[str, Any]:
        _, output, _ = estimate(SHALLOW, "--tasks", tasks, *TWO, "--json", "--gpu-memory", memory)
        methods: list[dict[str, Any]] = json.loads(output)["methods"]
        return next(m for m in methods if m["name"] == "2DP" and not m["details"])

    plain = found("1300MiB")
    assert (plain["micro_batches"], plain["batch_size"]) == (1, 24)
    # Half of what that leaves room for, beside the context and cuBLAS's workspaces: in each of two micro-batches.
    half = (plain["peak_process_bytes"] + plain["breakdown"]["context"] + 2 * 8_519_680) // 2
    again = found(str(half))
    assert again["fits"] and again["micro_batches"] > 1 and again["batch_size"] < 24
    assert ["--mux-micro-batches", str(again["micro_batches"])] == again["flags"][-2:]
