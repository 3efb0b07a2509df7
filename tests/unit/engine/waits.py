"""Which operators of a step wait for a GPU, seen on one that is not there. Runs in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.host_waits import host_waits
from megatron_mux.dry_run.execute import execute_dry_run, import_all
from megatron_mux.dry_run.process import Part, in_forks
from megatron_mux.engine import step_runner
from megatron_mux.memory.fake_gpu.device import DEVICE
from megatron_mux.pipeline.execute import execute


class Waits(TorchDispatchMode):
    """Notes operators that make the host wait for the GPU, among them copies to and from it that block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if host_waits(func, args, kwargs or {}):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


OFFENDERS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "a truth value": lambda x: bool(x.sum() > 0),
    "to the host": lambda x: x.cpu(),
    "to the host, pageable": lambda x: x.to("cpu", non_blocking=True),
    "copied to the host, pageable": lambda x: torch.ones(3).copy_(x, non_blocking=True),
    "a histogram": lambda x: x.histc(4),
    "scattered where a mask is true": lambda x: x.masked_scatter(x > 0, torch.ones_like(x)),
    "from the host": lambda x: torch.ones(3).to(x.device),
    "copied from the host": lambda x: x.copy_(torch.ones(3)),
    "nonzero": lambda x: x.nonzero(),
    "indexed by a mask": lambda x: x[x > 0],
    "put where a mask is true": lambda x: x.__setitem__(x > 0, torch.ones_like(x)),
    "repeated as a tensor says": lambda x: x.repeat_interleave(x.long()),
}
HARMLESS: dict[str, Callable[[torch.Tensor], object]] = {
    "a copy that does not block": lambda x: torch.ones(3).to(x.device, non_blocking=True),
    "a selection": lambda x: torch.where(x > 0, x, 0.0),
    "a copy on the GPU": lambda x: x.clone().copy_(x),
    "one value where a mask is true": lambda x: x.__setitem__(x > 0, 1.0),
    "indexed by numbers": lambda x: x[torch.zeros_like(x).long()],
}


def waits_of_all(parts: Sequence[Part]) -> list[tuple[list[list[str]], dict[str, bool]]]:
    """`waits_of` each part, in processes of their own that share what is imported."""
    import_all(parts[0][0])
    return in_forks(waits_of, parts, 2)


def waits_of(part: Part) -> tuple[list[list[str]], dict[str, bool]]:
    """Run a rank's steps on a GPU that is not there.

    Returns:
        What waited in each burst of steps, from its first action to its last; and whether each of `OFFENDERS` and
        `HARMLESS` was noted.
    """
    bursts: list[list[str]] = []
    noted: dict[str, bool] = {}
    real = execute

    def watched(*args: Any, **kwargs: Any) -> None:
        for name, operation in (OFFENDERS | HARMLESS).items() if not noted else ():
            # The size of some results depends on values, which a fake GPU does not have.
            with Waits() as waits, suppress(DynamicOutputShapeException):
                operation(torch.ones(3, device=DEVICE))
            noted[name] = bool(waits.found)
        with Waits() as waits:
            real(*args, **kwargs)
        bursts.append(waits.found)

    with mock.patch.object(step_runner, "execute", watched):
        execute_dry_run(*part)
    return bursts, noted
