"""Predict the peak memory of a training step, and choose a parallel method that fits.

    megatron-mux estimate --model DIR --gpus 4 --gpu-memory 16GiB --sequence-length 512
    megatron-mux estimate --model config.json --gpus 8 --gpu-memory 80GB --sequence-length 2048 --json
    megatron-mux estimate --model DIR --gpus 8 --gpu-memory 80GB --tasks tasks.yaml
    megatron-mux estimate --model DIR --gpus 8 --gpu-memory 80GB --tasks tasks.yaml --method dry-run
    megatron-mux estimate --model DIR --gpus 1 --gpu-memory 80GB --sequence-length 2048 --plot memory.svg

Only config.json is read: no weights, and no GPU is needed. Methods:

- `ours`: every division among GPUs (data, tensor, pipeline, expert; ZeRO; recomputation; offload), ranked by predicted
  speed. For a task file it takes memory from dry runs of this engine at a few sizes, which are kept; for full
  fine-tuning it traces the model's layers in `transformers`, and uses closed forms for how ranks divide weights,
  gradients and optimizer states.
- `trace`: a step of `transformers` (and `peft`, for a task file of one task) traced with fake tensors and replayed
  through PyTorch's caching allocator with the options in PYTORCH_ALLOC_CONF; on one GPU or with plain data parallelism.
- `dry-run`: a step of this engine with fake tensors, with the best method of `ours` or with `--plan`.
- `all` (default): `ours`, and for full fine-tuning `trace`.

`--plot` draws memory over time. Answers, traces and sizes of models are cached in the user's cache directory.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from shlex import quote
from typing import TYPE_CHECKING

from megatron_mux.arguments.flag import FILE
from megatron_mux.arguments.parser import Parser, add_path
from megatron_mux.arguments.values import at_least, model, size
from megatron_mux.errors import UserError, exit_status, to_stderr
from megatron_mux.hub_cache import shown_model
from megatron_mux.memory.method_flags import METHODS, complete
from megatron_mux.memory.optimizers import DEFAULT, OPTIMIZERS

if TYPE_CHECKING:
    from rich.console import Console

    from megatron_mux.choice.engine_step import Tables
    from megatron_mux.choice.fit import Fit
    from megatron_mux.choice.ranking import Told
    from megatron_mux.choice.task_file import TaskFile
    from megatron_mux.memory.question import Question
    from megatron_mux.memory.store import SavedOutput
    from megatron_mux.memory.trace.tracer import Tracer

PROGRAM = "megatron-mux estimate"


def parse(argv: Sequence[str] | None, program: str = PROGRAM) -> argparse.Namespace:
    """Parse and check the command line."""
    arguments = build_parser(program).parse_args(argv)
    complete(arguments)
    return arguments


def build_parser(program: str = PROGRAM) -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = Parser(prog=program, description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add(
        "--model",
        "--backbone",
        type=model,
        required=True,
        metavar="CONFIG_OR_DIR",
        help="config.json, under any name, or its directory (which --method dry-run needs), or org/name in the Hugging "
        "Face cache",
    )
    add("--gpus", type=at_least(1), required=True, metavar="N", help="how many GPUs")
    add(
        "--gpu-memory", type=size, required=True, metavar="SIZE",
        help="memory of each GPU, such as 16GiB (GB is the same, 2^30 bytes). A card has less than its name says: "
        "give the size that its driver or torch shows, such as 79.1GiB for an 80 GB card",
    )  # fmt: skip
    add(
        "--sequence-length",
        type=at_least(2),
        metavar="L",
        help="tokens of a sequence; with --tasks each task uses its data.max_length, which must not exceed L",
    )
    add(
        "--batch-size",
        type=at_least(1),
        metavar="B",
        help="sequences in a micro-batch on each GPU (default: as many as fit; ours then adds micro-batches up to a "
        "step of at least 64); with --tasks the file defines it",
    )
    add("--method", default="all", metavar="NAME", help=f"how to predict: {', '.join(METHODS)} (all)")
    tasks = "tasks.yaml: train these tasks, with their own batches and lengths (default: full fine-tuning)"
    add_path(parser, "--tasks", "FILE", tasks)
    _add_recipe(parser)
    _add_backbone(parser)
    _add_dry_run(parser)
    add("--plot", **FILE, help="plot memory over time, one plot per method (.png, .svg)")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    return parser


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add the flags for how the model is trained; `memory.method_flags` defines which method uses which."""
    add = parser.add_argument_group("training").add_argument
    add("--precision", choices=("bf16", "fp16", "fp32"), help="precision of weights (bf16)")
    add(
        "--optimizer", choices=tuple(OPTIMIZERS), metavar="NAME",
        help=f"optimizer of full fine-tuning, a name of TrainingArguments.optim: {', '.join(OPTIMIZERS)} ({DEFAULT})",
    )  # fmt: skip
    add(
        "--master-weights", action=argparse.BooleanOptionalAction,
        help="fp32 copies, gradients and moments next to half-precision weights; when traced: fp32 weights with "
        "autocast, like bf16=True of transformers (default)",
    )  # fmt: skip
    add("--attention", choices=("flash", "eager"), help="eager keeps attention scores (flash)")
    add(
        "--recompute", choices=("none", "selective", "full"),
        help="recomputation in a traced step (full or none) or in a dry run of --plan (none); ours ranks methods "
        "with and without it",
    )  # fmt: skip
    add(
        "--device",
        default="A100",
        metavar="NAME",
        help="the GPU, such as H100, whose speed and kernels to assume (A100)",
    )


