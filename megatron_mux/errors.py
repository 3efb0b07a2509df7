"""The exception for mistakes that a user can correct, and how several processes report one mistake once."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import time
from collections.abc import Callable

from megatron_mux.launcher import launchers_store, store_key
from megatron_mux.library_log import below_display, release_terminal

_OF_A_CONNECTION = re.compile(r"gloo|nccl|connection|socket|broken pipe|timed? ?out", re.IGNORECASE)
# A process reports its mistake just before it leaves and its connections break.
_SECONDS_TO_BE_TOLD = 3


class UserError(Exception):
    """Raised when something in the user's input is wrong; the message says what to change.

    Entry points catch it, print it with `tell`, and exit with status 2.

    Args:
        problems: One or more sentences, each naming what is wrong, where, and what to do.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems: list[str] = list(problems)

    def __reduce__(self) -> tuple[type[UserError], tuple[str, ...]]:
        # A copy from another process has the same problems.
        return type(self), tuple(self.problems)


class SharedError(UserError):
    """A `UserError` that every process raises at the same point with the same message."""


def exit_status(work: Callable[[], None], program: str) -> int:
    """Run a tool and return its exit status: 0, or 2 if the input was wrong.

    Args:
        work: The tool's work; raises `UserError` for wrong input.
        program: Program name, printed before every line.
    """
    try:
        work()
    except UserError as error:
        tell(error, program)
        return 2
    return 0


def to_stderr(text: str) -> None:
    """Print a line beside a program's result."""
    print(text, file=sys.stderr, flush=True)


def tell(error: UserError, program: str) -> None:
    """Print the problems of an error to standard error, one per line and only once for all processes.

    Under torchrun, the first process that finds the error prints it: rank 0 may never find it (it reads other weights,
    from another disk), or the launcher may end rank 0 first. Without torchrun's store, rank 0 prints errors that all
    processes find, and any other rank prints those that it finds alone.

    Call it before destroying the process group. Otherwise the others, waiting in a collective, report a lost connection
    first, and the launcher ends this process.

    Args:
        error: The error.
        program: Program name, printed before every line.
    """
    rank = os.environ.get("RANK", "0")
    # Before they are connected, all processes of a machine read the same input.
    alike = isinstance(error, SharedError) or not (_has_joined() or os.environ.get("GROUP_RANK", "0") != "0")
    first = _is_first(error)
    if first or (first is None and (rank == "0" or not alike)):
        who = "" if alike or rank == "0" else f"rank {rank}: "
        release_terminal()
        print(end=below_display()[:1], file=sys.stderr)
        for line in (line for problem in error.problems for line in problem.splitlines()):
            print(f"{program}: {who}{line}", file=sys.stderr, flush=True)
        print(end=below_display(), file=sys.stderr, flush=True)


def told_elsewhere(error: RuntimeError) -> bool:
    """Whether an error is a lost connection to a process that left after reporting a mistake.

    Such an error adds nothing to the other process's message. Without torchrun's store this cannot be known, and the
    answer is False.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1" or not is_of_a_connection(error):
        return False
    try:
        store = launchers_store()
        until = time.monotonic() + _SECONDS_TO_BE_TOLD
        while store is not None:
            if store.check([store_key("told")]):
                return True
            if time.monotonic() > until:
                break
            time.sleep(0.1)
    except (KeyError, ValueError, RuntimeError):
        pass
    return False


def is_of_a_connection(error: RuntimeError) -> bool:
    """Whether an error is a lost connection between processes or a timeout.

    gloo raises a plain `RuntimeError` for these, so the message is searched for known words.
    """
    return _OF_A_CONNECTION.search(str(error)) is not None


def failed_allocation(error: Exception) -> str:
    """The sentence of an out-of-memory error that says how much it tried to allocate; the rest is mostly advice."""
    sentences = [sentence.strip() for sentence in str(error).split("\n")[0].split(". ")]
    return next((one for one in sentences if one.lower().startswith("tried to allocate")), sentences[0])


def _has_joined() -> bool:
    """Whether this process has joined a process group."""
    if "torch" not in sys.modules:
        return False
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def _is_first(error: UserError) -> bool | None:
    """Whether no other process has reported the same error; None without torchrun's store."""
    said = hashlib.sha256(str(error).encode()).hexdigest()
    try:
        store = launchers_store()
        if store is None:
            return None
        store.add(store_key("told"), 1)
        return int(store.add(store_key(f"said/{said}"), 1)) == 1
    except (KeyError, ValueError, RuntimeError):
        return None
