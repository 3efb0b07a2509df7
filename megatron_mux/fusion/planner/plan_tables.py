"""Plans, and what they were compared with, as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from megatron_mux.console import make_console
from megatron_mux.fusion.mesh import Mesh
from megatron_mux.fusion.plan import Plan
from megatron_mux.fusion.planner.evaluation_time import EvaluationTime
from megatron_mux.fusion.planner.planner import Comparison

_BUCKET_COLUMNS = ("tokens a step", "micro-batches", "chunk", "chunks", "forward ms", "backward ms")


def print_plan(
    plan: Plan,
    comparison: Comparison,
    tokens: Mapping[str, int],
    seconds: float,
    evaluation: EvaluationTime | None = None,
) -> None:
    """Print a plan as tables.

    Args:
        tokens: Of a step of each task.
        seconds: How long planning has taken.
        evaluation: How long evaluations take; None: no task is evaluated.
    """
    console = make_console()
    console.print(_buckets(plan, tokens))
    console.print(_compared(plan.predicted_latency_s or 0.0, comparison.alternatives))
    shares = comparison.padding
    console.print(
        f"share of padding: {shares['plan']:.1%}; if padded within each task "
        f"{shares['within_tasks']:.1%}, to the longest of all {shares['zero_padded']:.1%}"
    )
    if plan.memory_bytes:
        memory = ", ".join(f"{count / (1 << 30):.2f}" for count in plan.memory_bytes)
        limit = f" of {plan.memory_limit_bytes / (1 << 30):.2f}" if plan.memory_limit_bytes else ""
        console.print(f"predicted memory of each stage: {memory}{limit} GiB")
    else:
        known = plan.mesh.predicts_memory
        console.print(
            f"memory is not predicted {'without a limit' if known else 'for experts that are divided so'}"
        )
    if evaluation is not None:
        console.print(
            f"evaluating all tasks together: {evaluation.together_s:.4g} s predicted, one after another "
            f"{evaluation.one_by_one_s:.4g} s"
        )
    console.print(f"predicted by the {plan.costs}; planned in {seconds:.3f} s")


def _buckets(plan: Plan, tokens: Mapping[str, int]) -> Table:
    """A row for each hybrid task; what holds for its bucket stands on the first one's."""
    layers = f" of {'+'.join(map(str, plan.split))} layers" if plan.split else ""
    table = Table(title=f"{plan.stages} stage(s){layers} x {plan.mesh.description}")
    for column in ("bucket", "hybrid task", *_BUCKET_COLUMNS):
        table.add_column(column, justify="left" if column == "hybrid task" else "right")
    for b, bucket in enumerate(plan.buckets):
        counts = sorted(set(bucket.chunks))
        of_bucket = (
            str(len(bucket.chunks)),
            str(bucket.chunk or "-"),
            "-".join(map(str, counts[:: max(1, len(counts) - 1)])),
            " ".join(f"{t * 1e3:.1f}" for t in bucket.forward),
            " ".join(f"{t * 1e3:.1f}" for t in bucket.backward),
        )
        for h, hybrid in enumerate(bucket.hybrid_tasks):
            of_hybrid = (" + ".join(hybrid.tasks), str(sum(tokens[name] for name in hybrid.tasks)))
            table.add_row("" if h else str(b), *of_hybrid, *(() if h else of_bucket))
    return table


def _compared(latency: float, alternatives: Mapping[str, float | None]) -> Table:
    table = Table(title="predicted seconds of one step of every task")
    table.add_column("policy")
    table.add_column("seconds", justify="right")
    table.add_column("against this plan", justify="right")
    table.add_row("this plan", f"{latency:.4g}", "")
    for name, value in alternatives.items():
        table.add_row(
            {"padded": "zero-padded", "interleave_off": "--interleave off"}.get(name, name),
            "does not fit" if value is None else f"{value:.4g}",
            "" if value is None or not latency else f"{value / latency:.2f}x",
        )
    return table


def print_meshes(plans: Sequence[tuple[Plan, str]], refused: Mapping[Mesh, str]) -> None:
    """Print ways to divide the ranks, with their predictions and flags.

    Args:
        plans: The best plan of each way, and the flags of a run.
        refused: Ways that do not fit into memory, and why.
    """
    meshes = [*(plan.mesh for plan, _ in plans), *refused]
    experts = any(mesh.expert_tensor is not None for mesh in meshes)
    columns = ["tensor", "stages", "pipelines", *["experts"] * experts, "seconds a step", "most memory GiB"]
    table = Table(title="ways to divide the ranks")
    for column in (*columns, "flags"):
        table.add_column(column, justify="left" if column == "flags" else "right")
    shown = [(f"{plan.predicted_latency_s:.4g}", _most_memory(plan), words) for plan, words in plans]
    shown += [("-", "-", f"does not fit: {why}") for why in refused.values()]
    for mesh, cells in zip(meshes, shown, strict=True):
        degrees = (mesh.tensor, mesh.pipeline, mesh.data, *[mesh.expert] * experts)
        table.add_row(*map(str, degrees), *cells)
    make_console().print(table)


def _most_memory(plan: Plan) -> str:
    return f"{max(plan.memory_bytes) / (1 << 30):.2f}" if plan.memory_bytes else "not predicted"
