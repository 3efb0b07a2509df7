"""Predict the peak memory of a training step, what fits on which parallel method, and which to choose.

    python tools/estimate_memory.py --model DIR --gpus 4 --gpu-memory 16GiB --sequence-length 512
    python tools/estimate_memory.py --model config.json --gpus 8 --gpu-memory 80GB --sequence-length 2048 --json
    python tools/estimate_memory.py --model DIR --gpus 8 --gpu-memory 80GB --tasks tasks.yaml
    python tools/estimate_memory.py --model DIR --gpus 8 --gpu-memory 80GB --tasks tasks.yaml --method dry-run
    python tools/estimate_memory.py --model DIR --gpus 1 --gpu-memory 80GB --sequence-length 2048 --plot memory.svg

Only config.json is read: no weights, and no GPU is needed. Methods: `ours`, closed forms for every division among GPUs
(data, tensor, pipeline, expert; ZeRO; recomputation; offload), of full fine-tuning by the operators of `transformers`
or of a task file's adapters by those of this engine, ranked by predicted speed; `llmem`, the closed forms of LLMem (Kim
et al. 2024) with the choice of its Algorithm 1; `dnnmem`, DNNMem as LLMem rebuilds it, for one GPU; `trace`, a step of
`transformers` (of `transformers` and `peft`, for a task file of one task) traced with fake tensors and replayed through
PyTorch's caching allocator with the options that PYTORCH_ALLOC_CONF holds, on one GPU or on several with plain data
parallelism. `all`: every one that knows the model.
`--plot` draws memory over time, a picture for each method. Answers, traces and models' sizes are kept in the user's
cache directory.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

from megatron_mux.arguments.parser import Parser
from megatron_mux.arguments.values import at_least, path, size
from megatron_mux.errors import UserError, exit_status
from megatron_mux.memory.asked import settle
from megatron_mux.memory.optimizers import DEFAULT, OPTIMIZERS
from megatron_mux.memory.sizes import GIB, show_size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from megatron_mux.choice.answer import Choice
    from megatron_mux.choice.recipes import TaskFile
    from megatron_mux.memory.answers import Said
    from megatron_mux.memory.estimators import Answer, Question
    from megatron_mux.memory.tensors import Skeleton
    from megatron_mux.memory.trace.process import Tracer


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    arguments = build_parser().parse_args(argv)
    settle(arguments)
    return arguments


def build_parser() -> argparse.ArgumentParser:
    """The command line's parser."""
    parser = Parser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add(
        "--model",
        type=path,
        required=True,
        metavar="CONFIG_OR_DIR",
        help="config.json, by itself under any name, or its directory (which --method dry-run needs)",
    )
    add("--gpus", type=at_least(1), required=True, metavar="N", help="how many GPUs")
    add(
        "--gpu-memory", type=size, required=True, metavar="SIZE",
        help="of each GPU, such as 16GiB (GB is the same, 2^30 bytes). A card has less than its name says: give what "
        "its driver or torch shows, such as 79.1GiB of an 80 GB card",
    )  # fmt: skip
    add(
        "--sequence-length",
        type=at_least(2),
        metavar="L",
        help="tokens of a sequence; with --tasks each task's data.max_length counts, and must not be more",
    )
    add(
        "--batch-size",
        type=at_least(1),
        metavar="B",
        help="sequences on each GPU at once (default: as many as fit, and with ours micro-batches that make a step of "
        "at least 64); with --tasks the file says it",
    )
    add(
        "--method",
        default="all",
        metavar="NAME",
        help="how to predict: ours, llmem, dnnmem, trace, dry run (of --tasks), or all that know the model (default)",
    )
    add(
        "--tasks",
        type=path,
        metavar="FILE",
        help="tasks.yaml: train these tasks, with their own batches and lengths (default: every parameter)",
    )
    _add_recipe(parser)
    _add_dry_run(parser)
    add(
        "--llmem-base-memory", type=size, metavar="SIZE", help="in use before parameters are (LLMem's m_base)"
    )
    add(
        "--plot",
        type=path,
        metavar="FILE",
        help="draw memory over time, a picture for each method (.png, .svg)",
    )
    add("--json", action="store_true", help="print one JSON object instead of tables")
    return parser


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    """What the papers' methods do not ask, which have mixed precision and Adam: see `memory.asked`."""
    add = parser.add_argument_group("not for the papers' methods").add_argument
    add("--precision", choices=("bf16", "fp16", "fp32"), help="of weights (bf16)")
    add(
        "--optimizer", choices=tuple(OPTIMIZERS), metavar="NAME",
        help=f"of full fine-tuning, as TrainingArguments.optim has it: {', '.join(OPTIMIZERS)} ({DEFAULT})",
    )  # fmt: skip
    add(
        "--master-weights", action=argparse.BooleanOptionalAction,
        help="fp32 copies, gradients and moments beside half-precision weights; traced: fp32 weights that autocast "
        "computes with, as bf16=True of transformers has it (default)",
    )  # fmt: skip
    add("--attention", choices=("flash", "eager"), help="eager: scores are kept (flash)")
    add(
        "--recompute", choices=("none", "selective", "full"),
        help="what a traced step (not selective), or a dry run of --plan, computes again in the backward pass "
        "(none); ours ranks methods with and without",
    )  # fmt: skip
    add("--device", default="A100", metavar="NAME", help="the GPU, such as H100: speed and kernels (A100)")


