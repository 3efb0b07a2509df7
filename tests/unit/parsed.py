"""Flags of a run, parsed in a directory with a backbone and tasks (the fixture `place`)."""

from __future__ import annotations

import pytest

from megatron_mux.arguments import MuxArguments, parse_args
from megatron_mux.errors import UserError

REQUIRED = ["--backbone", "model", "--mux-tasks", "tasks.yaml"]


def parse(*more: str) -> MuxArguments:
    return parse_args([*REQUIRED, *more])


def problems_of(*argv: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        parse_args(argv)
    assert all("\n" not in problem for problem in caught.value.problems)
    return caught.value.problems
