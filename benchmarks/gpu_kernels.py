"""Times of our Triton kernels on a GPU, beside what moving their bytes takes at least and beside torch's operators.

    python benchmarks/gpu_kernels.py --output kernels.json                  # a minute or two
    python benchmarks/gpu_kernels.py --output kernels.json --only pointwise
    python benchmarks/gpu_kernels.py --output tiny.json --device cpu        # in Triton's interpreter, to try it out

Kernels of adapters run for eight LoRA tasks of ranks 8 to 64 on Llama-3-8B's modules, element-wise ones on a layer of
the same shape, dequantising fills its largest matrix in bf16, products of experts have Qwen3-30B-A3B's shape. The cache
is emptied before each call; times are medians. `tests/gpu` checks that the results are right.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from script import command_line, table
from sitting import Kept, Sitting, tell_left

if "cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch
from torch import Tensor

from megatron_mux.kernels.dequantise.triton import TritonDequantise
from megatron_mux.kernels.experts.groups import SLOTS, ExpertGroups
from megatron_mux.kernels.experts.product import PRODUCTS
from megatron_mux.kernels.groups import RowGroups, tiles_of
from megatron_mux.kernels.low_rank.columns import Columns
from megatron_mux.kernels.low_rank.terms import Term, TermTable
from megatron_mux.kernels.low_rank.triton import TritonKernels
from megatron_mux.kernels.pointwise import functions as pointwise
from megatron_mux.kernels.pointwise import triton as triton_pointwise
from megatron_mux.kernels.pointwise.arguments import Heads, Norm
from megatron_mux.memory.store import versions
from megatron_mux.quantised import matrix, nf4
from megatron_mux.quantised.eight_bit import EightBitMatrix

RANKS = (8, 8, 16, 16, 32, 32, 64, 64)
Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """What is timed.

    Attributes:
        name: Its name in the results.
        moved: Bytes that it has to read and write.
        ours: Runs our kernel.
        theirs: Runs torch's operators, if there are any.
    """

    name: str
    moved: int
    ours: Call
    theirs: Call | None = None


class Clock:
    """Medians of calls, each after the cache was emptied, which also gives the host time to launch ahead."""

    def __init__(self, device: torch.device, repeats: int = 15) -> None:
        self._on_gpu, self._repeats = device.type == "cuda", repeats
        self._cache = torch.empty((1 << 30) if self._on_gpu else 1, dtype=torch.uint8, device=device)

    def seconds(self, call: Call) -> float:
        """Seconds of a call on the device."""
        if not self._on_gpu:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        call()
        pairs = []
        for _ in range(self._repeats):
            self._cache.zero_()
            pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            pair[0].record()
            call()
            pair[1].record()
            pairs.append(pair)
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in pairs) / 1e3


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer; columns of a module's outputs are (start, run, distance, count), see `Columns`."""

    hidden: int
    inner: int
    head: int
    queries: int
    groups: int
    experts: tuple[int, int, int]
    rows: tuple[int, ...]

    @property
    def base_ops(self) -> dict[str, tuple[int, tuple[tuple[int, int, int, int], ...]]]:
        """Inputs of each BaseOp, and the columns of its modules."""
        head, queries, groups = self.head, self.queries, self.groups
        step = (queries + 2) * head
        places = ((0, queries * head), (queries * head, head), ((queries + 1) * head, head))
        return {
            "qkv": (self.hidden, tuple((start, run, step, groups) for start, run in places)),
            "fc1": (self.hidden, ((0, self.inner, 0, 1), (self.inner, self.inner, 0, 1))),
            "fc2": (self.inner, ((0, self.hidden, 0, 1),)),
        }


ON_GPU = Sizes(4096, 14336, 128, 4, 8, (128, 1536, 2048), (5120, 20480))
TINY = Sizes(64, 128, 16, 2, 2, (4, 16, 32), (16,))


