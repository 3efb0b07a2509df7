"""The whole engine under NCCL's rules at their worst: a rank waits at every transfer until the other rank is there.

Every operation of `torch.distributed` is announced to a coordinator before it runs, and waits until all its ranks have
announced it. The coordinator knows what every rank waits for: if all of them wait and nothing is complete, they hang,
and each raises an error that says so. A run that ends has shown a sequence of the whole run in which each operation is
one event of all its ranks; so it would also end if everything waited for all operations that were issued before
(`megatron_mux.pipeline.transfers`).
"""

from __future__ import annotations

import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

_TRANSFERS = ("send", "recv_")


class Hang(Exception):
    """All ranks wait for each other; the message says for what."""


class Coordinator(threading.Thread):
    """Lets ranks go on once all ranks of an operation have announced it.

    Args:
        listener: Where ranks connect.
        ranks: Number of ranks.
    """

    def __init__(self, listener: Any, ranks: int) -> None:
        super().__init__(daemon=True)
        self._listener, self._ranks = listener, ranks
        self._waiting: dict[Connection, tuple[int, Hashable, str]] = {}
        self._arrived: dict[Hashable, list[Connection]] = {}
        self._left: list[Connection] = []

    def run(self) -> None:
        self._left = [self._listener.accept() for _ in range(self._ranks)]
        while self._left:
            for connection in wait(self._left):
                assert isinstance(connection, Connection)
                try:
                    rank, key, size, name = connection.recv()
                except EOFError:
                    self._left.remove(connection)
                else:
                    self._enter(connection, rank, key, size, name)
            if self._left and len(self._waiting) == len(self._left):
                self._answer(list(self._waiting), self._report())

    def _enter(self, connection: Connection, rank: int, key: Hashable, size: int, name: str) -> None:
        self._waiting[connection] = (rank, key, name)
        arrived = self._arrived.setdefault(key, [])
        arrived.append(connection)
        if len(arrived) == size:
            names = {self._waiting[one][2] for one in arrived}
            self._answer(self._arrived.pop(key), "" if len(names) == 1 else f"these meet: {sorted(names)}")

    def _answer(self, connections: list[Connection], problem: str) -> None:
        for connection in connections:
            del self._waiting[connection]
            connection.send(problem)

    def _report(self) -> str:
        lines = sorted(f"rank {rank} waits in {name} ({key})" for rank, key, name in self._waiting.values())
        ended = self._ranks - len(self._left)
        return "\n".join(["every rank waits:", *lines, *([f"{ended} have ended"] if ended else [])])


class Rendezvous(TorchDispatchMode):
    """While it is entered, every operation waits for all its ranks.

    Args:
        connection: To the coordinator.

    Attributes:
        met: Operations so far, by name.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._connection = connection
        self._counts: Counter[Hashable] = Counter()
        self.met: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._meet(func._schema.name.removeprefix("c10d::"), args)
        return func(*args, **(kwargs or {}))

    def _meet(self, name: str, args: Any) -> None:
        group = next(dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch._C.ScriptObject))
        if group.size() == 1:
            return
        about: tuple[Hashable, ...] = (group.group_name,)
        size, text = group.size(), name
        if name in _TRANSFERS:
            (tensor,), _, peer, tag = args[:4]
            ends = (group.rank(), peer) if name == "send" else (peer, group.rank())
            about = (group.group_name, tag, *ends)
            size, text = 2, f"a transfer of {list(tensor.shape)}"
        self._counts[about] += 1
        self.met[name] += 1
        self._connection.send((dist.get_rank(), (*about, self._counts[about]), size, text))
        if problem := self._connection.recv():
            raise Hang(problem)


@contextmanager
def every_operation_waits() -> Iterator[Rendezvous]:
    """Context in which NCCL's rules hold at their worst; all ranks enter it together.

    Raises:
        Hang: On every rank, if all ranks wait for each other.
    """
    with tempfile.TemporaryDirectory() as directory:
        listener = Listener(str(Path(directory) / "socket")) if dist.get_rank() == 0 else None
        if listener is not None:
            Coordinator(listener, dist.get_world_size()).start()
        address: list[Any] = [None if listener is None else listener.address]
        dist.broadcast_object_list(address, src=0)
        with Client(address[0]) as connection, Rendezvous(connection) as rules:
            yield rules
        dist.barrier()
        if listener is not None:
            listener.close()


def run_under_the_rules(work: Callable[[], None]) -> tuple[Rendezvous, str]:
    """Run `work` on every rank; returns what met, and the first problem of any rank, the same on all ranks."""
    failed: list[Exception] = []  # with what it was sending: gloo would drop it
    with every_operation_waits() as rules, torch.autograd.set_multithreading_enabled(False):
        try:
            work()
        except Exception as error:
            failed.append(error)
    problem = "".join(f"{type(error).__name__}: {error}" for error in failed)
    everyone: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everyone, problem)
    return rules, next(filter(None, everyone), "")