def _add_backbone(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the backbone of a task file."""
    add = parser.add_argument_group("backbone, with --tasks").add_argument
    add(
        "--backbone-dtype", choices=("nf4", "int8", "fp8"),
        help="how the weights of linear modules are quantised on load, as in the run",
    )  # fmt: skip
    add(
        "--mux-expert-placement", **FILE,
        help="which expert ranks hold which experts, as megatron-mux place-experts writes it: only methods with as "
        "many expert ranks (default: neighbouring experts share one)",
    )  # fmt: skip
    add(
        "--expert-profile", **FILE,
        help="how often rows select each expert, as megatron-mux profile-experts writes it (default: all equally "
        "often)",
    )  # fmt: skip


def _add_dry_run(parser: argparse.ArgumentParser) -> None:
    """Add the flags of --method dry-run."""
    add = parser.add_argument_group("for --method dry-run").add_argument
    add("--plan", **FILE, help="dry-run this plan of megatron-mux plan only")
    add(
        "--backbone-weights", choices=("resident", "sharded", "offloaded", "sharded-offloaded"),
        help="where frozen weights are kept between uses, as in the run of the plan",
    )  # fmt: skip


def main(argv: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Predict and print; returns 2 if the input is wrong."""
    return exit_status(lambda: run(parse(argv, program)), program)


def run(arguments: argparse.Namespace) -> None:
    """Read the answer from the cache or compute it, and print it."""
    start = time.perf_counter()
    from megatron_mux.memory.store import Answers, Store

    console = None
    if not arguments.json:
        from megatron_mux.console import make_console

        console = make_console()
    if arguments.method == "dry-run":
        _dry_run(arguments, console, start)
        return
    shape = (console.width, console.color_system) if console is not None else None
    answers = Answers(Store("answers"), arguments, shape)
    saved = None if arguments.plot else answers.read()
    if saved is None:
        saved, cacheable = _answer(arguments, console)
        if cacheable:
            answers.write(saved)
    if console is None:
        print(json.dumps({**json.loads(saved.output), "seconds": time.perf_counter() - start}))
    else:
        print(saved.output, end="")
    for line in saved.errors:
        to_stderr(line)


def _answer(arguments: argparse.Namespace, console: Console | None) -> tuple[SavedOutput, bool]:
    """Compute the answer, as tables if there is a console; also returns whether it may be cached."""
    from megatron_mux.choice.memory_answer import MemoryAnswer
    from megatron_mux.memory.plot import check
    from megatron_mux.memory.store import SavedOutput
    from megatron_mux.memory.trace.tracer import Tracer
    from megatron_mux.memory.traced_estimate import NOT_TRACED

    if arguments.plot:
        check(arguments.plot)
    ahead: AbstractContextManager[None] = nullcontext()
    if arguments.tasks is not None and arguments.method != "trace":
        from megatron_mux.estimate.method_tables import importing

        ahead = importing()
    with ahead, Tracer() as tracer, _progress(arguments.method != "trace") as told:
        question, file = _question(arguments, tracer)
        tables = _tables(arguments)(file) if file is not None else None
        answer = MemoryAnswer.of(question, arguments.method, file, tables, told)
    if arguments.plot:
        answer.draw(arguments.plot)
    if console is None:
        output = json.dumps(answer.to_json())
    else:
        with console.capture() as captured:
            answer.print(console, _command(arguments, question))
        output = captured.get()
    return SavedOutput(output, answer.refusals), not any(NOT_TRACED in refusal for refusal in answer.refusals)


def _dry_run(arguments: argparse.Namespace, console: Console | None, start: float) -> None:
    """Predict with dry runs and print."""
    from megatron_mux.choice.memory_answer import about
    from megatron_mux.dry_run import command
    from megatron_mux.memory.plot import check
    from megatron_mux.memory.store import Store
    from megatron_mux.memory.tensors import Skeleton

    if arguments.plot:
        check(arguments.plot)
    skeleton = Skeleton(arguments.model, Store("models"))
    question, result = command.run(arguments, skeleton, to_stderr, _tables(arguments, to_stderr))
    if console is None:
        print(json.dumps({**result, **about(question), "seconds": time.perf_counter() - start}))
    else:
        command.show(console, result, _command(arguments, question))


def _tables(
    arguments: argparse.Namespace, say: Callable[[str], None] = lambda text: None
) -> Callable[[TaskFile], Tables]:
    """Return what makes the tables of a task file's bytes; `say` is told before dry runs."""

    def made(file: TaskFile) -> Tables:
        from megatron_mux.estimate.method_tables import MethodTables
        from megatron_mux.gpus import known

        return MethodTables(file, arguments.precision, known(arguments.device).gpu, say)

    return made


@contextmanager
def _progress(wanted: bool) -> Iterator[Told]:
    """Context with what shows people how many methods are predicted, and the best so far."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from megatron_mux.memory.sizes import show_size

    console = Console(stderr=True)
    columns = (
        MofNCompleteColumn(),
        TextColumn("methods"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    shown_to_people = wanted and console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown_to_people) as progress:
        shown = progress.add_task("importing", total=None)

        def told(done: int, total: int, best: Fit | None) -> None:
            text = "none fits so far"
            if best is not None:
                size, speed = show_size(best.peak_process), best.throughput
                text = f"best so far: {best.method.title}, {size}, {speed:,.0f} tokens/s"
            progress.update(shown, completed=done, total=total, description=text)

        yield told


def _question(arguments: argparse.Namespace, tracer: Tracer) -> tuple[Question, TaskFile | None]:
    """Convert the command line to a question; also returns the task file, unless a single task is traced.

    Raises:
        UserError: Flags are missing or contradict each other or the task file.
    """
    from megatron_mux.memory.caching.settings import Settings
    from megatron_mux.memory.question import Question
    from megatron_mux.memory.store import Store
    from megatron_mux.memory.tensors import Skeleton
    from megatron_mux.memory.trace.case import Options, of_task

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
        tracer.begin()  # its imports take seconds
    length, batch, file = arguments.sequence_length, arguments.batch_size, None
    if arguments.tasks is None:
        if length is None:
            raise UserError("--sequence-length: is missing: give the tokens of a sequence, or --tasks FILE")
    elif batch is not None:
        raise UserError(
            "--batch-size: --tasks defines it (per_device_train_batch_size x gradient_accumulation_steps): remove it"
        )
    elif arguments.method == "trace":
        options, batch, longest = of_task(arguments.tasks, options)
        if length is not None and length < longest:
            raise UserError(
                f"--sequence-length {length}: {arguments.tasks} has sequences of {longest} tokens"
            )
        length = longest
    else:
        from megatron_mux.choice.task_file import TaskFile

        file = TaskFile.of(arguments, skeleton)
        length = max(task.length for task in file.adapters)
    settings = Settings.of_environment()
    return Question(
        skeleton, arguments.gpus, arguments.gpu_memory, length, batch, options, settings, tracer
    ), file


def _command(arguments: argparse.Namespace, question: Question) -> str:
    """Return the start of the command that trains the task file; DIR where the backbone's directory is unknown."""
    config = question.skeleton.path
    backbone = quote(shown_model(config.parent)) if config.name == "config.json" else "DIR"
    placement = arguments.mux_expert_placement
    placed = f" --mux-expert-placement {quote(str(placement))}" if placement is not None else ""
    return (
        f"megatron-mux train {quote(str(arguments.tasks))} --backbone {backbone} --gpus {question.gpus} "
        f"--save SAVE_DIR{placed}"
    )
