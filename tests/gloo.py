"""The connections of all of gloo's groups of a process are served by one thread.

By itself each group has one of its own, which looks for news a hundred times a second. Megatron-Core makes two dozen
groups for each division of the world: with a few divisions kept, half of the machine's time goes there.
"""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from typing import Any

from torch.distributed import ProcessGroupGloo


@cache
def _device() -> Any:
    """What connections are made on, made with the first group: after a fork."""
    return ProcessGroupGloo.create_default_device()


def share_connections() -> None:
    """From now on, groups that this process makes use one device of gloo's together. Harmless the second time."""
    made: Any = ProcessGroupGloo.__init__
    if made.__module__ == __name__:
        return

    def init(self: Any, store: Any, rank: int, size: int, timeout: timedelta = timedelta(minutes=30)) -> None:
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._timeout = [_device()], timeout
        made(self, store, rank, size, options)

    ProcessGroupGloo.__init__ = init  # type: ignore[method-assign]
