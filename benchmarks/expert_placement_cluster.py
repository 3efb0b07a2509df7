"""The processes of `expert_placement.py`: started from a server that has imported everything, each in its namespace."""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from node_namespaces import DEVICE, Network, Place

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

from tests import warm

_WORKER = str(Path(__file__).with_name("expert_placement_worker.py"))
_LAST_LINES = 30


class ProcessEnded(RuntimeError):
    """A process ended before it was told to; says how, and what it printed last."""


@dataclass(frozen=True)
class Member:
    """A process of a team: told what to do by lines of JSON, answered by others; `errors` is what it prints."""

    process: warm.Process
    commands: IO[str]
    answers: IO[str]
    errors: Path

    def ended(self, who: str, what: str) -> ProcessEnded:
        """An error that says how it ended."""
        status = self.process.wait()
        how = f"status {status}" if status >= 0 else signal.Signals(-status).name
        killed = " (out of memory? see dmesg)" if status == -signal.SIGKILL else ""
        lines = self.errors.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        said = "\n".join(f"  {line}" for line in lines) or "  nothing"
        return ProcessEnded(
            f"{who} ended with {how}{killed} while it was to do {what!r}; it printed:\n{said}"
        )


@dataclass(frozen=True)
class Team:
    """Processes that train together, by rank."""

    name: str
    members: tuple[Member, ...]

    def ask(self, what: str, **about: Any) -> list[Any]:
        """Have all processes do something; returns what each answers.

        Raises:
            ProcessEnded: One has ended.
        """
        for rank, member in enumerate(self.members):
            try:
                member.commands.write(json.dumps({"do": what, **about}) + "\n")
                member.commands.flush()
            except BrokenPipeError:
                raise member.ended(f"process {rank} of {self.name}", what) from None
        found: dict[int, Any] = {}
        with selectors.DefaultSelector() as waiting:
            for rank, member in enumerate(self.members):
                waiting.register(member.answers, selectors.EVENT_READ, rank)
            # The first one to end is the one to report: the others fail because it is gone.
            while len(found) < len(self.members):
                for key, _ in waiting.select():
                    line = self.members[key.data].answers.readline()
                    if not line:
                        raise self.members[key.data].ended(f"process {key.data} of {self.name}", what)
                    found[key.data] = json.loads(line)
                    waiting.unregister(key.fileobj)
        return [found[rank] for rank in range(len(self.members))]


@contextmanager
def started(
    server: warm.Server, network: Network, members: Sequence[int], port: int, mode: str
) -> Iterator[Team]:
    """Context with a team of processes, which end with it.

    Args:
        members: Indices of their places, rank by rank.
        port: At which rank 0 gathers them.
        mode: `ep`, `broker`, or another name for a process alone.
    """
    places = [network.places[i] for i in members]
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="expert-placement-")))
        team = [
            _start(server, places, rank, place, port, mode, folder / str(rank))
            for rank, place in enumerate(places)
        ]
        try:
            yield Team(mode, tuple(team))
        except BaseException:
            for member in team:  # one may wait for another that has ended
                with suppress(ProcessLookupError):
                    os.kill(member.process.pid, signal.SIGKILL)
                with suppress(BrokenPipeError):
                    member.commands.close()
            raise
        else:
            for member in team:
                member.commands.close()
            for member in team:
                member.process.wait()
        finally:
            for member in team:
                member.answers.close()


def _start(
    server: warm.Server,
    places: Sequence[Place],
    rank: int,
    place: Place,
    port: int,
    mode: str,
    errors: Path,
) -> Member:
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(len(places)),
        "LOCAL_WORLD_SIZE": str(len(places)),
        "MASTER_ADDR": places[0].address,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": DEVICE,
        "MUX_NAMESPACE": place.namespace,
        "MUX_NODES": ",".join(own.node for own in places),
        "MUX_MODE": mode,
    }
    in_read, in_write = os.pipe()
    out_read, out_write = os.pipe()
    with errors.open("wb") as printed:
        streams = (in_read, out_write, printed.fileno())
        process = warm.start(server.address, ["-W", "ignore", _WORKER], environment, streams)
    os.close(in_read)
    os.close(out_write)
    return Member(process, os.fdopen(in_write, "w"), os.fdopen(out_read), errors)
