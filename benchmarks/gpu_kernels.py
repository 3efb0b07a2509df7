"""Times of the Triton kernels of adapters beside the frozen product, for the block sizes in use and for others.

Llama-3-8B's `linear_qkv`, `linear_fc1` and `linear_fc2` with eight LoRA tasks of ranks 8 to 64, bf16. Block sizes in
use come first, so that the main table is there whatever time is left; each result is written as it comes:

    python benchmarks/gpu_kernels.py kernels.json                # a minute on an H200
    python benchmarks/gpu_kernels.py kernels.json --device cpu   # tiny sizes in Triton's interpreter, to try it out

The cache is emptied before each launch. `seconds` are medians; `bytes` is what a kernel has to read and write at least.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

RANKS = (8, 8, 16, 16, 32, 32, 64, 64)


class Shape(NamedTuple):
    """A BaseOp: width of its input, and the output columns of each module as (start, run, distance, count)."""

    inputs: int
    modules: tuple[tuple[int, int, int, int], ...]

    @property
    def outputs(self) -> int:
        """N."""
        return sum(run * count for _, run, _, count in self.modules)


SHAPES = {
    "qkv": Shape(4096, ((0, 512, 768, 8), (512, 128, 768, 8), (640, 128, 768, 8))),
    "fc1": Shape(4096, ((0, 14336, 0, 1), (14336, 14336, 0, 1))),
    "fc2": Shape(14336, ((0, 4096, 0, 1),)),
}
TINY = {"qkv": Shape(48, ((0, 16, 32, 1), (16, 8, 32, 1)))}

OTHERS: Mapping[str, Sequence[Mapping[str, int]]] = {
    "DOWN": (
        {"num_stages": 2}, {"num_stages": 4}, {"WIDTH": 64, "num_stages": 4}, {"num_warps": 4}, {"RANKS": 32},
        {"RANKS": 32, "num_warps": 4}, {"ROWS": 32, "num_warps": 4},
    ),
    "LATENT_GRADIENT": (
        {"num_stages": 4}, {"num_stages": 6}, {"ROWS": 64, "num_warps": 8, "num_stages": 6},
        {"ROWS": 64, "WIDTH": 64}, {"RANKS": 64, "ROWS": 64, "num_warps": 8, "num_stages": 4},
    ),
    "EXPAND": (
        {"num_stages": 1}, {"num_stages": 3}, {"WIDTH": 128}, {"WIDTH": 32}, {"WIDTH": 32, "num_warps": 2},
        {"RANKS": 64}, {"RANKS": 16},
    ),
    "OUTER": (
        {"num_stages": 2}, {"num_stages": 4}, {"ROWS": 128}, {"ROWS": 128, "num_stages": 2},
        {"ROWS": 32, "num_stages": 6}, {"num_warps": 8}, {"ROWS": 128, "num_warps": 8},
    ),
}  # fmt: skip
"""Changes to the block sizes in use, by their name in `low_rank.triton`."""


class Case(NamedTuple):
    """What is computed: a BaseOp, rows of all tasks together, and dropout."""

    op: str
    rows: int
    dropout: float


class Launch(NamedTuple):
    """A captured launch of a kernel."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]

    def __call__(self) -> None:
        self.kernel[self.grid](*self.arguments, **self.options)

    def compile(self) -> None:
        """Compile the kernel, and launch nothing."""
        self.kernel.warmup(*self.arguments, grid=self.grid, **self.options)


class Clock:
    """Medians of launches, each after the cache was emptied.

    Args:
        device: "cuda" or "cpu".
        repeats: Launches that are timed.
    """

    def __init__(self, device: str, repeats: int) -> None:
        import torch

        self._cuda = device == "cuda"
        self._repeats = repeats
        self._cache = torch.empty((256 << 20) if self._cuda else 1, dtype=torch.uint8, device=device)

    def median(self, call: Callable[[], object]) -> float:
        """Seconds of a call on the device."""
        import torch

        if not self._cuda:
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
        return statistics.median(a.elapsed_time(b) for a, b in pairs) / 1e3


