"""The main table on one GPU: our engine against the fastest that Hugging Face PEFT does there, row by row.

    python benchmarks/gpu_table.py --output table.json                  # and table.md; every row is kept as it comes
    python benchmarks/gpu_table.py --output table.json --minutes 6      # rows that fit; call again to go on
    python benchmarks/gpu_table.py --output table.json --only "8 sequences"
    python benchmarks/gpu_table.py --output tiny.json --tiny            # the same on a CPU: the figures mean nothing

Weights are random and made on the device. All sides of a row run in this process, one after the other, each on an
emptied allocator with steps of its own to warm up. They train the same adapters on the same records in the same order.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from script import command_line
from sitting import Kept, Sitting, tell_left

from megatron_mux.gpus import set_allocator_options

PROCESSES = 8


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--output", type=Path, required=True, help="file of JSON; the table is beside it as .md"
    )
    parser.add_argument("--minutes", type=float, help="of this call (no limit)")
    parser.add_argument(
        "--only", nargs="+", metavar="WORD", help="only rows whose name contains one of these words"
    )
    parser.add_argument("--names", nargs="+", metavar="NAME", help="only rows of these names")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, with tiny backbones")
    parser.add_argument("--no-processes", action="store_true", help="without processes of PEFT side by side")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is left, as far as time allows; returns 1 if some side failed."""
    arguments = parse(argv)
    sitting = Sitting(arguments.minutes)
    set_allocator_options()  # before torch is imported, as `pretrain_mux.py` does
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from peft_processes import Processes

    wanted = any(row.processes for row in chosen_rows(arguments)) and not arguments.no_processes
    processes = Processes((2 if arguments.tiny else PROCESSES) * wanted, threads=1)
    try:
        processes.wait()
    except Exception as error:  # of any kind: the other sides go on without them
        print(f"no processes of PEFT side by side: {error}", file=sys.stderr)
    try:
        return _measure(arguments, sitting, processes)
    finally:
        processes.end()


def chosen_rows(arguments: argparse.Namespace) -> list[Any]:
    """The rows that the command line asks for."""
    from gpu_rows import ROWS, tiny

    return [tiny(row) if arguments.tiny else row for row in ROWS if _is_chosen(row.name, arguments)]


def _measure(arguments: argparse.Namespace, sitting: Sitting, processes: Any) -> int:
    import torch
    from gpu_table_text import markdown

    from megatron_mux import runtime
    from megatron_mux.memory.store import versions

    device = torch.device("cpu" if arguments.tiny else "cuda")
    if arguments.tiny:
        torch.set_num_threads(1)
    elif not torch.cuda.is_available():
        print("gpu_table.py: this machine has no GPU", file=sys.stderr)
        return 2
    parallel = runtime.initialize(device=device)
    about = {"versions": dict(versions()), "machine": _machine(device)}
    kept = Kept(arguments.output, about, {"rows": {}})
    product = product_rate(device)  # of this call: clocks differ from one to the next
    rows = chosen_rows(arguments)
    left = [row for row in rows if not kept.found["rows"].get(row.name, {}).get("done")]
    table = _Table(parallel, processes, kept)
    while left and sitting.has_time(left[0].seconds):
        row = left.pop(0)
        start = time.monotonic()
        table.measure(row, product)
        arguments.output.with_suffix(".md").write_text(markdown(kept.found, about) + "\n")
        print(f"{time.monotonic() - start:.1f} s: {row.name}", file=sys.stderr, flush=True)
    print(markdown(kept.found, about))
    runtime.shutdown()
    tell_left(len(left), len(rows))
    return int(any("failed" in side for row in kept.found["rows"].values() for side in row["sides"].values()))


def _is_chosen(name: str, arguments: argparse.Namespace) -> bool:
    named = arguments.names is None or name in arguments.names
    return named and (arguments.only is None or any(word in name for word in arguments.only))


