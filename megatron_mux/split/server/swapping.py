"""Whole tasks in and out of memory, as split learning without shared parameters has to move them (`vanilla`).

A task has a copy of the body for itself. Where not all of them fit, one goes to host memory when its iteration ends and
another needs its place (Menos, section 5.1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron_mux.split.server.dispatcher import Dispatcher, Work
from megatron_mux.split.server.session import Session
from megatron_mux.split.server.session_compute import Bodies
from megatron_mux.split.server.session_memory import Memory


class Swapping:
    """Says whose tasks are in memory.

    Args:
        bodies: Move tasks.
        dispatcher: Reserves their memory.
        sessions: All of them, by name.
    """

    def __init__(self, bodies: Bodies, dispatcher: Dispatcher, sessions: Mapping[str, Session]) -> None:
        self._bodies = bodies
        self._dispatcher = dispatcher
        self._sessions = sessions

    def size(self, memory: Memory, rows: int) -> int:
        """Bytes of a task: its parameters, adapter and optimizer, and what its passes need.

        Args:
            memory: Of its session.
            rows: Of its largest request, which may be an evaluation's.
        """
        return self._bodies.own_parameters + memory.standing + memory.most(rows)

    async def bring(self, session: Session) -> None:
        """Have a session's task in memory."""
        if not session.holds:
            size = self.size(session.memory, session.proposal.rows)
            await self.make_room(size)
            work = Work(session.identity, self._swap(session), size=size, keeps=size)
            session.holds = (await self._dispatcher.compute(work)).reservation

    async def make_room(self, size: int) -> None:
        """Move tasks out that nothing is computed for, until so many bytes are free or none of them is left."""
        for session in list(self._sessions.values()):
            if self._dispatcher.scheduler.free >= size:
                return
            if session.holds and not session.pending and not session.is_busy:
                await self._out(session)

    async def finish_iteration(self, session: Session) -> None:
        """Move a session's task out if others wait for its place."""
        if self._dispatcher.is_short and not session.pending:
            await self._out(session)

    async def _out(self, session: Session) -> None:
        held, session.holds = session.holds, 0
        await self._dispatcher.compute(Work(session.identity, self._swap(session)))
        self._dispatcher.release(held)

    def _swap(self, session: Session) -> Callable[[object], list[None]]:
        moved = self._bodies.own_parameters + session.memory.lasting

        def swap(works: object) -> list[None]:
            self._bodies.swap(moved)
            return [None]

        return swap
