"""Predict the peak memory of a training step, what fits on which parallel method, and which to choose.

    python tools/estimate_memory.py --model DIR --gpus 4 --gpu-memory 16GiB --sequence-length 512
    python tools/estimate_memory.py --model config.json --gpus 8 --gpu-memory 80GB --sequence-length 2048 --json
    python tools/estimate_memory.py --model DIR --gpus 8 --gpu-memory 80GB --tasks tasks.yaml
    python tools/estimate_memory.py --model DIR --gpus 8 --gpu-memory 80GB --tasks tasks.yaml --method dry-run
    python tools/estimate_memory.py --model DIR --gpus 1 --gpu-memory 80GB --sequence-length 2048 --plot memory.svg

Only config.json is read: no weights, and no GPU is needed. Methods:

- `ours`: every division among GPUs (data, tensor, pipeline, expert; ZeRO; recomputation; offload), ranked by predicted
  speed. Of a task file by closed forms of this engine; of full fine-tuning by traces of the model's layers in
  `transformers`, with closed forms for how ranks divide weights, gradients and optimizer states.
- `trace`: a step of `transformers` (and `peft`, for a task file of one task) traced with fake tensors and replayed
  through PyTorch's caching allocator with the options in PYTORCH_ALLOC_CONF; on one GPU or with plain data parallelism.
- `dry-run`: this engine's own step with fake tensors, of the best of `ours` or of `--plan`.
- `all` (default): `ours`, and for full fine-tuning `trace`.

The papers' own estimators (LLMem, DNNMem) are in benchmarks/llmem_tables.py. `--plot` draws memory over time. Answers,
traces and models' sizes are kept in the user's cache directory.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

from megatron_mux.arguments.parser import Parser
from megatron_mux.arguments.values import at_least, path, size
from megatron_mux.errors import UserError, exit_status
from megatron_mux.memory.method_flags import METHODS, settle
from megatron_mux.memory.optimizers import DEFAULT, OPTIMIZERS

if TYPE_CHECKING:
    from rich.console import Console

    from megatron_mux.choice.task_file import TaskFile
    from megatron_mux.memory.question import Question
    from megatron_mux.memory.store import SavedOutput
    from megatron_mux.memory.tensors import Skeleton
    from megatron_mux.memory.trace.tracer import Tracer


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
        help=f"how to predict: {', '.join(METHODS)} (all)",
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
        "--plot",
        type=path,
        metavar="FILE",
        help="draw memory over time, a picture for each method (.png, .svg)",
    )
    add("--json", action="store_true", help="print one JSON object instead of tables")
    return parser


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    """How the model is trained; `memory.method_flags` says which method uses which."""
    add = parser.add_argument_group("training").add_argument
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
    """Answer from the cache or anew, and print."""
    start = time.perf_counter()
    from megatron_mux.memory.store import Answers, Store

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


def _said(arguments: argparse.Namespace, console: Console | None) -> tuple[SavedOutput, bool]:
    """The answer, as a table if there is a console for it; and whether it would be the same another time."""
    from megatron_mux.choice.memory_answer import MemoryAnswer
    from megatron_mux.memory.plot import check
    from megatron_mux.memory.store import SavedOutput
    from megatron_mux.memory.trace.tracer import Tracer
    from megatron_mux.memory.traced_estimate import NOT_TRACED

    if arguments.plot:
        check(arguments.plot)
    with Tracer() as tracer:
        question, file = _question(arguments, tracer)
        answer = MemoryAnswer.of(question, arguments, file)
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
    """Print what dry runs say."""
    from megatron_mux.choice.memory_answer import about
    from megatron_mux.dry_run import command
    from megatron_mux.memory.plot import check
    from megatron_mux.memory.store import Store
    from megatron_mux.memory.tensors import Skeleton

    if arguments.plot:
        check(arguments.plot)
    skeleton = Skeleton(arguments.model, Store("models"))
    question, told = command.run(arguments, skeleton, lambda text: print(text, file=sys.stderr, flush=True))
    if console is None:
        print(json.dumps({**told, **about(question), "seconds": time.perf_counter() - start}))
    else:
        command.show(console, told, _command(arguments, question))


def _question(arguments: argparse.Namespace, tracer: Tracer) -> tuple[Question, TaskFile | None]:
    """The question that the command line asks; and the tasks, where they train together.

    Raises:
        UserError: It cannot be asked.
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
        tracer.begin()  # what it imports takes seconds
    length, batch, file = arguments.sequence_length, arguments.batch_size, None
    if arguments.tasks is None:
        if length is None:
            raise UserError("--sequence-length: is missing: give the tokens of a sequence, or --tasks FILE")
    elif batch is not None:
        raise UserError(
            "--batch-size: --tasks says it (per_device_train_batch_size x gradient_accumulation_steps): leave it out"
        )
    elif arguments.method == "trace":
        options, batch, longest = of_task(arguments.tasks, options)
        if length is not None and length < longest:
            raise UserError(
                f"--sequence-length {length}: {arguments.tasks} has sequences of {longest} tokens"
            )
        length = longest
    else:
        file = _task_file(arguments, skeleton)
        length = max(task.length for task in file.adapters)
    settings = Settings.of_environment()
    return Question(
        skeleton, arguments.gpus, arguments.gpu_memory, length, batch, options, settings, tracer
    ), file


def _task_file(arguments: argparse.Namespace, skeleton: Skeleton) -> TaskFile:
    """The tasks that train together; they say all that a step computes."""
    from megatron_mux.choice.task_file import TaskFile

    file = TaskFile.read(skeleton.path, arguments.tasks)
    file.check(skeleton.tensors.positions, arguments.sequence_length)
    return file


def _command(arguments: argparse.Namespace, question: Question) -> str:
    """Start of the command line that trains a task file. A config.json by itself does not say whose it is."""
    config = question.skeleton.path
    backbone = config.parent if config.name == "config.json" else "DIR"
    return (
        f"torchrun --nproc-per-node {question.gpus} pretrain_mux.py --backbone {backbone} "
        f"--mux-tasks {arguments.tasks}"
    )


if __name__ == "__main__":
    sys.exit(main())