class Problem:
    """The tensors of a case.

    Args:
        case: What is computed.
        shape: Of its BaseOp.
        device: "cuda" or "cpu".
    """

    def __init__(self, case: Case, shape: Shape, device: str) -> None:
        import torch

        from megatron_mux.kernels.groups import RowGroups, tiles_of
        from megatron_mux.kernels.low_rank.terms import TermTable

        ranks, dtype = (RANKS, torch.bfloat16) if device == "cuda" else (RANKS[:1], torch.float32)
        torch.manual_seed(0)

        def random(*size: int) -> Any:
            return torch.randn(*size, device=device, dtype=dtype)

        self.x, self.dy = random(case.rows, shape.inputs), random(case.rows, shape.outputs)
        self.weight = random(shape.outputs, shape.inputs)
        each = case.rows // len(ranks)
        rows = [(i * each, (i + 1) * each) for i in range(len(ranks))]
        ids = torch.arange(case.rows, device=device, dtype=torch.int32)
        slots = range(len(ranks))
        table = torch.tensor([(i, *own, 3) for i, own in zip(slots, rows, strict=True)], dtype=torch.int32)
        tiles = torch.tensor(list(tiles_of(rows)), dtype=torch.int32)
        steps = (3,) * len(ranks)
        groups = (table.to(device), tiles.to(device), ids // 256, ids % 256)
        self.groups = RowGroups(tuple(slots), tuple(rows), steps, True, *groups)
        terms = [_term(i, module, shape, case.dropout, random) for i in slots for module in shape.modules]
        self.table = TermTable(terms)
        self.table.bring()
        self.latent = random(case.rows, self.table.width(self.groups))

    def launches(self) -> dict[str, Launch]:
        """The launches of each operation with the block sizes that are set by now; nothing is computed."""
        from megatron_mux.kernels.low_rank import triton as triton_low_rank

        found: list[Launch] = []

        def capture(
            kernel: Any, grid: tuple[int, ...], table: Any, rows: Any, *rest: Any, **options: Any
        ) -> None:
            options.setdefault("ALIGNED", triton_low_rank.alignment_of(table, rows))
            first = (table.entries, table.first_entry, len(table.first_entry) - 1, rows)
            found.append(Launch(kernel, grid, (*first, *rest), options))

        launch, triton_low_rank._launch = triton_low_rank._launch, capture
        try:
            kernels, table, groups = triton_low_rank.TritonKernels, self.table, self.groups
            kernels.down(self.x, table, groups)
            kernels.up_(self.dy, self.latent, table, groups)
            kernels.latent_gradient(self.dy, table, groups)
            kernels.input_gradient_(self.x, self.latent, table, groups)
            kernels.weight_gradients(self.x, self.latent, self.dy, self.latent, table, groups)
        finally:
            triton_low_rank._launch = launch
        return dict(zip(OPERATIONS, found[: len(OPERATIONS)], strict=True))

    def least_bytes(self) -> dict[str, int]:
        """What each operation has to read and write of x, y and their gradients."""
        x, y, latent = (t.numel() * t.element_size() for t in (self.x, self.dy, self.latent))
        return {
            "down": x + latent,
            "up_": 2 * y + latent,
            "latent_gradient": y + latent,
            "input_gradient_": 2 * x + latent,
            "gradient of A": x + latent,
            "gradient of B": y + latent,
        }


OPERATIONS = {
    "down": "DOWN",
    "up_": "EXPAND",
    "latent_gradient": "LATENT_GRADIENT",
    "input_gradient_": "EXPAND",
    "gradient of A": "OUTER",
    "gradient of B": "OUTER",
}
"""Each launch, with the name of its block sizes."""


def _term(slot: int, module: tuple[int, int, int, int], shape: Shape, dropout: float, random: Any) -> Any:
    import torch

    from megatron_mux.kernels.low_rank.columns import Columns
    from megatron_mux.kernels.low_rank.terms import Term

    start, run, distance, count = module
    listed = [start + i * distance + j for i in range(count) for j in range(run)]
    rank, n = RANKS[slot], len(listed)
    down, up = random(rank, shape.inputs), random(n, rank)
    columns = torch.tensor(listed, dtype=torch.int32, device=down.device)
    whole = n == shape.outputs
    gradients = torch.zeros_like(down, dtype=torch.float32), torch.zeros_like(up, dtype=torch.float32)
    place = Columns(start, run, distance, count)
    return Term(
        slot, down, up, 0.5, None if whole else columns, *gradients,
        dropout=dropout, key=1000 * slot + start, known_place=place,
    )  # fmt: skip


class Candidate(NamedTuple):
    """An operation of a case with some block sizes."""

    case: Case
    operation: str
    change: Mapping[str, int]
    launch: Launch
    bytes: int


def candidates(case: Case, problem: Problem, others: bool) -> Iterator[Candidate]:
    """The operations of a case with the block sizes in use, or with the others."""
    from megatron_mux.kernels.low_rank import triton as triton_low_rank

    least = problem.least_bytes()
    for name, changes in OTHERS.items() if others else {"": [{}]}.items():
        for change in changes:
            blocks = getattr(triton_low_rank, name, {})
            used = dict(blocks)
            blocks.update(change)
            try:
                launches = problem.launches()
            finally:
                blocks.update(used)
            for operation, launch in launches.items():
                if not others or OPERATIONS[operation] == name:
                    yield Candidate(case, operation, change, launch, least[operation])


class Report:
    """Results in a JSON file, written whenever there is one more.

    Args:
        path: The file.
        device: "cuda" or "cpu".
    """

    def __init__(self, path: Path, device: str) -> None:
        import torch
        import triton

        self._path = path
        name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        self._found: dict[str, Any] = {
            "device": name, "torch": torch.__version__, "triton": triton.__version__, "frozen": [], "kernels": [],
        }  # fmt: skip

    def add(self, kind: str, **fields: Any) -> None:
        """Add a result to `frozen` or `kernels`."""
        self._found[kind].append(fields)
        self._path.write_text(json.dumps(self._found))

    def summary(self) -> str:
        """A line for each case: the kernels' time as a share of the frozen products', and the best other blocks."""
        lines = []
        for frozen in self._found["frozen"]:
            own = [k for k in self._found["kernels"] if all(k[f] == frozen[f] for f in Case._fields)]
            used = {k["operation"]: k["seconds"] for k in own if not k["blocks"] and "seconds" in k}
            products = frozen["forward"] + frozen["backward"]
            share = sum(used.values()) / products
            lines.append(
                f"{frozen['op']} {frozen['rows']} rows, dropout {frozen['dropout']}: {share:.3f} of products"
            )
            for operation, seconds in used.items():
                tried = [k for k in own if k["operation"] == operation and "seconds" in k]
                best = min(tried, key=lambda k: k["seconds"])
                rate = best["bytes"] / seconds / 1e12
                lines.append(
                    f"  {operation}: {seconds * 1e6:.0f} us, {rate:.2f} TB/s; best {best['seconds'] * 1e6:.0f} us "
                    f"{best['blocks'] or 'as in use'}"
                )
        return "\n".join(lines)


def measure(
    report: Report, clock: Clock, found: Sequence[Candidate], ready: Mapping[int, Future[None]]
) -> None:
    """Time candidates, those that have been compiled."""
    for i, one in enumerate(found):
        fields = {**one.case._asdict(), "operation": one.operation, "blocks": dict(one.change)}
        try:
            if i in ready:
                ready[i].result(timeout=20)
            report.add("kernels", **fields, bytes=one.bytes, seconds=clock.median(one.launch))
        except Exception as error:  # of any kind: block sizes that do not fit, say; the next may
            report.add("kernels", **fields, error=f"{type(error).__name__}: {error}"[:200])


def run(report: Report, device: str, seconds: float) -> None:
    """Measure all cases, as far as the time allows."""
    end = time.perf_counter() + seconds
    tiny = device == "cpu"
    shapes = TINY if tiny else SHAPES
    sizes = (16,) if tiny else (20480, 5120)
    cases = [Case(op, rows, dropout) for rows in sizes for dropout in (0.1, 0.0) for op in shapes]
    clock = Clock(device, repeats=9)
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1))) as pool:
        for others in (False, True):
            for case in cases[-1:] if others and tiny else cases:
                if time.perf_counter() > end:
                    break
                problem = Problem(case, shapes[case.op], device)
                found = [c for c in candidates(case, problem, others) if not _skipped(case, c)]
                found = found[::10] if others and tiny else found
                ready = {} if tiny else {i: pool.submit(c.launch.compile) for i, c in enumerate(found)}
                if not others:
                    x, dy, weight = problem.x, problem.dy, problem.weight
                    forward = clock.median(lambda x=x, w=weight: x @ w.t())
                    backward = clock.median(lambda dy=dy, w=weight: dy @ w)
                    report.add("frozen", **case._asdict(), forward=forward, backward=backward)
                measure(report, clock, found, ready)
        pool.shutdown(wait=False, cancel_futures=True)


def _skipped(case: Case, candidate: Candidate) -> bool:
    """Whether these block sizes are tried without dropout only: the operation is the same with it."""
    dropped = candidate.operation in ("down", "input_gradient_", "gradient of A")
    return bool(candidate.change) and case.dropout > 0 and not dropped


def main() -> int:
    """Measure, and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=40.0, help="no case begins later than this")
    args = parser.parse_args()
    if args.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    report = Report(args.output, args.device)
    run(report, args.device, args.seconds)
    print(report.summary())
    return 0


if __name__ == "__main__":
    sys.exit(main())
