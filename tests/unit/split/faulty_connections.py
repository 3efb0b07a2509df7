"""Connections that break: a TCP proxy that cuts them anywhere, and streams that double, reorder and drop frames."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from random import Random

from megatron_mux.split.client.stream import ClientStream

_RECEIVED_AT_ONCE = 4096


class CuttingProxy:
    """Passes TCP connections on to a server, and cuts each after a random number of bytes.

    Args:
        port: Of the server, on this machine.
        seed: Of the numbers.
        cuts: Connections to cut; later ones stay whole.
        most: Most bytes before a cut.

    Attributes:
        cuts: Those that are left.
    """

    def __init__(self, port: int, seed: int, cuts: int, most: int) -> None:
        self.cuts = cuts
        self._server, self._random, self._most = port, Random(seed), most
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self._listening.getsockname()[1]}"

    def close(self) -> None:
        """Accept no more connections."""
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
                server = socket.create_connection(("127.0.0.1", self._server))
            except OSError:
                return
            budget = [self._random.randint(1, self._most) if self.cuts else 1 << 62]
            for ends in ((client, server), (server, client)):
                threading.Thread(target=self._pass_on, args=(*ends, budget), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, budget: list[int]) -> None:
        try:
            while content := source.recv(_RECEIVED_AT_ONCE):
                with self._lock:
                    cut = len(content) >= budget[0] > 0
                    content = content[: max(0, budget[0])]
                    budget[0] -= len(content)
                    self.cuts -= cut
                target.sendall(content)
                if cut:
                    break
        except OSError:
            pass
        for end in (source, target):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                end.close()


def faulty_stream(seed: int, faults: list[str]) -> type[ClientStream]:
    """A kind of client's streams whose frames meet faults.

    Args:
        seed: Of when they come.
        faults: What will happen, one after the other: `double`, `swap`, `drop`, `late` (a frame comes once more, behind
            the next); each is removed when it has happened.
    """
    random = Random(seed)

    class FaultyStream(ClientStream):
        def _requests(self) -> Iterator[bytes]:
            greeted, held, late = False, b"", b""
            for frame in super()._requests():
                fault = faults.pop(0) if greeted and faults and random.random() < 0.2 else None
                greeted = True
                if fault == "swap":
                    held = frame
                    continue
                yield from [frame] * {"double": 2, "drop": 0}.get(str(fault), 1)
                yield from [one for one in (held, late) if one]
                held, late = b"", frame if fault == "late" else b""
            if held:
                yield held

    return FaultyStream