class Cases:
    """All cases on a device.

    Args:
        device: Where they run; on a CPU in fp32.
        sizes: Of the layer.
    """

    def __init__(self, device: torch.device, sizes: Sizes) -> None:
        self.device, self.sizes = device, sizes
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def random(self, *size: int) -> Tensor:
        """A tensor of the dtype that is timed."""
        return torch.randn(*size, device=self.device, dtype=self.dtype)

    def adapters(self) -> Iterator[Case]:
        """The operations of LoRA tasks at each BaseOp; `frozen` is the product that they stand beside."""
        for rows in self.sizes.rows:
            for op, (inputs, modules) in self.sizes.base_ops.items():
                outputs = sum(run * count for _, run, _, count in modules)
                x, y, weight = (
                    self.random(rows, inputs),
                    self.random(rows, outputs),
                    self.random(outputs, inputs),
                )
                table, groups = self._tasks(rows, inputs, outputs, modules)
                latent = self.random(rows, table.width(groups))
                wide, narrow, small = (tensor.nbytes for tensor in (y, x, latent))
                for name, moved, call in (
                    ("frozen forward", narrow + wide + weight.nbytes, partial(torch.matmul, x, weight.t())),
                    ("frozen backward", narrow + wide + weight.nbytes, partial(torch.matmul, y, weight)),
                    ("down", narrow + small, partial(TritonKernels.down, x, table, groups)),
                    ("up", 2 * wide + small, partial(TritonKernels.up_, y, latent, table, groups)),
                    (
                        "latent gradient",
                        wide + small,
                        partial(TritonKernels.latent_gradient, y, table, groups),
                    ),
                    (
                        "input gradient",
                        2 * narrow + small,
                        partial(TritonKernels.input_gradient_, x, latent, table, groups),
                    ),
                    (
                        "weight gradients",
                        narrow + wide + 2 * small,
                        partial(TritonKernels.weight_gradients, x, latent, y, latent, table, groups),
                    ),
                ):
                    yield Case(f"{op}, {rows} rows: {name}", moved, call)

    def _tasks(
        self, rows: int, inputs: int, outputs: int, modules: Sequence[tuple[int, int, int, int]]
    ) -> tuple[TermTable, RowGroups]:
        """LoRA tasks on all modules of a BaseOp, with equally many rows each."""
        ranks = RANKS if self.device.type == "cuda" else RANKS[:1]
        each = rows // len(ranks)
        spans = [(slot * each, (slot + 1) * each) for slot in range(len(ranks))]
        entries = torch.tensor([(slot, *span, 3) for slot, span in enumerate(spans)], dtype=torch.int32)
        tiles = torch.tensor(list(tiles_of(spans)), dtype=torch.int32)
        ids = torch.arange(rows, device=self.device, dtype=torch.int32)
        on_device = (entries.to(self.device), tiles.to(self.device), ids // 256, ids % 256)
        slots = tuple(range(len(ranks)))
        groups = RowGroups(slots, tuple(spans), (3,) * len(ranks), True, *on_device)
        table = TermTable(
            [
                self._term(slot, rank, inputs, outputs, Columns(*module))
                for slot, rank in enumerate(ranks)
                for module in modules
            ]
        )
        table.bring()
        return table, groups

    def _term(self, slot: int, rank: int, inputs: int, outputs: int, place: Columns) -> Term:
        listed = [place.start + i * place.distance + j for i in range(place.count) for j in range(place.run)]
        down, up = self.random(rank, inputs), self.random(len(listed), rank)
        columns = torch.tensor(listed, dtype=torch.int32, device=self.device)
        gradients = [torch.zeros_like(factor, dtype=torch.float32) for factor in (down, up)]
        whole = len(listed) == outputs
        key = 1000 * slot + place.start
        return Term(
            slot,
            down,
            up,
            0.5,
            None if whole else columns,
            *gradients,
            dropout=0.1,
            key=key,
            known_place=place,
        )

    def pointwise(self) -> Iterator[Case]:
        """Element-wise operations of a layer in both directions, by our kernels and by torch's operators."""
        sizes = self.sizes
        hidden, inner, head = sizes.hidden, sizes.inner, sizes.head
        mixed = (sizes.queries + 2) * sizes.groups * head
        bias, inner_bias = self.random(hidden), self.random(inner)
        norm = Norm(self.random(hidden), None, 1e-5, False)
        layer_norm = Norm(self.random(hidden), self.random(hidden), 1e-5, True)
        heads = Heads(head, sizes.queries)
        normed = Heads(head, sizes.queries, weights=(self.random(head), self.random(head)), eps=1e-5)
        for rows in sizes.rows:
            angles = torch.rand(rows, 1, head // 2, device=self.device)
            turned = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
            # Name, widths of the inputs, function, and values a row that forward and backward read and write.
            operations: tuple[tuple[str, tuple[int, ...], Callable[..., Any], int, int], ...] = (
                ("swiglu", (2 * inner,), partial(pointwise.activate, name="silu", gate=True), 3 * inner, 5 * inner),
                (
                    "gelu with bias", (inner,),
                    lambda x: pointwise.activate(x, inner_bias, name="gelu", gate=False), 2 * inner, 3 * inner,
                ),
                ("norm", (hidden,), lambda x: pointwise.fork(x, norm), 2 * hidden, 4 * hidden),
                (
                    "residual sum and norm", (hidden, hidden),
                    lambda x, y: pointwise.join(x, None, y, None, norm), 4 * hidden, 4 * hidden,
                ),
                (
                    "sum with bias and LayerNorm", (hidden, hidden),
                    lambda x, y: pointwise.join(x, bias, y, None, layer_norm), 4 * hidden, 4 * hidden,
                ),
                (
                    "norm before and after the sum", (hidden, hidden),
                    lambda x, y: pointwise.join(x, None, y, norm, norm), 4 * hidden, 6 * hidden,
                ),
                (
                    "queries, keys, values", (mixed,),
                    partial(pointwise.turn, angles=turned, heads=heads), 2 * mixed, 2 * mixed,
                ),
                (
                    "the same, normalised", (mixed,),
                    partial(pointwise.turn, angles=turned, heads=normed), 2 * mixed, 3 * mixed,
                ),
            )  # fmt: skip
            for name, widths, function, forward, backward in operations:
                inputs = [self.random(rows, 1, width).requires_grad_() for width in widths]
                passes = [self._passes(function, inputs, kernels) for kernels in (triton_pointwise, None)]
                for at, (way, values) in enumerate((("forward", forward), ("backward", backward))):
                    moved = rows * values * self.dtype.itemsize
                    yield Case(f"{name}, {rows} rows: {way}", moved, passes[0][at], passes[1][at])

    def _passes(
        self, function: Callable[..., Any], inputs: Sequence[Tensor], kernels: Any
    ) -> tuple[Call, Call]:
        """An operation's forward and backward pass with these kernels; None: torch's operators."""

        def forward() -> Any:
            pointwise.pointwise_kernels = lambda kind, device, dtype: kernels  # type: ignore[assignment]
            return function(*inputs)

        made = forward()
        outputs = [made] if isinstance(made, Tensor) else list(made)
        gradients = [torch.randn_like(output) for output in outputs]
        return forward, partial(torch.autograd.grad, outputs, inputs, gradients, retain_graph=True)

    def dequantise(self) -> Iterator[Case]:
        """Quantised weights of linear_fc1 to bf16."""
        rows, columns = (
            2 * self.sizes.inner,
            4 * self.sizes.hidden if self.device.type == "cpu" else self.sizes.hidden,
        )
        place = torch.empty(rows, columns, dtype=self.dtype, device=self.device)
        for form in ("nf4", "nf4 double", "int8", "int8 blocks", "fp8", "fp8 blocks"):
            held = self._quantised(form, rows, columns)
            yield Case(form, held.nbytes + place.nbytes, partial(held.dequantise_into, place))

    def _quantised(self, form: str, rows: int, columns: int) -> Any:
        """A matrix of random codes."""
        random = partial(torch.randint, 256, dtype=torch.uint8, device=self.device)
        uniform = partial(torch.rand, device=self.device)
        if not form.startswith("nf4"):
            method: Any = form.split()[0]
            scales = uniform(rows, columns // 128 if "blocks" in form else 1)
            return EightBitMatrix.of(random((rows, columns)), scales, method)
        blocks = columns // nf4.BLOCK
        codes = random((rows, columns // 2))
        if form == "nf4":
            return nf4.Nf4Matrix.of(codes, uniform(rows, blocks)).on(self.device)
        scales = uniform(-(-rows * blocks // nf4.NESTED_BLOCK))
        offset = torch.tensor(0.5, device=self.device)
        return nf4.Nf4Matrix.of(codes, random((rows, blocks)), scales, offset).on(self.device)

    def experts(self) -> Iterator[Case]:
        """Products of rows with the matrices of their experts: by our kernel, and by torch's grouped product."""
        experts, outputs, inputs = self.sizes.experts
        weight = self.random(experts, outputs, inputs)
        for rows in self.sizes.rows:
            x = self.random(8 * rows, inputs)
            keys = torch.randint(experts, (len(x),), device=self.device).sort().values.int() * SLOTS
            groups = ExpertGroups(keys, experts)
            moved = x.nbytes + weight.nbytes + len(x) * outputs * self.dtype.itemsize
            other = "grouped_mm" if self.device.type == "cuda" else "loop"
            ours, theirs = (partial(PRODUCTS[way], x, weight, groups) for way in ("triton", other))
            yield Case(f"{len(x)} rows", moved, ours, theirs)


GROUPS = ("adapters", "pointwise", "dequantise", "experts")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--output", type=Path, required=True, help="file of JSON; the table is beside it as .md"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", choices=GROUPS, nargs="+", default=GROUPS)
    parser.add_argument("--minutes", type=float, help="nothing new begins after these; call again to go on")
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes a second (4.3e12: an H200's)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is left; returns 1 if a kernel failed."""
    arguments = parse(argv)
    sitting, device = Sitting(arguments.minutes), torch.device(arguments.device)
    if device.type == "cpu":
        matrix.kernels_for = lambda place: TritonDequantise
    clock, cases = Clock(device), Cases(device, ON_GPU if device.type == "cuda" else TINY)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    kept = Kept(arguments.output, {"device": name, "versions": dict(versions())}, {})
    left = 0
    for group in arguments.only:
        found = kept.found.setdefault(group, {})
        for case in getattr(cases, group)():
            if case.name in found:
                continue
            if not sitting.has_time(0):
                left += 1
                break
            found[case.name] = timed(case, clock, arguments.bandwidth)
            kept.keep()
    text = markdown(kept.found)
    arguments.output.with_suffix(".md").write_text(text + "\n")
    print(text)
    tell_left(left, len(arguments.only))
    return int(any("failed" in one for found in kept.found.values() for one in found.values()))


def timed(case: Case, clock: Clock, bandwidth: float) -> dict[str, Any]:
    """Microseconds of a case by each way, and at least; or why it failed."""
    try:
        found = {"floor_us": 1e6 * case.moved / bandwidth, "ours_us": 1e6 * clock.seconds(case.ours)}
        if case.theirs is not None:
            found["theirs_us"] = 1e6 * clock.seconds(case.theirs)
    except Exception as error:  # of any kind: the others are worth having
        return {"failed": f"{type(error).__name__}: {error}"[:500]}
    return found


def markdown(result: dict[str, dict[str, Any]]) -> str:
    """A table for each group."""
    lines: list[str] = []
    for group, found in result.items():
        rows = [
            (name, one["failed"], "", "")
            if "failed" in one
            else (
                name,
                *(f"{one[key]:.0f}" if key in one else "-" for key in ("floor_us", "ours_us", "theirs_us")),
            )
            for name, one in found.items()
        ]
        lines += [*table(f"{group}, us | bytes moved | ours | torch", rows), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
