"""The one exception for mistakes that a user can make and mend, and how processes say it once."""

from __future__ import annotations

import hashlib
import os
import sys
from datetime import timedelta

_SECONDS_TO_ASK = 10


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
        for problem in error.problems:
            print(f"{program}: {who}{problem}", file=sys.stderr, flush=True)


def _has_joined() -> bool:
    """Whether this process is one of several that are connected."""
    if "torch" not in sys.modules:
        return False
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def _is_first(error: UserError) -> bool | None:
    """Whether no other process has said the same, by the store that torchrun keeps; None where there is none."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    import torch.distributed as dist  # seconds, if all that is wrong is a flag

    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    said = hashlib.sha256(str(error).encode()).hexdigest()
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        limit = timedelta(seconds=_SECONDS_TO_ASK)
        store = dist.TCPStore(address, port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
        return int(store.add(f"megatron_mux/said/{attempt}/{said}", 1)) == 1
    except (KeyError, ValueError, RuntimeError):
        return None
