"""Which flags of `tools/estimate_memory.py` go with which method: none is taken in vain."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_mux.errors import UserError
from megatron_mux.gpus import Known, known
from megatron_mux.memory.optimizers import DEFAULT

_FULL = ("ours", "trace", "llmem", "dnnmem")
"""Methods that predict full fine-tuning."""
_TASKS = ("ours", "trace", "dry-run")
"""Methods that predict a task file."""
_BY_PLAN = "dry run --plan"


@dataclass(frozen=True)
class Flag:
    """A flag that only some methods look at.

    Attributes:
        default: Its value where it is not given.
        full: Methods that look at it where every parameter is trained.
        tasks: Methods that look at it where a file's tasks are.
        why: What is said where it is refused, but for methods of full fine-tuning where one of them takes it.
    """

    default: object
    full: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    why: str = ""


_OF_TASKS = "each task of --tasks has its own: leave it out"
FLAGS: Mapping[str, Flag] = {
    "--precision": Flag("bf16", ("ours", "trace"), (*_TASKS, _BY_PLAN)),
    "--optimizer": Flag(DEFAULT, ("ours", "trace"), why=_OF_TASKS),
    "--master-weights": Flag(True, ("ours", "trace"), why=_OF_TASKS),
    "--attention": Flag("flash", ("ours", "trace"), ("ours", "trace")),
    "--recompute": Flag(
        "none",
        ("trace",),
        ("trace", _BY_PLAN),
        "with --tasks, for --method trace or a dry run of --plan: others try all",
    ),
    "--llmem-base-memory": Flag(None, ("llmem",)),
    "--plan": Flag(None, tasks=(_BY_PLAN,), why="only a dry run follows one: add --method dry-run"),
    "--backbone-weights": Flag(
        "resident", tasks=(_BY_PLAN,), why="goes with --plan and --method dry-run: other methods try all"
    ),
}


def settle(arguments: Namespace) -> None:
    """Refuse flags that the method does not look at, and give those that were left out their defaults.

    Args:
        arguments: The tool's; None for each of `FLAGS` that was not given.

    Raises:
        UserError: A line for each flag that is refused, or the GPU is not known, or has no bf16.
    """
    asked, problems = _asked(arguments), []
    for name, flag in FLAGS.items():
        key = name.removeprefix("--").replace("-", "_")
        takers = flag.full if arguments.tasks is None else flag.tasks
        if getattr(arguments, key) is None:
            setattr(arguments, key, flag.default)
        elif asked and not set(asked) & set(takers):
            given = name if getattr(arguments, key) is not False else f"--no-{key.replace('_', '-')}"
            problems.append(f"{given}: {_refusal(arguments, flag)}")
    if problems:
        raise UserError(*problems)
    gpu(arguments.device, arguments.precision if set(asked) & {*_TASKS, _BY_PLAN} else None)


def gpu(device: str, precision: str | None) -> Known:
    """A GPU by its name, if it has what is asked of it.

    Args:
        device: What `--device` says.
        precision: What `--precision` says; None where nobody looks at it.

    Raises:
        UserError: It is not known, or has no bf16.
    """
    found = known(device)
    if precision == "bf16" and found.gpu.capability < (8, 0):
        raise UserError(f"--device {device}: has no bf16: use --precision fp16 or fp32")
    return found


def _asked(arguments: Namespace) -> tuple[str, ...]:
    """Names of the methods that answer; none if what is asked is refused elsewhere."""
    method, trains_all = arguments.method, arguments.tasks is None
    if method == "all":  # of tasks, closed forms alone say something unless they are asked for by name
        return _FULL if trains_all else ("ours",)
    if method not in (_FULL if trains_all else _TASKS):
        return ()
    return (_BY_PLAN if method == "dry-run" and arguments.plan is not None else method,)


def _refusal(arguments: Namespace, flag: Flag) -> str:
    trains_all = arguments.tasks is None
    if flag.why and not (trains_all and flag.full):
        return flag.why
    takers = flag.full if trains_all else flag.tasks
    others = f" (of {' or '.join(takers)})" if takers else ""
    of = "" if trains_all else " with --tasks"
    return f"is not for --method {arguments.method}{of}{others}: leave it out"
