"""Element-wise kernels of a frozen layer on a GPU: right to fp64, and how near they come to the memory's bandwidth.

    python benchmarks/gpu_pointwise.py OUT.json [--device cuda|cpu] [--seconds 55]

Shapes are Llama-3-8B's in bf16, at 5,120 and 20,480 rows. Each operation, forward and backward: microseconds on the GPU
of our Triton kernels, of torch's operators (what runs where Triton is missing), of Liger-Kernel's where it is
importable, and the floor: bytes that have to move at 4.3 TB/s. Then a few other block sizes. A long kernel is queued
before what is timed, so that the host is never waited for, and inputs take turns, so that no cache holds them.
On a CPU the shapes are tiny, Triton interprets its kernels, and times mean nothing: a test of this script.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from gpu_pointwise_cases import Case, Function, cases

BANDWIDTH = 4.3e12
TURNS = 4
"""Sets of inputs that take turns."""


def tensors_of(made: Any) -> list[Any]:
    """What a function returned, without None."""
    return [x for x in (made if isinstance(made, tuple) else (made,)) if x is not None]


def errors(case: Case, device: str, rows: int) -> dict[str, Any]:
    """Relative errors of results and gradients to fp64: the largest of ours, and of torch's in the same dtype."""
    import torch

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    inputs = [torch.randn(rows, 1, width, device=device).to(dtype) for width in case.widths]
    gradients = None
    found: dict[str, Any] = {}

    def run(function: Function, of: Any) -> list[Any]:
        nonlocal gradients
        own = [x.detach().to(of, copy=True).requires_grad_() for x in inputs]
        made = tensors_of(function(*own))
        if gradients is None:
            gradients = [torch.randn(*x.shape, device=device).to(dtype) for x in made]
        return [*made, *torch.autograd.grad(made, own, [g.to(of) for g in gradients])]

    wanted = run(case.torch, torch.float64)
    for name, function in (("ours", case.ours), ("torch", case.torch)):
        pairs = zip(run(function, dtype), wanted, strict=True)
        found[name] = max(float((a.double() - b).detach().norm() / b.detach().norm()) for a, b in pairs)
    found["right"] = found["ours"] <= (1e-2 if device == "cuda" else 1e-5)
    return found


class Timer:
    """Times functions on the GPU."""

    def __init__(self, device: str) -> None:
        self.device = device

    def microseconds(self, functions: Sequence[Function], repeats: int) -> float:
        """Of one call, the median of three runs of many; the functions take turns."""
        import torch

        for function in functions:
            function()
        if self.device == "cpu":
            begun = time.perf_counter()
            functions[0]()
            return (time.perf_counter() - begun) * 1e6
        took = []
        for _ in range(3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            torch.cuda._sleep(40_000_000)  # some 20 ms, in which the host runs ahead
            begin.record()
            for i in range(repeats):
                functions[i % len(functions)]()
            end.record()
            torch.cuda.synchronize()
            took.append(begin.elapsed_time(end) * 1e3 / repeats)
        return sorted(took)[1]


def timed(function: Function, case: Case, rows: int, timer: Timer) -> dict[str, float]:
    """Microseconds forward and backward."""
    import torch

    device = timer.device
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    sets = [
        [torch.randn(rows, 1, width, device=device).to(dtype).requires_grad_() for width in case.widths]
        for _ in range(TURNS if device == "cuda" else 1)
    ]
    made = [tensors_of(function(*own)) for own in sets]
    gradients = [torch.randn_like(x) for x in made[0]]

    def backward(of: int) -> Function:
        return lambda: torch.autograd.grad(made[of], sets[of], gradients, retain_graph=True)

    return {
        "forward": timer.microseconds([lambda own=own: function(*own) for own in sets], 48),
        "backward": timer.microseconds([backward(i) for i in range(len(sets))], 48),
    }


@contextmanager
def replaced(settings: Sequence[tuple[Any, str, Any]]) -> Iterator[str]:
    """Other block sizes; yields how to name them."""
    before = [getattr(owner, name) for owner, name, _ in settings]
    for owner, name, value in settings:
        setattr(owner, name, value)
    try:
        yield ", ".join(f"{name} {value(0) if callable(value) else value}" for _, name, value in settings)
    finally:
        for (owner, name, _), value in zip(settings, before, strict=True):
            setattr(owner, name, value)


class Results:
    """What is measured, written as it comes.

    Args:
        out: The file.
        about: Device and versions.
        until: By the monotonic clock: nothing new begins after it.
    """

    def __init__(self, out: Path, about: dict[str, str], until: float) -> None:
        self.found: dict[str, Any] = {**about, "cases": {}}
        self._out, self._until = out, until

    def of(self, case: Case, what: str) -> dict[str, Any]:
        """The part of a case."""
        part: dict[str, Any] = self.found["cases"].setdefault(case.name, {}).setdefault(what, {})
        return part

    def add(self, part: dict[str, Any], name: str, measure: Callable[[], Any]) -> None:
        """Measure, if there is time; one that fails keeps no other from being measured."""
        if time.monotonic() > self._until:
            return
        try:
            part[name] = measure()
        except Exception as error:  # anything may fail on a GPU
            part[name] = f"{type(error).__name__}: {error}"[:500]
        self._out.write_text(json.dumps(self.found, indent=1) + "\n")


def measure(results: Results, own: Sequence[Case], device: str) -> None:
    """Errors of all cases, then seconds by rows, then those of other blocks."""
    timer, is_gpu = Timer(device), device == "cuda"
    for case in own:
        results.add(
            results.found["cases"].setdefault(case.name, {}), "errors",
            lambda case=case: errors(case, device, 512 if is_gpu else 4),
        )  # fmt: skip
    for rows in (5120, 20480) if is_gpu else (4, 6):
        for case in own:
            at = results.of(case, f"{rows} rows")
            parts = (("forward", case.forward), ("backward", case.backward))
            at["floor"] = {part: rows * 2 * values / BANDWIDTH * 1e6 for part, values in parts}
            for side in ("ours", "torch", "liger"):
                if (function := getattr(case, side)) is not None:
                    results.add(at, side, partial(timed, function, case, rows, timer))
            print(case.name, rows, json.dumps(at), flush=True)
    for case in own:
        others = results.of(case, "other blocks, most rows")
        for settings in case.blocks:
            with replaced(settings) as named:
                results.add(others, named, partial(timed, case.ours, case, 20480 if is_gpu else 4, timer))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write results as they come."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=55.0, help="nothing new begins after these")
    args = parser.parse_args(argv)
    until = time.monotonic() + args.seconds
    is_gpu = args.device == "cuda"
    if not is_gpu:
        os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import torch
    import triton

    from megatron_mux.kernels.pointwise import functions as fused_pointwise
    from megatron_mux.kernels.pointwise import triton as triton_pointwise

    if not is_gpu:
        fused_pointwise.pointwise_kernels = lambda kind, device, dtype: (
            None if dtype == torch.float64 else triton_pointwise
        )
    shape = {"hidden": 4096, "ffn": 14336, "size": 128, "queries": 4, "groups": 8}
    if not is_gpu:
        shape = {"hidden": 64, "ffn": 96, "size": 16, "queries": 2, "groups": 2}
    name = torch.cuda.get_device_name() if is_gpu else "cpu"
    about = {"device": name, "torch": torch.__version__, "triton": triton.__version__}
    results = Results(args.out, about, until)
    measure(results, cases(args.device, shape), args.device)
    found = {name: case["errors"] for name, case in results.found["cases"].items() if "errors" in case}
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
