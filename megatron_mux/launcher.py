"""What processes learn from each other through torchrun, before they join a process group and after it broke."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

_SECONDS_TO_ASK = 10
_UNREACHABLE = (KeyError, ValueError, RuntimeError)


def is_local_leader() -> bool:
    """Whether this process does what one process of each host does for the others."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


@contextmanager
def local_leader_first() -> Iterator[None]:
    """Run a block on this host's leader, then on its other processes, which find what the leader left in caches.

    Once for a run. Without torchrun's store nobody waits.
    """
    key = store_key(f"leader of {os.environ.get('GROUP_RANK', '0')}")
    store = None
    with suppress(*_UNREACHABLE):
        store = launchers_store()
        while store is not None and not is_local_leader() and not store.check([key]):
            time.sleep(0.2)
    try:
        yield
    finally:
        if store is not None and is_local_leader():
            with suppress(*_UNREACHABLE):
                store.set(key, "done")


def store_key(what: str) -> str:
    """A key in torchrun's store for this attempt, since torchrun may restart the processes."""
    return f"megatron_mux/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{what}"


def launchers_store() -> Any:
    """torchrun's store; None if there is none.

    Raises:
        KeyError, ValueError, RuntimeError: The store cannot be reached.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    import torch.distributed as dist  # slow: not worth it for a wrong flag

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    limit = timedelta(seconds=_SECONDS_TO_ASK)
    return dist.TCPStore(address, port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
