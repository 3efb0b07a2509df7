"""`megatron-mux estimate --method dry-run`: runs it and prints its result."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_mux.errors import UserError
from megatron_mux.memory.question import Question
from megatron_mux.memory.sizes import GIB, show_size
from megatron_mux.memory.store import Answers, SavedOutput, Store
from megatron_mux.memory.trace.case import Options
from megatron_mux.tasks import load_task_file

if TYPE_CHECKING:
    from rich.console import Console

    from megatron_mux.choice.engine_step import Tables
    from megatron_mux.choice.task_file import TaskFile
    from megatron_mux.dry_run.selection import Selection
    from megatron_mux.memory.tensors import Skeleton


def run(
    arguments: Namespace,
    skeleton: Skeleton,
    say: Callable[[str], None],
    tables: Callable[[TaskFile], Tables],
) -> tuple[Question, dict[str, Any]]:
    """Answer the tool's question in JSON form; draw the picture if `--plot` is given.

    Args:
        tables: Of a task file's bytes, by which methods are ranked.

    Raises:
        UserError: The input is wrong, or a dry run cannot execute it.
    """
    if arguments.tasks is None:
        raise UserError("--method dry-run: trains tasks on a frozen backbone: add --tasks FILE")
    if arguments.precision == "fp16":
        raise UserError("--precision fp16: --method dry-run supports bf16 and fp32, as pretrain_mux.py does")
    if arguments.batch_size is not None:
        raise UserError("--batch-size: --tasks defines it: remove it")
    specs = load_task_file(arguments.tasks, data_later=True)
    length = max(spec.data.max_length for spec in specs)
    options = Options(arguments.device, arguments.precision)
    question = Question(skeleton, arguments.gpus, arguments.gpu_memory, length, options=options)
    question.check()
    # Programs and people are told the same.
    about = {name: value for name, value in vars(arguments).items() if name not in ("json", "plot")}
    answers = Answers(Store("answers"), Namespace(**about))
    said = None if arguments.plot else answers.read()
    if said is not None:
        return question, json.loads(said.output)
    from megatron_mux.dry_run.selection import choose  # imports torch, which takes seconds

    answer = choose(arguments, question, say, tables)
    if arguments.plot:
        _draw(answer, arguments.plot, question)
    told = answer.to_json()
    answers.write(SavedOutput(json.dumps(told), []))
    return question, told


def show(console: Console, told: Mapping[str, Any], command: str) -> None:
    """Print the result as a table.

    Args:
        command: Start of the command line that runs the selected method.
    """
    from rich.table import Table

    table = Table(title="dry runs of this engine, GiB per GPU")
    for column in ("method", "rank", "fits", "in use", "reserved", "process", "range"):
        table.add_column(column, justify="left" if column in ("method", "rank", "fits") else "right")
    for one in told["methods"]:
        for rank in one["ranks"]:
            sizes = [rank[f"peak_{kind}_bytes"] / GIB for kind in ("allocated", "reserved", "process")]
            least, most = (size / GIB for size in rank["peak_process_interval_bytes"])
            table.add_row(
                " ".join(filter(None, (one["name"], one["details"]))),
                f"{rank['rank']}, stage {rank['stage'] + 1}/{one['pipeline_parallel']}",
                "yes" if rank["fits"] else "no",
                *(f"{size:.2f}" for size in sizes),
                f"{least:.2f} to {most:.2f}",
            )
    console.print(table)
    for line in _lines(told, command):
        console.print(line, highlight=False, soft_wrap=True)


def _lines(told: Mapping[str, Any], command: str) -> list[str]:
    fitting = [one for one in told["methods"] if one["fits"]]
    one = fitting[0] if fitting else told["methods"][-1]
    parts = ", ".join(f"{part} {show_size(size)}" for part, size in one["breakdown"].items())
    lines = [
        f"{one['name']}: the peak is on rank {one['worst_rank']['rank']} {one['worst_rank']['at']}",
        f"its process holds {parts}",
        "the range covers uncertainty about kernels, context and NCCL, which were not measured",
    ]
    if told["data_not_read"]:
        names = ", ".join(told["data_not_read"])
        lines.append(
            f"upper bound: the data of {names} cannot be read: all sequences count as max_length tokens, all labelled"
        )
    if not fitting:
        return [*lines, "selected: nothing: none of the methods tried fits"]
    details = f" ({one['details']})" if one["details"] else ""
    return [*lines, f"selected: {one['name']}{details}", f"run it with: {command} {' '.join(one['flags'])}"]


def _draw(selection: Selection, file: Path, question: Question) -> None:
    """Draw memory over time of the worst rank of the chosen method, or of the last one tried."""
    from megatron_mux.memory.plot import draw, traced

    one = selection.chosen or selection.tried[-1]
    title = f"{question.skeleton.tensors.model_type}, {one.name}, rank {one.worst.rank} of {one.run.world}"
    panel = traced(one.worst.prediction, f"{one.name}, rank {one.worst.rank}")
    draw([panel], title, question.gpu_memory, file)
