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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BANDWIDTH = 4.3e12
TURNS = 4
"""Sets of inputs that take turns."""
Function = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """An operation.

    Attributes:
        name: Of it.
        widths: Of its inputs `[rows, 1, width]`, which all have gradients.
        ours, torch: The functions of the inputs; they return a tensor or several.
        liger: Liger-Kernel's, or None.
        forward, backward: Values a row that each direction reads and writes.
        blocks: Other settings to try: module, attribute and value, several of them at once.
    """

    name: str
    widths: tuple[int, ...]
    ours: Function
    torch: Function
    liger: Function | None
    forward: int
    backward: int
    blocks: Sequence[Sequence[tuple[Any, str, Any]]] = ()


def cases(device: str, shape: dict[str, int]) -> list[Case]:
    """The operations of a layer."""
    import torch

    from megatron_mux.kernels import fused_pointwise as fused
    from megatron_mux.kernels import pointwise, triton_pointwise, triton_rotary
    from megatron_mux.kernels.fused_pointwise import Heads, Norm

    hidden, ffn, size = shape["hidden"], shape["ffn"], shape["size"]
    queries, groups = shape["queries"], shape["groups"]
    mixed, heads = (queries + 2) * groups * size, Heads(size, queries)

    def random(*of: int) -> Any:
        return torch.randn(*of, device=device).to(torch.bfloat16 if device == "cuda" else torch.float32)

    norm = Norm(random(hidden), None, 1e-5, False)
    layer_norm = Norm(random(hidden), random(hidden), 1e-5, True)
    bias, wide_bias = random(hidden), random(ffn)
    normed = Heads(size, queries, weights=(random(size), random(size)), eps=1e-5)
    swiglu = pointwise.gated("silu")
    found: dict[tuple[int, Any], Any] = {}
    frequencies = random(size // 2)

    def of(x: Any, one: Any) -> Any:
        return None if one is None else one.to(x.dtype)

    def angles(x: Any) -> Any:
        if (len(x), x.dtype) not in found:
            turns = torch.arange(len(x), device=device).view(-1, 1, 1) * frequencies.float()
            both = turns.cos().to(frequencies.dtype), turns.sin().to(frequencies.dtype)
            found[len(x), x.dtype] = both[0].to(x.dtype), both[1].to(x.dtype)
        return found[len(x), x.dtype]

    def cast(norm: Norm, x: Any) -> Norm:
        return Norm(of(x, norm.weight), of(x, norm.bias), norm.eps, norm.centred)

    def plain_norm(x: Any, own: Norm) -> Any:
        if own.centred:
            return torch.nn.functional.layer_norm(x, (hidden,), of(x, own.weight), of(x, own.bias), own.eps)
        return torch.nn.functional.rms_norm(x, (hidden,), of(x, own.weight), own.eps)

    def plain_turn(x: Any, own: Heads) -> Any:
        query, key, value = fused.split_heads(x, own)
        if own.weights[0] is not None:
            query, key = (
                torch.nn.functional.rms_norm(part, (size,), of(x, weight), own.eps)
                for part, weight in zip((query, key), own.weights, strict=True)
            )
        return pointwise.rotate(query, *angles(x)), pointwise.rotate(key, *angles(x)), value.contiguous()

    def plain_sum(x: Any, bias: Any, residual: Any, own: Norm) -> Any:
        total = residual + (x if bias is None else x + of(x, bias))
        return total, plain_norm(total, own)

    def turn(x: Any, own: Heads) -> Any:
        weights = tuple(of(x, weight) for weight in own.weights)
        return fused.turn(x, angles(x), Heads(size, queries, weights=weights, eps=own.eps))

    warps = [[(triton_pointwise, "norm_warps", lambda width, count=count: count)] for count in (4, 8, 16)]
    inner = [
        [(triton_pointwise, "BLOCK", block), (triton_pointwise, "ACTIVATION_WARPS", count)]
        for block, count in ((1024, 4), (2048, 8), (4096, 4), (4096, 8))
    ]
    turns = [
        [(triton_rotary, "ELEMENTS", block), (triton_rotary, "WARPS", count)]
        for block, count in ((1024, 2), (1024, 4), (2048, 8), (4096, 4), (4096, 8))
    ]
    liger = liger_functions(norm, angles, (queries, groups, size))
    return [
        Case(
            "swiglu", (2 * ffn,), lambda x: fused.activate(x, name="silu", gate=True), swiglu,
            liger.get("swiglu"), 3 * ffn, 5 * ffn, inner,
        ),
        Case(
            "gelu with bias", (ffn,), lambda x: fused.activate(x, of(x, wide_bias), name="gelu", gate=False),
            lambda x: torch.nn.functional.gelu(x + of(x, wide_bias)), None, 2 * ffn, 3 * ffn,
        ),
        Case(
            "norm of the hidden states", (hidden,), lambda x: fused.fork(x, cast(norm, x)),
            lambda x: (x.view_as(x), plain_norm(x, norm)), liger.get("norm"), 2 * hidden, 4 * hidden, warps,
        ),
        Case(
            "residual sum and norm", (hidden, hidden),
            lambda x, y: fused.join(x, None, y, None, cast(norm, x)),
            lambda x, y: plain_sum(x, None, y, norm), liger.get("sum"), 4 * hidden, 4 * hidden, warps,
        ),
        Case(
            "sum with bias and LayerNorm", (hidden, hidden),
            lambda x, y: fused.join(x, of(x, bias), y, None, cast(layer_norm, x)),
            lambda x, y: plain_sum(x, bias, y, layer_norm), None, 4 * hidden, 4 * hidden,
        ),
        Case(
            "norm before and after the sum", (hidden, hidden),
            lambda x, y: fused.join(x, None, y, cast(norm, x), cast(norm, x)),
            lambda x, y: plain_sum(plain_norm(x, norm), None, y, norm), None, 4 * hidden, 6 * hidden,
        ),
        Case(
            "queries, keys, values", (mixed,), lambda x: turn(x, heads), lambda x: plain_turn(x, heads),
            liger.get("turn"), 2 * mixed, 2 * mixed, turns,
        ),
        Case(
            "the same, normalised", (mixed,), lambda x: turn(x, normed), lambda x: plain_turn(x, normed),
            None, 2 * mixed, 2 * mixed + (queries + 1) * groups * size, turns[:2],
        ),
    ]  # fmt: skip


def liger_functions(norm: Any, angles: Function, heads: tuple[int, int, int]) -> dict[str, Function]:
    """Liger-Kernel's functions, those that are importable."""
    found: dict[str, Function] = {}
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
        from liger_kernel.ops.rope import LigerRopeFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    except ImportError:
        return found
    queries, groups, size = heads

    def turn(x: Any) -> Any:
        query, key, value = x.reshape(len(x), groups, -1).split([queries * size, size, size], dim=-1)
        query = query.reshape(1, len(x), -1, size).transpose(1, 2)
        key = key.reshape(1, len(x), -1, size).transpose(1, 2)
        cos, sin = (one.squeeze(1).repeat(1, 2).unsqueeze(0) for one in angles(x))
        query, key = LigerRopeFunction.apply(query, key, cos, sin)
        return query, key, value.contiguous()

    found["swiglu"] = lambda x: LigerSiLUMulFunction.apply(*x.chunk(2, dim=-1))
    found["norm"] = lambda x: (
        x.view_as(x), LigerRMSNormFunction.apply(x, norm.weight, norm.eps, 0.0, "llama", False)
    )  # fmt: skip
    found["turn"] = turn
    try:
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    except ImportError:
        return found
    found["sum"] = lambda x, y: LigerFusedAddRMSNormFunction.apply(
        x, y, norm.weight, norm.eps, 0.0, "llama", False
    )[::-1]
    return found


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

    from megatron_mux.kernels import fused_pointwise, triton_pointwise

    if not is_gpu:
        fused_pointwise.pointwise_kernels = lambda x: None if x.dtype == torch.float64 else triton_pointwise
    shape = {"hidden": 4096, "ffn": 14336, "size": 128, "queries": 4, "groups": 8}
    if not is_gpu:
        shape = {"hidden": 64, "ffn": 96, "size": 16, "queries": 2, "groups": 2}
    name = torch.cuda.get_device_name() if is_gpu else "cpu"
    results: dict[str, Any] = {
        "device": name, "torch": torch.__version__, "triton": triton.__version__, "cases": {}
    }  # fmt: skip
    timer, own = Timer(args.device), cases(args.device, shape)

    def write() -> None:
        args.out.write_text(json.dumps(results, indent=1) + "\n")

    def attempt(function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as error:  # one that fails keeps no other from being measured
            return f"{type(error).__name__}: {error}"[:500]

    for case in own:
        found = results["cases"].setdefault(case.name, {})
        found["errors"] = attempt(lambda case=case: errors(case, args.device, 512 if is_gpu else 4))
        write()
    for rows in (5120, 20480) if is_gpu else (4, 6):
        for case in own:
            at = results["cases"][case.name].setdefault(f"{rows} rows", {})
            parts = (("forward", case.forward), ("backward", case.backward))
            at["floor"] = {part: rows * 2 * values / BANDWIDTH * 1e6 for part, values in parts}
            for side in ("ours", "torch", "liger"):
                function = getattr(case, side)
                if function is not None and time.monotonic() < until:
                    at[side] = attempt(
                        lambda function=function, case=case, rows=rows: timed(function, case, rows, timer)
                    )
                    write()
            print(case.name, rows, json.dumps(at), flush=True)
    for case in own:
        others = results["cases"][case.name].setdefault("other blocks, most rows", {})
        for settings in case.blocks:
            if time.monotonic() > until:
                break
            with replaced(settings) as named:
                others[named] = attempt(
                    lambda case=case: timed(case.ours, case, 20480 if is_gpu else 4, timer)
                )
            write()
    print(json.dumps({name: found["errors"] for name, found in results["cases"].items()}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
