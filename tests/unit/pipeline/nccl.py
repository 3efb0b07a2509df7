"""GPUs and NCCL, played: what waits for what, without a device.

Hosts are threads that run one at a time, each until it has to wait. They issue operations to streams. An operation
starts when its stream gets to it and what it awaits is done. A send, a receive or a collective is done when all its
ranks have started it; until then it occupies its stream. The outcome does not depend on which host runs first, so the
outcome is that of any timing. A hang is a state in which no host can run and no operation can start.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

Queues = Literal["many", "one", "serial"]
"""How operations start: in each stream's order; in the order of issue (`CUDA_DEVICE_MAX_CONNECTIONS=1`), so that one
that awaits another holds up all later ones; or, as the worst case, each when all before it are done."""

COMPUTE = "compute"


class Hang(Exception):
    """Nobody can run; the message says what each rank waits for."""


class _Abandoned(BaseException):
    """Ends the thread of a host after a hang."""


@dataclass(eq=False)
class Meeting:
    """A transfer or collective: the operations of all its ranks."""

    size: int
    operations: list[Operation] = field(default_factory=list)


@dataclass(eq=False)
class Operation:
    """Something issued to a stream.

    Attributes:
        rank: The rank that issued it.
        name: Name in reports.
        awaits: Operations that must be done before it starts.
        meeting: What it is part of, if other ranks are.
        about: Must be the same for all parts of a meeting.
    """

    rank: int
    name: str
    awaits: tuple[Operation, ...]
    meeting: Meeting | None = None
    about: object = None
    is_done: bool = False

    def can_start(self) -> bool:
        return all(other.is_done for other in self.awaits)

    def start(self) -> None:
        self.awaits = ()
        if self.meeting is None:
            self.is_done = True
            return
        self.meeting.operations.append(self)
        if len(self.meeting.operations) == self.meeting.size:
            assert len({own.about for own in self.meeting.operations}) == 1, f"{self.name} meets another"
            for own in self.meeting.operations:
                own.is_done = True


class World:
    """The ranks, their streams and what is between them.

    Args:
        ranks: Number of ranks.
        queues: See `Queues`.
    """

    def __init__(self, ranks: int, queues: Queues) -> None:
        self.ranks, self.queues = ranks, queues
        self.rank = 0  # whose host runs
        self.waits: Counter[str] = Counter()
        self._issued: list[list[Operation]] = [[] for _ in range(ranks)]
        self._lanes: dict[tuple[int, Hashable], deque[Operation]] = {}
        self._last: dict[tuple[int, Hashable], Operation] = {}
        self._meetings: dict[Hashable, Meeting] = {}
        self._counts: Counter[Hashable] = Counter()
        self._hosts = [_Host() for _ in range(ranks)]
        self._scheduler = threading.Semaphore(0)
        self._is_over = False

    # -- what hosts call

    def issue(
        self,
        name: str,
        stream: Hashable = COMPUTE,
        awaits: Sequence[Operation] = (),
        meeting: tuple[Hashable, int] | None = None,
        about: object = None,
    ) -> Operation:
        """Enqueue an operation on a stream of the rank whose host runs.

        Args:
            name: Name in reports.
            stream: The stream; all but the compute stream await what has been computed so far, too.
            awaits: What else it awaits.
            meeting: The communicator and direction, and how many ranks take part: matched in the order of issue.
            about: See `Operation`.
        """
        rank = self.rank
        own = "all" if self.queues == "serial" else stream
        before = [self._last.get((rank, key)) for key in dict.fromkeys((own, COMPUTE))]
        operation = Operation(rank, name, (*(b for b in before if b is not None), *awaits))
        if meeting is not None:
            operation.about = about
            operation.meeting = self._meet(rank, *meeting)
        self._last[rank, own] = operation
        lane = stream if self.queues == "many" else "all"
        self._lanes.setdefault((rank, lane), deque()).append(operation)
        self._issued[rank].append(operation)
        return operation

    def wait_for_stream(self, name: str) -> None:
        """Make the host wait for what it has computed so far: a blocking copy."""
        self._wait([self.issue(name)], name)

    def wait_for_device(self, name: str) -> None:
        """Make the host wait for everything that it has issued: freed memory, a kernel that is loaded."""
        self._wait(self._outstanding(self.rank), name)

    def meet(self, group: Hashable, size: int, name: str) -> None:
        """A collective whose result later computations await."""
        operation = self.issue(name, ("group", group), meeting=(group, size), about=name)
        self.issue(f"await {name}", awaits=[operation])

    def _meet(self, rank: int, key: Hashable, size: int) -> Meeting:
        """The next meeting of a communicator that this rank has not been in."""
        self._counts[rank, key] += 1
        return self._meetings.setdefault((key, self._counts[rank, key]), Meeting(size))

    def _wait(self, operations: Sequence[Operation], name: str) -> None:
        self.waits[name] += 1
        host = self._hosts[self.rank]
        host.awaited, host.name = list(operations), name
        self.settle()
        if not host.can_run():
            self._scheduler.release()
            host.baton.acquire()
            if self._is_over:
                raise _Abandoned

    # -- devices

    def settle(self) -> None:
        """Let the devices do what they can."""
        has_moved = True
        while has_moved:
            has_moved = False
            for lane in self._lanes.values():
                while lane and lane[0].can_start():
                    lane.popleft().start()
                    has_moved = True

    # -- hosts

    def run(self, host_program: Callable[[int], None]) -> None:
        """Run a program on every rank.

        Raises:
            Hang: They do not come to an end.
        """
        threads = []
        for rank, host in enumerate(self._hosts):
            threads.append(threading.Thread(target=self._host, args=(rank, host, host_program), daemon=True))
            threads[-1].start()
        try:
            while left := [rank for rank, host in enumerate(self._hosts) if not host.is_done]:
                self.settle()
                ready = [rank for rank in left if self._hosts[rank].can_run()]
                if not ready:
                    raise Hang(self._report())
                self.rank = ready[0]
                self._hosts[self.rank].baton.release()
                self._scheduler.acquire()
                if (problem := self._hosts[self.rank].problem) is not None:
                    raise problem
            self.settle()
            if any(map(self._outstanding, range(self.ranks))):
                raise Hang(self._report())
        finally:
            self._is_over = True
            for host in self._hosts:
                host.baton.release()
            for thread in threads:
                thread.join()

    def _host(self, rank: int, host: _Host, program: Callable[[int], None]) -> None:
        host.baton.acquire()
        try:
            if not self._is_over:
                program(rank)
        except _Abandoned:
            pass
        except BaseException as error:
            host.problem = error
        host.is_done = True
        self._scheduler.release()

    def _outstanding(self, rank: int) -> list[Operation]:
        """What a rank has issued and is not done."""
        self._issued[rank] = [own for own in self._issued[rank] if not own.is_done]
        return self._issued[rank]

    def _report(self) -> str:
        """What each rank waits for."""
        lines = []
        for rank, host in enumerate(self._hosts):
            where = "has issued everything" if host.is_done else f"waits in {host.name}"
            open_ = ", ".join(own.name for own in self._outstanding(rank)[:6])
            lines.append(f"rank {rank} {where}; outstanding: {open_ or 'nothing'}")
        return "nobody can run\n" + "\n".join(lines)


class _Host:
    """A rank's host."""

    def __init__(self) -> None:
        self.baton = threading.Semaphore(0)
        self.awaited: list[Operation] = []
        self.name = ""
        self.is_done = False
        self.problem: BaseException | None = None

    def can_run(self) -> bool:
        return all(operation.is_done for operation in self.awaited)


