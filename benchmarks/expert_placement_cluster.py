"""The processes of `expert_placement.py`: started from a server that has imported everything, each in its namespace."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from node_namespaces import DEVICE, Network, Place

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

from tests import warm

_WORKER = str(Path(__file__).with_name("expert_placement_worker.py"))


@dataclass(frozen=True)
class Team:
    """Processes that train together.

    Attributes:
        commands, answers: Of each process, lines of JSON.
    """

    commands: tuple[IO[str], ...]
    answers: tuple[IO[str], ...]

    def ask(self, what: str, **about: Any) -> list[Any]:
        """Have all processes do something; returns what each answers.

        Raises:
            RuntimeError: One has ended; it has printed why.
        """
        for pipe in self.commands:
            pipe.write(json.dumps({"do": what, **about}) + "\n")
            pipe.flush()
        lines = [pipe.readline() for pipe in self.answers]
        if not all(lines):
            raise RuntimeError(f"process {lines.index('')} ended while it was to do {what!r}")
        return [json.loads(line) for line in lines]


@contextmanager
def started(
    server: warm.Server, network: Network, members: Sequence[int], port: int, mode: str
) -> Iterator[Team]:
    """Context with a team of processes, which end with it.

    Args:
        server: Forks processes.
        network: Where they run.
        members: Indices of their places, rank by rank.
        port: At which rank 0 gathers them.
        mode: `ep` or `broker`.
    """
    places = [network.places[i] for i in members]
    with ExitStack() as cleanup:
        commands, answers, processes = [], [], []
        for rank, place in enumerate(places):
            process, command, answer = _start(server, places, rank, place, port, mode)
            processes.append(process)
            commands.append(cleanup.enter_context(command))
            answers.append(cleanup.enter_context(answer))
        try:
            yield Team(tuple(commands), tuple(answers))
        finally:
            for command in commands:
                command.close()
            for process in processes:
                process.wait()


def _start(
    server: warm.Server, places: Sequence[Place], rank: int, place: Place, port: int, mode: str
) -> tuple[warm.Process, IO[str], IO[str]]:
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
    process = warm.start(server.address, ["-W", "ignore", _WORKER], environment, (in_read, out_write, 2))
    os.close(in_read)
    os.close(out_write)
    return process, os.fdopen(in_write, "w"), os.fdopen(out_read)
