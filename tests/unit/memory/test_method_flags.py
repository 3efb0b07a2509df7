"""Flags that a method does not look at, and GPUs without bf16, through the tool's own parser."""

from __future__ import annotations

from argparse import Namespace

import pytest

from megatron_mux.cli.estimate import parse
from megatron_mux.errors import UserError

TASKS = ["--tasks", "tasks.yaml"]


def parsed(*words: str) -> Namespace:
    usual = ["--model", "m", "--gpus", "2", "--gpu-memory", "16GiB"]
    return parse([*usual, *words])


@pytest.mark.parametrize(
    "words",
    [
        ["--method", "ours", "--recompute", "full"],
        ["--method", "all", "--plan", "p"],
        ["--method", "all", "--backbone-weights", "sharded"],
        [*TASKS, "--optimizer", "sgd"],
        [*TASKS, "--no-master-weights"],
        [*TASKS, "--method", "trace", "--optimizer", "sgd"],
        [*TASKS, "--method", "ours", "--plan", "p"],
        [*TASKS, "--recompute", "full"],
        [*TASKS, "--method", "dry-run", "--attention", "eager"],
        [*TASKS, "--method", "dry-run", "--recompute", "full"],
        [*TASKS, "--method", "dry-run", "--backbone-weights", "sharded"],
    ],
    ids=" ".join,
)
def test_what_a_method_does_not_look_at_is_refused(words: list[str]) -> None:
    flag = [word for word in words if word.startswith("--")][-1]
    with pytest.raises(UserError) as caught:
        parsed(*words)
    (line,) = caught.value.problems
    assert line.startswith(f"{flag}: ") and "\n" not in line


@pytest.mark.parametrize(
    "words",
    [
        ["--optimizer", "sgd", "--precision", "fp32", "--attention", "eager", "--recompute", "full"],
        ["--method", "ours", "--no-master-weights", "--optimizer", "sgd"],
        ["--method", "trace", "--recompute", "full"],
        [*TASKS, "--precision", "fp32"],
        [*TASKS, "--method", "trace", "--precision", "fp16", "--attention", "eager"],
        [*TASKS, "--method", "trace", "--recompute", "full"],
        [
            *TASKS,
            "--method",
            "dry-run",
            "--plan",
            "p",
            "--recompute",
            "full",
            "--backbone-weights",
            "sharded",
        ],
        ["--device", "T4", "--precision", "fp16"],
    ],
    ids=" ".join,
)
def test_what_it_looks_at_is_taken(words: list[str]) -> None:
    parsed(*words)


@pytest.mark.parametrize(
    "words", [[], ["--method", "trace"], TASKS, [*TASKS, "--method", "dry-run", "--plan", "p"]], ids=" ".join
)
@pytest.mark.parametrize("device", ["T4", "V100"])
def test_bf16_is_refused_where_a_gpu_has_none(words: list[str], device: str) -> None:
    with pytest.raises(UserError, match=f"^--device {device}: has no bf16: use --precision fp16 or fp32$"):
        parsed(*words, "--device", device)


def test_tasks_are_not_trained_in_fp16() -> None:
    with pytest.raises(UserError, match=r"^--precision fp16: tasks are trained in bf16 or fp32"):
        parsed(*TASKS, "--precision", "fp16")
