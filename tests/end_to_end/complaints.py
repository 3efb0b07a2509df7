"""How a run that was given something wrong must behave."""

from __future__ import annotations

from collections.abc import Sequence

from tests.end_to_end.forked import Fault, Server

# What is wrong with tasks, flags and adapters is found before any weight of the backbone is read.
NO_WEIGHTS = Fault("megatron_mux.backbone.model:Backbone.load", 1, "forbidden")


def complaints(server: Server, arguments: Sequence[str], before_weights: bool = True) -> list[str]:
    """What a run says on standard error, line by line, after the checks that hold for every mistake."""
    run = server.run(arguments, fault=NO_WEIGHTS if before_weights else None)
    check_manners(run.status, run.errors)
    return [line.removeprefix("pretrain_mux.py: ") for line in run.errors.splitlines()]


def check_manners(status: int, errors: str) -> None:
    """Exit status 2 and nothing but lines of our own."""
    assert status == 2, errors
    assert "Traceback" not in errors
    assert errors.strip()
    for line in errors.splitlines():
        assert line.startswith("pretrain_mux.py: "), errors
        assert len(line) < 600, line
