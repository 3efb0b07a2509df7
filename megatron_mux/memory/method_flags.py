"""Which flags of `megatron-mux estimate` go with which method; the others are refused."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_mux.errors import UserError
from megatron_mux.gpus import GpuSpec, known
from megatron_mux.memory.optimizers import DEFAULT

METHODS = ("all", "ours", "trace", "dry-run")
_FOLLOWS_PLAN = "dry-run with --plan"


@dataclass(frozen=True)
class Flag:
    """A flag that only some methods use.

    Attributes:
        default: Its value where it is not given.
        full: Methods that use it for full fine-tuning.
        tasks: Methods that use it for a task file.
    """

    default: object
    full: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()


FLAGS: Mapping[str, Flag] = {
    "--precision": Flag("bf16", ("ours", "trace"), ("ours", "trace", "dry-run", _FOLLOWS_PLAN)),
    "--optimizer": Flag(DEFAULT, ("ours", "trace")),
    "--master-weights": Flag(True, ("ours", "trace")),
    "--attention": Flag("flash", ("ours", "trace"), ("trace",)),
    "--recompute": Flag("none", ("trace",), ("trace", _FOLLOWS_PLAN)),
    "--plan": Flag(None, tasks=(_FOLLOWS_PLAN,)),
    "--mux-expert-placement": Flag(None, tasks=("ours", "dry-run", _FOLLOWS_PLAN)),
    "--expert-profile": Flag(None, tasks=("ours", "dry-run", _FOLLOWS_PLAN)),
    "--backbone-dtype": Flag(None, tasks=("ours", "dry-run", _FOLLOWS_PLAN)),
    "--backbone-weights": Flag("resident", tasks=(_FOLLOWS_PLAN,)),
}


def complete(arguments: Namespace) -> None:
    """Refuse flags that the method does not use, and fill in the defaults of those left out.

    Args:
        arguments: Parsed arguments of the tool, None for each of `FLAGS` that was not given.

    Raises:
        UserError: Lists the refused flags; or the method or the GPU is unknown, or the GPU has no bf16.
    """
    if arguments.method not in METHODS:
        raise UserError(f"--method {arguments.method}: must be one of {', '.join(METHODS)}")
    methods, problems = _methods(arguments), []
    for name, flag in FLAGS.items():
        key = name.removeprefix("--").replace("-", "_")
        users = flag.full if arguments.tasks is None else flag.tasks
        if getattr(arguments, key) is None:
            setattr(arguments, key, flag.default)
        elif not methods & set(users):
            given = name if getattr(arguments, key) is not False else f"--no-{key.replace('_', '-')}"
            what = "full fine-tuning" if arguments.tasks is None else "--tasks"
            use = f"--method {' or '.join(users)} does" if users else "remove it"
            problems.append(f"{given}: --method {arguments.method} does not use it for {what}: {use}")
    if arguments.tasks is not None and "ours" in methods and arguments.precision == "fp16":
        problems.append("--precision fp16: tasks are trained in bf16 or fp32: use one of these")
    if problems:
        raise UserError(*problems)
    checked_gpu(arguments.device, arguments.precision)


def checked_gpu(device: str, precision: str) -> GpuSpec:
    """Find a GPU by its name and check that it computes in a precision.

    Raises:
        UserError: It is unknown, or has no bf16.
    """
    found = known(device)
    if precision == "bf16" and found.gpu.capability < (8, 0):
        raise UserError(f"--device {device}: has no bf16: use --precision fp16 or fp32")
    return found


def _methods(arguments: Namespace) -> set[str]:
    """Names of the methods that answer."""
    if arguments.method == "all":  # for tasks, ours alone answers unless others are asked for by name
        return {"ours", "trace"} if arguments.tasks is None else {"ours"}
    follows = arguments.method == "dry-run" and arguments.plan is not None
    return {_FOLLOWS_PLAN} if follows else {arguments.method}
