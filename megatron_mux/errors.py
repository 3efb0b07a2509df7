"""The one exception for mistakes that a user can make and mend, and how processes say it once."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

_SECONDS_TO_ASK = 10
_OF_A_CONNECTION = re.compile(r"gloo|nccl|connection|socket|broken pipe|timed? ?out", re.IGNORECASE)
# A connection is lost when its other end leaves, having told why; what comes between is a moment.
_SECONDS_TO_BE_TOLD = 3


class UserError(Exception):
    """Something in the user's input is wrong: said in words that tell what to change.

    Entry points catch it, `tell` it and exit with status 2.

    Args:
        problems: One or more complete sentences, each naming what is wrong, where, and what to do.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems: list[str] = list(problems)


class SharedError(UserError):
    """A `UserError` that every process raises at once, in the same words."""


def exit_status(work: Callable[[], None], program: str) -> int:
    """Do what a tool is for: 0, or 2 once it is told what was wrong with the input.

    Args:
        work: Raises a `UserError` for what is wrong.
        program: Put before every line.
    """
    try:
        work()
    except UserError as error:
        tell(error, program)
        return 2
    return 0


def tell(error: UserError, program: str) -> None:
    """Print the problems of an error to standard error, one per line: once, however many processes meet it.

    Under torchrun, the first process that meets the error says it: rank 0 may never meet it (its part of the weights is
    another one, its disk too), or be ended by the launcher before it does. Without a launcher that can be asked, rank 0
    speaks for what every process meets alike, and any other rank for what it meets alone.

    Call it before leaving the world: the others, waiting in a collective, would complain of a lost connection first and
    have the launcher end this process.

    Args:
        error: What went wrong.
        program: Put before every line.
    """
    rank = os.environ.get("RANK", "0")
    # Until processes join, they all look at the same things, unless on another machine.
    alike = isinstance(error, SharedError) or not (_has_joined() or os.environ.get("GROUP_RANK", "0") != "0")
    first = _is_first(error)
    if first or (first is None and (rank == "0" or not alike)):
        who = "" if alike or rank == "0" else f"rank {rank}: "
        for line in (line for problem in error.problems for line in problem.splitlines()):
            print(f"{program}: {who}{line}", file=sys.stderr, flush=True)


def told_elsewhere(error: RuntimeError) -> bool:
    """Whether an error is only the echo of a mistake that another process has told, and that made it leave.

    Who waits for a process that is gone meets a lost connection, of which nothing is to be learned. Without torchrun's
    store nobody knows, so that nothing is held back.

    Args:
        error: What this process met.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1" or not is_of_a_connection(error):
        return False
    try:
        store = _launchers_store()
        until = time.monotonic() + _SECONDS_TO_BE_TOLD
        while store is not None:
            if store.check([_key("told")]):
                return True
            if time.monotonic() > until:
                break
            time.sleep(0.1)
    except (KeyError, ValueError, RuntimeError):
        pass
    return False


def is_of_a_connection(error: RuntimeError) -> bool:
    """Whether an error is one of the connections between processes: lost, or waited on for too long.

    They come as plain `RuntimeError` from gloo: their words tell.
    """
    return _OF_A_CONNECTION.search(str(error)) is not None


def _has_joined() -> bool:
    """Whether this process is one of several that are connected."""
    if "torch" not in sys.modules:
        return False
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def _is_first(error: UserError) -> bool | None:
    """Whether no other process has said the same, by the store that torchrun keeps; None where there is none."""
    said = hashlib.sha256(str(error).encode()).hexdigest()
    try:
        store = _launchers_store()
        if store is None:
            return None
        store.add(_key("told"), 1)
        return int(store.add(_key(f"said/{said}"), 1)) == 1
    except (KeyError, ValueError, RuntimeError):
        return None


def _key(what: str) -> str:
    """Where the launcher's store keeps something of this attempt: torchrun may start the processes again."""
    return f"megatron_mux/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{what}"


def _launchers_store() -> Any:
    """The store that torchrun keeps; None where there is none.

    Raises:
        KeyError, ValueError, RuntimeError: It cannot be reached.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    import torch.distributed as dist  # seconds, if all that is wrong is a flag

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    limit = timedelta(seconds=_SECONDS_TO_ASK)
    return dist.TCPStore(address, port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
