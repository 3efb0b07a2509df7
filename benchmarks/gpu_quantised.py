"""Seconds of dequantising on a GPU against what its memory allows, and whether the bits are those of a CPU.

    python benchmarks/gpu_quantised.py --output FILE.json [--seconds S] [--device cpu]

Matrices have the size of Llama-3-8B's `linear_fc1`, those of experts the size of Qwen3-30B-A3B's in one layer. Floors
count bytes read and written at `--bandwidth`. Each result is written as soon as there is one; none begins after
`--seconds`. On a CPU, sizes are tiny, kernels run in Triton's interpreter, and seconds mean nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

import torch
from torch import Tensor

Measured = tuple[str, Callable[[], dict[str, Any]]]
FC1, EXPERTS, ROWS = (28672, 4096), (128, 1536, 2048), 5120
TINY_FC1, TINY_EXPERTS, TINY_ROWS = (64, 256), (4, 16, 128), 32
FORMATS = ("nf4", "nf4 double", "int8", "int8 blocks", "fp8", "fp8 blocks")


class Bench:
    """Matrices of random codes, and what is measured with them.

    Args:
        device: Where kernels run.
        bandwidth: Bytes a second of its memory.
    """

    def __init__(self, device: torch.device, bandwidth: float) -> None:
        self.device, self.bandwidth = device, bandwidth
        self.on_gpu = device.type == "cuda"
        self.fc1, self.experts, self.rows = (
            (FC1, EXPERTS, ROWS) if self.on_gpu else (TINY_FC1, TINY_EXPERTS, TINY_ROWS)
        )
        # The interpreter truncates to bf16.
        self.dtypes = (torch.float32, torch.float16, torch.bfloat16)[: 3 if self.on_gpu else 2]

    def matrix(self, form: str, rows: int, columns: int) -> Any:
        """A matrix of random codes on the device."""
        from megatron_mux.quantised import eight_bit, nf4

        generator = torch.Generator(self.device).manual_seed(0)
        random = partial(torch.randint, generator=generator, dtype=torch.uint8, device=self.device)
        uniform = partial(torch.rand, generator=generator, device=self.device)
        if form.startswith("nf4"):
            blocks = columns // nf4.BLOCK
            codes = random(256, (rows, columns // 2))
            if form == "nf4":
                return nf4.Nf4Matrix.of(codes, uniform(rows, blocks)).on(self.device)
            scales = uniform(-(-rows * blocks // nf4.NESTED_BLOCK))
            offset = torch.tensor(0.5, device=self.device)
            return nf4.Nf4Matrix.of(codes, random(256, (rows, blocks)), scales, offset).on(self.device)
        method: Any = form[:4].strip()
        scales = uniform(rows, columns // 128 if "blocks" in form else 1)
        return eight_bit.EightBitMatrix.of(random(256, (rows, columns)), scales, method)

    def seconds(self, function: Callable[[], Any], repeats: int = 20) -> float:
        """The median of some calls, after three others."""
        found = []
        for _ in range(3 if self.on_gpu else 1):
            function()
        for _ in range(repeats if self.on_gpu else 1):
            if not self.on_gpu:
                start = time.perf_counter()
                function()
                found.append(time.perf_counter() - start)
                continue
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            function()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(found)

    def against_floor(self, taken: float, moved: float) -> dict[str, Any]:
        """A time beside the least that moving the bytes takes."""
        floor = moved / self.bandwidth
        return {
            "us": round(1e6 * taken, 1), "floor_us": round(1e6 * floor, 1), "over_floor": round(taken / floor, 3),
            "gb_per_s": round(moved / taken / 1e9),
        }  # fmt: skip

    # -- what is measured

    def equal(self, form: str) -> dict[str, Any]:
        """Whether the kernel's bits are those of the loops on a CPU, for each dtype of the output."""
        rows, columns = min(self.fc1[0], 1000), self.fc1[1]
        held = self.matrix(form, rows, columns)
        on_cpu = held.on(torch.device("cpu"))
        found = {}
        for dtype in self.dtypes:
            wanted = torch.empty(rows, columns, dtype=dtype)
            for part in on_cpu._row_ranges(None):
                on_cpu._loop(slice(part.start, part.stop), wanted[part.start : part.stop])
            ours = held.values(dtype).cpu()
            found[str(dtype)] = torch.equal(ours.nan_to_num(nan=12345), wanted.nan_to_num(nan=12345))
        return found

    def fill(self, form: str) -> dict[str, Any]:
        """Seconds of dequantising to bf16 by the kernel; and by loops on the GPU, as before there was one."""
        held = self.matrix(form, *self.fc1)
        place = torch.empty(self.fc1, dtype=torch.bfloat16, device=self.device)
        taken = self.seconds(lambda: held.dequantise_into(place))
        loops = self.seconds(lambda: held._loop(slice(0, 1000), place[:1000]), 5) * self.fc1[0] / 1000
        return self.against_floor(taken, held.nbytes + place.nbytes) | {"loops_us": round(1e6 * loops)}

    def tuned(self, form: str, groups: int, warps: int) -> dict[str, Any]:
        """The same with programs of other sizes."""
        from megatron_mux.kernels.dequantise import triton as triton_dequantise

        sizes = {"GROUPS": groups, "NF4_WARPS": warps, "EIGHT_BIT_WARPS": warps}
        with mock.patch.multiple(triton_dequantise, **sizes):
            held = self.matrix(form, *self.fc1)
            place = torch.empty(self.fc1, dtype=torch.bfloat16, device=self.device)
            taken = self.seconds(lambda: held.dequantise_into(place))
            return self.against_floor(taken, held.nbytes + place.nbytes)

    def written(self) -> dict[str, Any]:
        """How fast torch fills and copies memory of that size."""
        place = torch.empty(self.fc1, dtype=torch.bfloat16, device=self.device)
        other = torch.empty_like(place)
        fill = self.against_floor(self.seconds(lambda: place.fill_(1)), place.nbytes)
        copy = self.against_floor(self.seconds(lambda: place.copy_(other)), 2 * place.nbytes)
        return {"fill": fill, "copy": copy}

    def selected(self, form: str, share: int) -> dict[str, Any]:
        """Seconds where one of `share` experts has rows."""
        experts, rows, columns = self.experts
        held = self.matrix(form, experts * rows, columns)
        place = torch.empty(experts * rows, columns, dtype=torch.bfloat16, device=self.device)
        counts = (torch.arange(experts, device=self.device) % share == 0).long()
        taken = self.seconds(lambda: held.dequantise_into(place, counts))
        return self.against_floor(taken, (held.nbytes + place.nbytes) / share)

    def theirs(self) -> dict[str, Any]:
        """bitsandbytes on this GPU: whether its values are ours, and its seconds."""
        from bitsandbytes import functional

        from megatron_mux.quantised import nf4

        found: dict[str, Any] = {}
        weights = 0.05 * torch.randn(self.fc1, device=self.device, dtype=torch.bfloat16)
        for double in (False, True):
            codes, state = functional.quantize_4bit(weights, compress_statistics=double, quant_type="nf4")
            wanted = functional.dequantize_4bit(codes, state)
            rows = len(weights)
            more = (state.state2.absmax, state.offset) if double else ()
            held = nf4.Nf4Matrix.of(codes.view(rows, -1), state.absmax.view(rows, -1), *more).on(self.device)
            ours = nf4.quantise(weights.split(512), double, on_gpu=self.on_gpu)
            found[f"double {double}"] = {
                "values_equal": torch.equal(held.values(torch.bfloat16), wanted),
                "codes_equal": torch.equal(ours.rowwise["codes"], held.rowwise["codes"]),
                "us": round(1e6 * self.seconds(partial(functional.dequantize_4bit, codes, state))),
            }
        return found

    def quantise(self, form: str) -> dict[str, Any]:
        """Seconds and memory of quantising on load, and whether the bits are those of a CPU."""
        from megatron_mux.quantised import eight_bit, nf4

        make: Any = (
            partial(eight_bit.quantise, to=form) if form != "nf4" else partial(nf4.quantise, on_gpu=True)
        )
        weights = 0.05 * torch.randn(self.fc1, device=self.device, dtype=torch.bfloat16)
        if self.on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if self.on_gpu else 0
        start = time.perf_counter()
        held = make(weights.split(1024))
        if self.on_gpu:
            torch.cuda.synchronize()
        taken = time.perf_counter() - start
        peak = torch.cuda.max_memory_allocated() - before if self.on_gpu else 0
        few = weights[:256]
        ours, wanted = (make([part]) for part in (few, few.cpu()))
        equal = all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(ours.tensors, wanted.tensors, strict=True))
        return {
            "ms": round(1e3 * taken, 1), "peak_mb": round(peak / 1e6), "held_mb": round(held.nbytes / 1e6),
            "equal": equal,
        }  # fmt: skip

    def products(self) -> dict[str, Any]:
        """Seconds of a forward product of rows: in bf16, and in FP8 with scales of tensors and of rows."""
        (n, k), m, e4m3 = self.fc1, self.rows, torch.float8_e4m3fn
        x = torch.randn(m, k, device=self.device, dtype=torch.bfloat16)
        weight = torch.randn(n, k, device=self.device, dtype=torch.bfloat16)
        found: dict[str, Any] = {"bf16_us": round(1e6 * self.seconds(lambda: x @ weight.t()), 1)}
        if not self.on_gpu:
            return found
        narrow, row = weight.to(e4m3).t(), torch.ones(m, 1, device=self.device)
        one, column = torch.ones((), device=self.device), torch.ones(1, n, device=self.device)

        def quantised() -> tuple[Tensor, Tensor]:
            scale = x.abs().amax(1, keepdim=True).float().clamp(min=1e-12) / 448
            return (x / scale).clamp(-448, 448).to(e4m3), scale

        own, _ = quantised()
        product = partial(torch._scaled_mm, own, narrow, out_dtype=torch.bfloat16)
        for name, scales in (("tensors", (one, one)), ("rows", (row, column))):
            for fast in (False, True):
                run = partial(product, *scales, use_fast_accum=fast)
                found[f"fp8_{name}{'_fast' if fast else ''}_us"] = round(1e6 * self.seconds(run), 1)
        found["quantising_rows_by_torch_us"] = round(1e6 * self.seconds(quantised), 1)
        return found

    def everything(self) -> Iterator[Measured]:
        """What is measured, the most wanted first."""
        for form in FORMATS:
            yield f"equal: {form}", partial(self.equal, form)
        for form in FORMATS:
            yield f"fill: {form}", partial(self.fill, form)
        yield "torch's fill and copy", self.written
        for form, share in itertools.product(("nf4 double", "fp8"), (1, 4, 16)):
            yield f"one of {share} experts: {form}", partial(self.selected, form, share)
        yield "bitsandbytes", self.theirs
        for form in ("nf4", "int8", "fp8"):
            yield f"quantise: {form}", partial(self.quantise, form)
        yield "products", self.products
        for form, (groups, warps) in itertools.product(
            ("nf4 double", "fp8"), ((256, 4), (256, 2), (512, 4), (1024, 4), (1024, 8))
        ):
            yield (
                f"programs of {groups} groups, {warps} warps: {form}",
                partial(self.tuned, form, groups, warps),
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write each result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--bandwidth", type=float, default=4.3e12, help="bytes a second, H200: 4.3e12, H100: 3e12"
    )
    args = parser.parse_args(argv)
    start, device = time.monotonic(), torch.device(args.device)
    if args.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
        from megatron_mux.kernels.dequantise.triton import TritonDequantise
        from megatron_mux.quantised import matrix

        matrix.kernels_for = lambda place: TritonDequantise
    from megatron_mux.files import write_atomically

    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    found: dict[str, Any] = {"device": name, "torch": torch.__version__, "bandwidth": args.bandwidth}
    failed = 0
    for title, measure in Bench(device, args.bandwidth).everything():
        if time.monotonic() - start > args.seconds:
            found[title] = "not reached"
            continue
        began = time.monotonic()
        try:
            found[title] = measure()
        except Exception as error:  # what follows is measured all the same
            found[title], failed = {"error": f"{type(error).__name__}: {error}"[:500]}, failed + 1
        found[title]["seconds"] = round(time.monotonic() - began, 2)
        print(f"{title}: {found[title]}", flush=True)
        write_atomically(args.output, json.dumps(found, indent=1) + "\n")
    write_atomically(args.output, json.dumps(found, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
