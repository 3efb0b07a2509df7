"""The method chosen for four processes with a memory budget, against all others: which run, and how fast.

python benchmarks/choice.py                                                       # a few minutes
python benchmarks/choice.py --output benchmarks/results/choice-cpu-2-cores.json   # the JSON, and the table as .md

A small Llama and three tasks, on four processes that compute on the CPU. Memory and seconds of every method that our
engine runs are predicted, from tables of dry runs and from a measurement of the machine. Then each method trains: first
with each rank's tensors counted and limited to the budget, as on a GPU of that size, then timed without
counting: a step of each in turns, since other work on the machine would slow one method and not another.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forked_world import World
from script import add_output, command_line, publish, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

if TYPE_CHECKING:
    from megatron_mux.choice.fit import Fit
    from megatron_mux.choice.ranking import Ranking
    from megatron_mux.choice.task_file import TaskFile
    from megatron_mux.fusion.device import Device
    from megatron_mux.memory.forms.architecture import Architecture
    from megatron_mux.memory.forms.method import ParallelConfig
    from megatron_mux.memory.forms.recipe import Recipe

RANKS = 4
SMALL = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 256,
    "intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 4,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
TASKS: dict[str, dict[str, Any]] = {
    "lora": {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj", "v_proj"]},
    "bottle": {"peft_type": "BOTTLENECK", "bottleneck_size": 16, "target_modules": ["o_proj", "down_proj"]},
    "scales": {"peft_type": "IA3", "target_modules": ["k_proj", "v_proj"]},
}
LENGTH = 64
RESERVE = 1.03
"""Budget over the memory that predictions are made for: the margin for errors of the tables."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, default=5, help="timed steps, of which the median is taken (5)")
    parser.add_argument("--layers", type=int, default=8, help="layers of the Llama (8)")
    parser.add_argument("--sequences", type=int, default=8, help="sequences in each task's step (8)")
    parser.add_argument(
        "--alike", action="store_true", help="three tasks of one kind, whose tables take less time"
    )
    parser.add_argument("--plain", action="store_true", help="without recomputation and sequence parallelism")
    parser.add_argument(
        "--methods", nargs="+", metavar="NAME", help="only those of such degrees: 4DP, 2DP+2PP (all)"
    )
    add_output(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Predict, run and publish."""
    arguments = parse(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from megatron_mux import megatron_core

    torch.set_num_threads(1)
    with megatron_core.quiet():  # imported once: the processes are forked
        import megatron_mux.backbone.model
        import megatron_mux.engine  # noqa: F401
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        _write_inputs(directory, arguments.layers, arguments.sequences, arguments.alike)
        result = _measure(directory, arguments)
    publish(result, markdown(result), arguments.output)
    return 0


def _write_inputs(directory: Path, layers: int, sequences: int, alike: bool) -> None:
    """Write a backbone with random weights, and a task file."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**SMALL, num_hidden_layers=layers)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    training = {"per_device_train_batch_size": sequences, "max_steps": 100}
    data = {"path": "none.jsonl", "max_length": LENGTH}
    kinds = {name: TASKS["lora"] if alike else adapter for name, adapter in TASKS.items()}
    tasks = [{"name": n, "adapter": a, "data": data, "training": training} for n, a in kinds.items()]
    (directory / "tasks.yaml").write_text(json.dumps({"tasks": tasks}))


def _measure(directory: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    from megatron_mux.choice.task_file import TaskFile
    from megatron_mux.memory.forms.recipe import Recipe

    file = TaskFile.read(directory / "config.json", directory / "tasks.yaml")
    recipe = Recipe(LENGTH, "fp32", adapters=file.adapters)
    device = measure_device(file.architecture)
    ranked = _ranking(file, recipe, device, arguments.plain, arguments.methods)
    budget = _budget_for([entry.peak_allocated for entry in ranked(1).entries])
    ranking = ranked(int(budget / RESERVE))
    rows = _run(ranking.entries, directory, file, budget, arguments.steps)
    running = sorted((row for row in rows if row["runs"]), key=lambda row: row["seconds"])
    chosen = rows[0]
    return {
        "budget_bytes": budget,
        "device": asdict(device),
        "cores": os.cpu_count(),
        "chosen": chosen["name"],
        "fits": chosen["fits"],
        "over_the_fastest": chosen["seconds"] / running[0]["seconds"] if chosen["runs"] else None,
        "place": running.index(chosen) + 1 if chosen["runs"] else None,
        "methods": rows,
    }


def _ranking(
    file: TaskFile, recipe: Recipe, device: Device, plain: bool, names: Sequence[str] | None
) -> Callable[[int], Ranking]:
    """Return a function that ranks the methods for a memory size; offloading is left out, since all share the host."""
    from megatron_mux.choice.ranking import rank
    from megatron_mux.estimate.method_tables import MethodTables
    from megatron_mux.gpus import Gpu

    tables = MethodTables(file, "fp32", Gpu(), lambda text: print(text, file=sys.stderr), "cpu")

    def is_compared(method: ParallelConfig) -> bool:
        optional = method.recompute != "none" or method.sequence_parallel
        return (not names or method.name in names) and not (method.offload or (plain and optional))

    def ranked(memory: int) -> Ranking:
        architecture = file.architecture
        return rank(architecture, recipe, RANKS, memory, device, kind="cpu", tables=tables, only=is_compared)

    return ranked


def _budget_for(peaks: Sequence[int]) -> int:
    """Choose a budget in the widest gap between predicted peaks, among the middle half of them."""
    ordered = sorted(peaks)
    quarter = len(ordered) // 4
    inner = ordered[quarter : len(ordered) - quarter + 1]
    low, high = max(zip(inner, inner[1:], strict=False), key=lambda pair: pair[1] / pair[0])
    return int((low * high) ** 0.5)


# -- four processes


def measure_device(architecture: Architecture) -> Device:
    """Measure this machine in four processes at once, as they will share it."""
    from megatron_mux.fusion.device import Device

    with World(RANKS, _measure_rank, architecture.hidden, architecture.ffn) as world:
        found = [one for one in world.ask() if one]
    mean = {name: statistics.mean(one[name] for one in found) for name in found[0]}
    peak = {4: mean["peak"], 2: mean["peak"], 8: mean["peak"] / 2}
    return Device(
        "CPU, measured", peak, mean["bandwidth"], mean["overhead"], mean["link"], mean["latency"], adds=True
    )


def _measure_rank(hidden: int, ffn: int) -> Iterator[dict[str, float]]:
    import torch
    import torch.distributed as dist

    from megatron_mux import runtime

    runtime.initialize(1, 1, device="cpu")
    x, weight = torch.randn(1024, hidden), torch.randn(2 * ffn, hidden)
    large, small, message = torch.randn(1 << 22), torch.randn(8, 8, requires_grad=True), torch.randn(1 << 19)
    transferred = 2 * (RANKS - 1) / RANKS

    def seconds(work: Callable[[], Any], times: int) -> float:
        work()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(times):
            work()
        return (time.perf_counter() - start) / times

    def with_work() -> None:
        x @ weight.t()
        dist.all_reduce(message[:1])

    # Where ranks share cores, a message between matrix products takes longer than a message alone.
    product = seconds(lambda: x @ weight.t(), 30)
    latency = max(seconds(with_work, 30) - product, seconds(lambda: dist.all_reduce(message[:1]), 50))
    exchange = seconds(lambda: dist.all_reduce(message), 10) - seconds(
        lambda: dist.all_reduce(message[:1]), 50
    )
    yield {
        "peak": 2 * x.numel() * weight.shape[0] / product,
        "bandwidth": 2 * large.nbytes / seconds(large.clone, 20),
        "overhead": seconds(lambda: small * 2, 2000),
        "link": transferred * message.nbytes / max(exchange, 1e-9),
        "latency": latency,
    }


def _run(
    entries: Sequence[Fit], directory: Path, file: TaskFile, budget: int, steps: int
) -> list[dict[str, Any]]:
    """Run methods; returns their rows of the result, predicted and measured."""
    from megatron_mux.choice.task_file import FileStep

    step = FileStep(file.adapters)
    rows: list[dict[str, Any]] = []
    running: list[tuple[dict[str, Any], World, list[float]]] = []
    with contextlib.ExitStack() as stack:
        for entry in entries:
            world = World(RANKS, _train, entry.method, directory, step, budget)
            rows.append(row := _row(entry, world.ask()))
            if row["runs"]:
                running.append((row, stack.enter_context(world), []))
            else:
                world.end()
        for _ in range(steps):
            for row, world, times in running:
                found = world.ask() if row["runs"] else []
                if found and all(found):
                    times.append(max(one["seconds"] for one in found))
                elif found:
                    row |= {
                        "runs": False,
                        "error": "a process failed in a timed step, or took two minutes for it",
                    }
    for row, _, times in running:
        row["seconds"] = statistics.median(times) if row["runs"] else None
    return rows


def _row(entry: Fit, found: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
    """A method's row of the result.

    Args:
        entry: The method, predicted.
        found: By rank, what was counted.
    """
    ranks = [one for one in found if one is not None]
    return {
        "name": " ".join(filter(None, (entry.method.name, entry.method.details))),
        "micro_batches": entry.method.micro_batches,
        "fits": entry.fits,
        "predicted_bytes": entry.peak_allocated,
        "predicted_seconds": entry.seconds,
        "runs": len(ranks) == RANKS and not any(one["error"] for one in ranks),
        "peak_bytes": max((one["peak"] for one in ranks), default=None),
        "seconds": None,
        "error": next((one["error"] for one in ranks if one["error"]), None),
    }


def _train(method: Any, directory: Path, step: Any, budget: int) -> Iterator[dict[str, Any]]:
    """Train on this rank: two steps within the budget, then steps that are timed."""
    import torch.distributed as dist

    from megatron_mux import runtime
    from tests.budget import Budget

    parallel = runtime.initialize(method.tensor, method.pipeline, method.sequence_parallel, device="cpu")
    # With torch.OutOfMemoryError the engine would retry in smaller parts, which is another method.
    counted = Budget(budget, MemoryError)
    try:
        with counted:
            engine = _engine(method, directory, step, parallel)
            for _ in range(2):
                engine.step()
    except (MemoryError, RuntimeError) as error:  # RuntimeError: a peer ran out of memory
        yield {"peak": counted.peak, "error": str(error).partition("\n")[0]}
        return
    yield {"peak": counted.peak, "error": None}
    while True:
        dist.barrier()
        start = time.perf_counter()
        engine.step()
        dist.barrier()
        yield {"seconds": time.perf_counter() - start}


def _engine(method: Any, directory: Path, step: Any, parallel: Any) -> Any:
    """Make the engine with its tasks, under a plan with the method's micro-batches."""
    import torch

    from megatron_mux.backbone.model import load_stages
    from megatron_mux.dry_run.stand_ins import LengthsOnlyDataset
    from megatron_mux.engine import Engine, Planning, Task
    from megatron_mux.fusion.plan import plan_for
    from megatron_mux.tasks import load_task_file

    stages = load_stages(
        directory,
        parallel,
        torch.float32,
        method.recompute,
        None,
        "sharded" if method.zero == 3 else "resident",
    )
    names = [task.name for task in step.tasks]
    plan = plan_for("spatial", dict.fromkeys(sorted(names), 1), method.pipeline, method.micro_batches)
    plan = replace(plan, data=method.data, schedule="1f1b" if method.pipeline > 1 else "planned")
    engine = Engine(stages, parallel, Planning("auto", plan.stages, given=plan))
    tasks = []
    for spec in load_task_file(directory / "tasks.yaml", data_later=True):
        count, length = 4 * spec.sequences_per_step, spec.data.max_length
        data: Any = LengthsOnlyDataset([length] * count, [length - 1] * count)
        tasks.append(Task(spec, data))
    engine.register_tasks(tasks)
    return engine


def markdown(result: Mapping[str, Any]) -> str:
    """Render the table."""
    mib = 1 << 20
    rows = [
        [
            row["name"],
            str(row["micro_batches"]),
            "yes" if row["fits"] else "no",
            "yes" if row["runs"] else "no",
            f"{row['predicted_bytes'] / mib:.1f}",
            f"{row['peak_bytes'] / mib:.1f}" if row["runs"] else "-",
            f"{1000 * row['predicted_seconds']:.0f}",
            f"{1000 * row['seconds']:.0f}" if row["runs"] else "-",
        ]
        for row in result["methods"]
    ]
    head = "method | micro-batches | fits | runs | MiB predicted | MiB counted | ms predicted | ms"
    chosen = (
        f"chosen: {result['chosen']}: {result['over_the_fastest']:.2f} times as long as the fastest method that ran, "
        f"rank {result['place']} by time"
        if result["place"]
        else "chosen: nothing ran"
    )
    budget = f"budget of each of {RANKS} processes on {result['cores']} cores: {result['budget_bytes'] / mib:.1f} MiB"
    return "\n".join([budget, "", *table(head, rows), "", chosen])


if __name__ == "__main__":
    sys.exit(main())
