"""`tools/estimate_memory.py --method rehearsal`: its answer, for programs and for people."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_mux.errors import UserError
from megatron_mux.memory.answers import Answers, Said
from megatron_mux.memory.estimators import Question
from megatron_mux.memory.sizes import GIB, show_size
from megatron_mux.memory.store import Store
from megatron_mux.memory.trace.process import TraceError
from megatron_mux.tasks import load_task_file

if TYPE_CHECKING:
    from rich.console import Console

    from megatron_mux.memory.tensors import Skeleton
    from megatron_mux.rehearsal.choosing import Answer


def run(
    arguments: Namespace, skeleton: Skeleton, say: Callable[[str], None]
) -> tuple[Question, dict[str, Any]]:
    """What is asked, and the answer as programs read it; its picture is drawn if one is asked for.

    Args:
        arguments: The tool's.
        skeleton: The model.
        say: Told what takes time.

    Raises:
        UserError: The input is wrong, or cannot be rehearsed.
    """
    if arguments.tasks is None:
        raise UserError("--method rehearsal: rehearses tasks on a frozen backbone: give --tasks FILE")
    if arguments.precision == "fp16":
        raise UserError("--precision fp16: --method rehearsal knows bf16 and fp32, as pretrain_mux.py does")
    if arguments.batch_size is not None:
        raise UserError("--batch-size: --tasks says it: leave it out")
    specs = load_task_file(arguments.tasks, data_later=True)
    length = max(spec.data.max_length for spec in specs)
    question = Question(skeleton, arguments.gpus, arguments.gpu_memory, length)
    question.check()
    # Programs and people are told the same.
    about = {name: value for name, value in vars(arguments).items() if name not in ("json", "plot")}
    answers = Answers(Store("rehearsed"), Namespace(**about))
    said = None if arguments.plot else answers.read()
    if said is not None:
        return question, json.loads(said.output)
    from megatron_mux.rehearsal.choosing import choose  # imports torch, which takes seconds

    answer = choose(arguments, question, specs, say)
    if arguments.plot:
        _draw(answer, arguments.plot, question)
    told = answer.to_json()
    answers.write(Said(json.dumps(told), []))
    return question, told


def show(console: Console, told: Mapping[str, Any], command: str) -> None:
    """Print an answer for people.

    Args:
        console: Where to.
        told: From `run`.
        command: What begins the command line that runs what is selected.
    """
    from rich.table import Table

    table = Table(title="by rehearsals of this engine's steps: GiB of a GPU")
    for column in ("method", "rank", "fits", "in use", "reserved", "process", "least to most"):
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
        f"{one['name']}: most is in use on rank {one['worst_rank']['rank']} {one['worst_rank']['at']}",
        f"its process has {parts}",
        "least and most: by what is not known of kernels, context and NCCL; nothing was measured on a GPU",
    ]
    if told["data_not_read"]:
        names = ", ".join(told["data_not_read"])
        lines.append(
            f"upper bound: the data of {names} are not at hand: all sequences have max_length, with labels throughout"
        )
    if not fitting:
        return [*lines, "selected: nothing: none of the methods that were rehearsed fits"]
    details = f" ({one['details']})" if one["details"] else ""
    return [*lines, f"selected: {one['name']}{details}", f"run it with: {command} {' '.join(one['flags'])}"]


def _draw(answer: Answer, file: Path, question: Question) -> None:
    """Draw the memory over time of the worst rank of what is chosen, or of what was tried last."""
    from megatron_mux.memory.plot import draw, traced
    from megatron_mux.rehearsal.answer import prediction
    from megatron_mux.rehearsal.process import rehearsals

    one = answer.chosen or answer.tried[-1]
    try:
        (recording,) = rehearsals([(one.setting, one.worst.rank)])
    except TraceError as error:
        raise UserError(f"--method rehearsal: {error}") from None
    title = (
        f"{question.skeleton.tensors.model_type}, {one.name}, rank {one.worst.rank} of {one.setting.world}"
    )
    panel = traced(prediction(recording, one.setting), f"{one.name}, rank {one.worst.rank}")
    draw([panel], title, question.gpu_memory, file)