def _add_dry_run(parser: argparse.ArgumentParser) -> None:
    """What only a dry run asks."""
    add = parser.add_argument_group("for --method dry-run").add_argument
    add("--plan", type=path, metavar="FILE", help="use this plan of tools/plan.py, and no other")
    add(
        "--backbone-weights", choices=("resident", "sharded", "offloaded", "sharded-offloaded"),
        help="where frozen weights live between uses, as the plan's run will have it",
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Predict and print; 2 when the input was wrong."""
    return exit_status(lambda: run(parse(argv)), "estimate_memory.py")


def run(arguments: argparse.Namespace) -> None:
    """The work, once the command line is good."""
    start = time.perf_counter()
    from megatron_mux.memory.answers import Answers
    from megatron_mux.memory.store import Store

    console = None
    if not arguments.json:
        from rich.console import Console

        console = Console()
    if arguments.method == "dry-run":
        _dry_run(arguments, console, start)
        return
    shape = (console.width, console.color_system) if console is not None else None
    answers = Answers(Store("answers"), arguments, shape)
    said = None if arguments.plot else answers.read()
    if said is None:
        said, lasting = _said(arguments, console)
        if lasting:
            answers.write(said)
    if console is None:
        print(json.dumps({**json.loads(said.output), "seconds": time.perf_counter() - start}))
    else:
        print(said.output, end="")
    for line in said.errors:
        print(line, file=sys.stderr)


def _said(arguments: argparse.Namespace, console: Console | None) -> tuple[Said, bool]:
    """The answer, as a table if there is a console for it; and whether it would be the same another time."""
    from megatron_mux.memory.answers import Said
    from megatron_mux.memory.estimators import NOT_TRACED
    from megatron_mux.memory.plot import check
    from megatron_mux.memory.trace.process import Tracer

    if arguments.plot:
        check(arguments.plot)
    with Tracer() as tracer:
        question, file = _question(arguments, tracer)
        choice, answer, refusals = _asked(arguments, question, file)
    if arguments.plot:
        _draw(arguments, question, answer, choice)
    if console is None:
        output = json.dumps(_json(question, answer, choice))
    else:
        with console.capture() as captured:
            _print(console, arguments, question, answer, choice)
        output = captured.get()
    return Said(output, refusals), not any(NOT_TRACED in refusal for refusal in refusals)


def _dry_run(arguments: argparse.Namespace, console: Console | None, start: float) -> None:
    """Print what dry runs say."""
    from megatron_mux.dry_run import command
    from megatron_mux.memory.plot import check
    from megatron_mux.memory.store import Store
    from megatron_mux.memory.tensors import Skeleton

    if arguments.plot:
        check(arguments.plot)
    skeleton = Skeleton(arguments.model, Store("models"))
    question, told = command.run(arguments, skeleton, lambda text: print(text, file=sys.stderr, flush=True))
    if console is None:
        print(json.dumps({**told, **_about(question), "seconds": time.perf_counter() - start}))
    else:
        command.show(console, told, _command(arguments, question))


def _question(arguments: argparse.Namespace, tracer: Tracer) -> tuple[Question, TaskFile | None]:
    """What the command line asks; the tasks, where they train together.

    Raises:
        UserError: It cannot be asked.
    """
    from megatron_mux.memory.caching.settings import Settings
    from megatron_mux.memory.estimators import Question
    from megatron_mux.memory.store import Store
    from megatron_mux.memory.tensors import Skeleton
    from megatron_mux.memory.trace.options import Options, of_task

    if arguments.method == "trace" and arguments.recompute == "selective":
        raise UserError("--recompute selective: transformers recomputes whole layers: use full or none")
    options = Options(
        arguments.device,
        arguments.precision,
        arguments.master_weights,
        arguments.optimizer,
        arguments.attention,
        arguments.recompute == "full",
    )
    skeleton = Skeleton(arguments.model, Store("models"), tracer.sizes)
    if not skeleton.is_known:
        tracer.start()  # what it imports takes seconds
    length, batch, file = arguments.sequence_length, arguments.batch_size, None
    if arguments.tasks is not None:
        if batch is not None:
            raise UserError(
                "--batch-size: --tasks says it (per_device_train_batch_size x gradient_accumulation_steps): "
                "leave it out"
            )
        if arguments.method == "trace":
            options, batch, longest = of_task(arguments.tasks, options)
            if length is not None and length < longest:
                raise UserError(
                    f"--sequence-length {length}: {arguments.tasks} has sequences of {longest} tokens"
                )
        else:
            file = _task_file(arguments, skeleton)
            longest = file.step.longest
        length = longest
    elif length is None:
        raise UserError("--sequence-length: is missing: give the tokens of a sequence, or --tasks FILE")
    question = Question(
        skeleton,
        arguments.gpus,
        arguments.gpu_memory,
        length,
        batch,
        arguments.llmem_base_memory,
        options,
        Settings.of_environment(),
        tracer,
    )
    return question, file


def _asked(
    arguments: argparse.Namespace, question: Question, file: TaskFile | None
) -> tuple[Choice | None, Answer, list[str]]:
    """Our own ranking, what the others say, and why some say nothing."""
    from megatron_mux.memory.estimators import Answer, begin, estimate

    others = arguments.method == "trace" or (arguments.method != "ours" and arguments.tasks is None)
    if others:
        begin(question, arguments.method)
    choice, refusals = _choice(arguments, question, file)
    answer = Answer([], None, None)
    if others:
        try:
            answer = estimate(question, arguments.method)
        except UserError as error:
            if choice is None:
                raise UserError(*refusals, *error.problems) from None
            refusals += error.problems
    return choice, answer, [*refusals, *answer.refusals]


def _task_file(arguments: argparse.Namespace, skeleton: Skeleton) -> TaskFile:
    """The tasks that train together; they say all that a step computes."""
    if arguments.method not in ("ours", "all"):
        raise UserError(f"--tasks: --method {arguments.method} knows full fine-tuning only: use ours")
    from megatron_mux.choice.recipes import TaskFile

    file = TaskFile.read(skeleton.path, arguments.tasks)
    file.check(skeleton.tensors.positions, arguments.sequence_length)
    return file


def _choice(
    arguments: argparse.Namespace, question: Question, file: TaskFile | None
) -> tuple[Choice | None, list[str]]:
    """Our own ranking, and why there is none where others may answer."""
    if arguments.method not in ("ours", "all"):
        return None, []
    from megatron_mux.choice.answer import Choice

    question.check()
    try:
        return Choice.of(question, arguments, file), []
    except UserError as error:
        if arguments.method == "ours" or file is not None or "--device" in str(error):
            raise
        return None, list(error.problems)


def _draw(arguments: argparse.Namespace, question: Question, answer: Answer, choice: Choice | None) -> None:
    """Draw what is predicted of each method, over time as far as it is known."""
    from megatron_mux.memory.plot import closed, draw, traced

    panels = [
        traced(entry.prediction, f"{entry.layout.name}, batch {entry.batch}: a traced step")
        for entry in answer.entries
        if entry.prediction is not None
    ]
    for ranked in choice.ranking.entries[:_DRAWN] if choice is not None else ():
        name = " ".join((ranked.method.name, ranked.method.details)).strip()
        panels.append(closed(f"{name}\nbatch {ranked.batch}: ours", ranked.instants))
    for entry in answer.entries:
        if entry.prediction is None and entry.breakdown:
            name = f"{entry.layout.name} {_KINDS[entry.layout.kind]}"
            panels.append(
                closed(f"{name}\nbatch {entry.batch}: {entry.estimator}", {"peak": entry.breakdown})
            )
    title = f"{question.skeleton.tensors.model_type}, {question.length} tokens, {question.gpus} GPU(s)"
    draw(panels, title, question.gpu_memory, arguments.plot)


_DRAWN = 6
"""Methods of ours in a picture."""


def _json(question: Question, answer: Answer, choice: Choice | None) -> dict[str, Any]:
    """What programs read, but for the time that it took."""
    ranked = choice.to_json() if choice is not None else {}
    return {
        "selected": answer.selected,
        "selected_kind": answer.chosen.layout.kind if answer.chosen else None,
        "batch_size": answer.chosen.batch if answer.chosen else 0,
        **ranked,
        "methods": [*ranked.get("methods", ()), *(entry.to_json() for entry in answer.entries)],
        **_about(question),
    }


def _about(question: Question) -> dict[str, Any]:
    """The part of what programs read that says what was asked."""
    tensors = question.skeleton.tensors
    return {
        "model": {"model_type": tensors.model_type, "parameters": tensors.total, "layers": tensors.layers},
        "gpus": question.gpus,
        "gpu_memory_bytes": question.gpu_memory,
        "sequence_length": question.length,
    }


def _command(arguments: argparse.Namespace, question: Question) -> str:
    """What begins the command line that trains a task file. A config.json by itself does not say whose it is."""
    config = question.skeleton.path
    backbone = config.parent if config.name == "config.json" else "DIR"
    return (
        f"torchrun --nproc-per-node {question.gpus} pretrain_mux.py --backbone {backbone} "
        f"--mux-tasks {arguments.tasks}"
    )


_KINDS = {
    "CDP": "replicated",
    "ADP": "ZeRO-3",
    "TP": "sharded",
    "DP+TP": "ZeRO-3, sharded",
}


def _breakdown(answer: Answer) -> Table:
    """What each peak is made of, a column each."""
    from rich.table import Table

    entries = [entry for entry in answer.entries if entry.breakdown]
    table = Table(title="GiB of one GPU at that peak")
    table.add_column("")
    for entry in entries:
        table.add_column(f"{entry.layout.name}\n{entry.layout.kind}\n{entry.estimator}", justify="right")
    for part in dict.fromkeys(part for entry in entries for part in entry.breakdown):
        sizes = (entry.breakdown.get(part, 0) / GIB for entry in entries)
        table.add_row(part.replace("_", "-"), *(f"{size:.2f}" if size else "-" for size in sizes))
    return table


def _print(
    console: Console, arguments: argparse.Namespace, question: Question, answer: Answer, choice: Choice | None
) -> None:
    """What people read."""
    if answer.entries:
        _print_layouts(console, question, answer, choice is None)
    if choice is not None:
        from megatron_mux.choice.fit import SEQUENCES
        from megatron_mux.choice.tables import show

        show(console, choice.ranking, choice.impossible, _command(arguments, question))
        if question.batch is None and choice.file is None:
            console.print(
                f"these steps have at least {SEQUENCES} sequences, in as many micro-batches (parts), whose "
                "gradients add up: with --batch-size there are no more of them than a pipeline needs",
                highlight=False,
                soft_wrap=True,
            )


def _print_layouts(console: Console, question: Question, answer: Answer, choose: bool) -> None:
    """What the papers' methods say; their choice too, where there is none of ours."""
    from rich.table import Table

    tensors = question.skeleton.tensors
    table = Table(
        title=f"{tensors.model_type}, {tensors.total / 1e6:,.0f}M parameters, {question.gpus} x "
        f"{show_size(question.gpu_memory)}, {question.length} tokens"
    )
    columns = ("method", "", "by", "fits", "largest batch", "peak", "at batch")
    for column in columns:
        table.add_column(column, justify="right" if column in columns[4:] else "left")
    for entry in answer.entries:
        table.add_row(
            entry.layout.name,
            _KINDS[entry.layout.kind],
            entry.estimator,
            "yes" if entry.fits else "no",
            str(entry.largest_batch or "-"),
            show_size(entry.peak_process) if entry.peak_process is not None else "-",
            str(entry.batch),
        )
    console.print(table)
    console.print(_breakdown(answer))
    for entry in answer.entries:
        if entry.why:
            console.print(f"{entry.layout.name}: {entry.why}")
        if entry.prediction:
            least, most = (show_size(size) for size in entry.prediction.interval)
            expandable = show_size(entry.prediction.peak_reserved_expandable)
            console.print(
                f"trace: most is in use {entry.prediction.moment}; {least} to {most} by what is not known of "
                f"kernels, context and NCCL (not measured on a GPU); {expandable} reserved with expandable segments"
            )
            console.print(f"trace: {question.options.told()}; {entry.prediction.settings.told()}")
    if not choose:
        return
    if answer.chosen:
        chosen = answer.chosen
        kind = _KINDS[chosen.layout.kind]
        console.print(f"selected: {answer.selected} ({kind}), {chosen.batch} sequence(s) on each GPU")
    elif answer.selected:
        console.print(f"selected: {answer.selected}: nothing fits, keep optimizer states in host memory")
    else:
        console.print(
            "selected: nothing: one model does not fit on a GPU, and this method knows no other way"
        )


if __name__ == "__main__":
    sys.exit(main())