class _Table:
    """Measures rows; keeps the model of `transformers` while rows have the same backbone.

    Args:
        parallel: This process.
        processes: Of PEFT.
        kept: Takes each side's result as it comes.
    """

    def __init__(self, parallel: Any, processes: Any, kept: Kept) -> None:
        self._parallel, self._processes, self._kept = parallel, processes, kept
        self._model: tuple[object, Any] = ("", None)

    def measure(self, row: Any, product: float) -> None:
        """Measure the sides of a row that an earlier call has not begun.

        Args:
            row: The row.
            product: See `product_rate`.
        """
        import gpu_sides
        import torch
        from gpu_rows import operations

        device = self._parallel.device
        model, work = self._model_of(row), gpu_sides.Work(row)
        steps = [work.step(number) for number in range(work.steps)]
        sides: dict[str, Any] = self._kept.found["rows"].get(row.name, {}).get("sides", {})
        count = operations(work.config, row, steps)
        total = sum(work.tokens)
        found = {
            "sides": sides,
            "operations_a_token": {name: value / total for name, value in count.items()},
            "tokens_in_a_step": total / work.steps,
            "tasks": len(row.mix),
            "product": product,
            "done": False,
        }
        self._kept.found["rows"][row.name] = found
        initial: gpu_sides.Adapters = [None] * len(row.mix)

        def side(name: str, run: Callable[[], dict[str, Any]]) -> None:
            if name not in sides:
                sides[name] = {"failed": "it ended the process"}  # as a side does that hangs
                self._kept.keep()
                sides[name] = gpu_sides.attempt(run, device)
                self._kept.keep()

        if row.memory:
            side("memory", partial(gpu_sides.measure_memory, work, model, self._parallel))
            found["done"] = True
            return
        if row.rival is not None:
            side(row.rival, partial(self._measure_peft, work, model, row.rival, initial))
        if row.quantise and device.type == "cuda":
            torch.cuda.empty_cache()
        side("mux", partial(gpu_sides.measure_mux, work, model, self._parallel, initial))
        if row.processes and self._processes.count:
            self._drop_model()
            del model
            head = _fastest_on_gpu(sides["packed"].get("heads", {})) or "labelled"
            dtype = str(_dtype(device)).removeprefix("torch.")
            asked = (row if device.type == "cuda" else _first_tasks(row, 2), head, device.type, dtype)
            side("processes", lambda: {**self._processes.measure(*asked, seconds=40), "head": head})
        found["done"] = True

    def _model_of(self, row: Any) -> Any:
        """The model of `transformers` with the row's backbone."""
        import gpu_sides
        import peft_side
        import random_model

        if self._model[0] != (row.shape, row.layers):
            self._drop_model()
            device = self._parallel.device
            gpu_sides.empty_allocator(device)
            made = random_model.make(row.shape, row.layers, _dtype(device), device)
            self._model = ((row.shape, row.layers), peft_side.prepared(made))
        return self._model[1]

    def _drop_model(self) -> None:
        self._model = ("", None)

    def _measure_peft(self, work: Any, model: Any, rival: str, initial: Any) -> dict[str, Any]:
        """Measure PEFT on a model that bitsandbytes has quantised where our side is quantised."""
        import gpu_sides
        import random_model

        given = model if work.row.quantise is None else random_model.quantised_copy(model)
        return gpu_sides.measure_peft(work, given, rival, initial)


def _fastest_on_gpu(heads: Mapping[str, Any]) -> str | None:
    """The head with the most tokens per second of GPU time: processes side by side keep the GPU busy."""
    rates = {
        head: found["gpu"]["tokens_per_second"]
        for head, found in heads.items()
        if "tokens_per_second" in found["gpu"]
    }
    return max(rates, key=lambda head: float(rates[head]), default=None)


def _first_tasks(row: Any, count: int) -> Any:
    from dataclasses import replace

    return replace(row, mix=row.mix[:count])


def _dtype(device: Any) -> Any:
    import torch

    return torch.bfloat16 if device.type == "cuda" else torch.float32


def product_rate(device: Any) -> float:
    """Operations per second of a bf16 product of random 8192 x 8192 matrices: the median of twenty (tiny on a CPU)."""
    import torch

    size = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(size, size, device=device, dtype=_dtype(device)) for _ in range(2))
    seconds: list[float] = []
    for _ in range(25):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            a @ b
            end.record()
            torch.cuda.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3)
        else:
            begun = time.perf_counter()
            a @ b
            seconds.append(time.perf_counter() - begun)
    return float(2 * size**3 / statistics.median(seconds[5:]))


def _machine(device: Any) -> dict[str, str]:
    import torch

    from megatron_mux.fusion.device import cpu_name

    gpu = torch.cuda.get_device_name() if device.type == "cuda" else "none"
    return {"gpu": gpu, "cpu": f"{cpu_name()}, {os.cpu_count()} threads", "dtype": str(_dtype(device))}


if __name__ == "__main__":
    sys.exit(main())