@dataclass(frozen=True)
class Group:
    """A process group: its ranks, and which of several with the same ranks it is."""

    ranks: tuple[int, ...]
    number: int = 0


@dataclass(frozen=True)
class Work:
    """What is returned for a send or receive."""

    world: World
    operation: Operation

    def wait(self) -> None:
        self.world.issue(f"await {self.operation.name}", awaits=[self.operation])

    def is_completed(self) -> bool:
        self.world.settle()
        return self.operation.is_done


class Event:
    """Stands in for `torch.cuda.Event`."""

    def __init__(self, world: World) -> None:
        self.world = world

    def record(self) -> None:
        self.operation = self.world.issue("event")

    def synchronize(self) -> None:
        self.world._wait([self.operation], "event.synchronize")

    def elapsed_time(self, other: Event) -> float:
        assert self.operation.is_done and other.operation.is_done
        return 1.0


class PlayedDistributed:
    """Stands in for `torch.distributed` in the communicator."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._made: Counter[tuple[int, tuple[int, ...]]] = Counter()
        self._connected: set[Hashable] = set()

    def get_process_group_ranks(self, group: Group) -> list[int]:
        return list(group.ranks)

    def isend(self, tensor: Tensor, peer: int, group: Group, tag: int = 0) -> Work:
        return self._transfer("send to", tensor, self.world.rank, peer, group, tag)

    def irecv(self, tensor: Tensor, peer: int, group: Group, tag: int = 0) -> Work:
        return self._transfer("receive from", tensor, peer, self.world.rank, group, tag)

    def _transfer(self, verb: str, tensor: Tensor, source: int, target: int, group: Group, tag: int) -> Work:
        other = target if source == self.world.rank else source
        assert {source, target} <= set(group.ranks)
        self._connect(group, source, target)
        name = f"{verb} {other} {list(tensor.shape)}"
        operation = self.world.issue(
            name,
            ("transfers", group),
            meeting=((group, source, target), 2),
            about=(tuple(tensor.shape), tensor.dtype),
        )
        return Work(self.world, operation)

    def pair_groups(
        self, ring: Sequence[int], pairs: Sequence[tuple[int, int]], device: torch.device
    ) -> dict[tuple[tuple[int, int], bool], Group]:
        """Stands in for `process_groups.pair_groups`; pairs without this rank are left out."""
        own = list(ring).index(self.world.rank)
        return {
            (pair, backward): self._pair_group([ring[place] for place in (pair[::-1] if backward else pair)])
            for pair in pairs
            if own in pair
            for backward in (False, True)
        }

    def _pair_group(self, ranks: Sequence[int]) -> Group:
        """A group, connected from the first rank to the second."""
        members = tuple(sorted(ranks))
        self._made[self.world.rank, members] += 1
        group = Group(members, self._made[self.world.rank, members])
        self._connect(group, *ranks)
        return group

    def _connect(self, group: Group, source: int, target: int) -> None:
        """At the first transfer in a direction, the host waits for the other rank's."""
        if (self.world.rank, group, source, target) in self._connected:
            return
        self._connected.add((self.world.rank, group, source, target))
        self.world.meet(("connect", group, source, target), 2, "connect")
        self.world.wait_for_stream("connect")


def installed(world: World, patch: Any) -> None:
    """Let the communicator, the clock and the recovery from missing memory use the played GPUs."""
    import gc

    from megatron_mux.pipeline import communicate

    played = PlayedDistributed(world)
    patch.setattr(communicate, "dist", played)
    patch.setattr(communicate, "pair_groups", played.pair_groups, raising=False)
    patch.setattr(communicate, "torch", _TorchOnMeta())
    patch.setattr(gc, "collect", lambda: 0)
    patch.setattr(torch.cuda, "Event", lambda enable_timing: Event(world))
    patch.setattr(torch.cuda, "synchronize", lambda device=None: world.wait_for_device("synchronize"))
    patch.setattr(torch.cuda, "empty_cache", lambda: world.wait_for_device("empty_cache"))


class _TorchOnMeta:
    """Stands in for `torch`: nothing is on a GPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")
