"""Network namespaces of a server and its clients: each client has a link of its own to the server's namespace.

    client i: eth0 == port i: server

Links are full duplex and carry a client's bandwidth in each direction. Needs root and Debian's iproute2.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from namespaces import NamespacesRefused, run_tool

_SEGMENT = 4096
"""Bytes that TCP hands to a device at once, at most; by default 64 KiB, which links would take in one burst."""

_BURST = "4kb"
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


@dataclass(frozen=True)
class Star:
    """The namespaces.

    Attributes:
        server: The server's namespace.
        clients: Those of clients.
    """

    server: str
    clients: tuple[str, ...]

    def address(self, client: int) -> str:
        """IPv4 address of the server as a client sees it."""
        return f"10.113.{client}.1"

    def limit(self, bytes_per_second: float | None) -> None:
        """Limit every client's link in each direction; None: to what it can carry."""
        for i, client in enumerate(self.clients):
            for namespace, device in ((client, "eth0"), (self.server, f"port{i}")):
                words = ("tc", "-n", namespace, "qdisc")
                if bytes_per_second is None:
                    command = [*words, "delete", "dev", device, "root"]
                    subprocess.run(command, capture_output=True, check=False)  # it may have no limit
                    continue
                rate = ("rate", f"{int(8 * bytes_per_second)}bit", "burst", _BURST, "limit", "32mb")
                run_tool(*words, "replace", "dev", device, "root", "tbf", *rate)


@contextmanager
def star(clients: int) -> Iterator[Star]:
    """Context with the namespaces of a server and so many clients, removed at its end.

    Raises:
        NamespacesRefused: They cannot be made.
    """
    prefix = f"mux{os.getpid()}"
    network = Star(f"{prefix}-server", tuple(f"{prefix}-c{i}" for i in range(clients)))
    made: list[str] = []
    try:
        try:
            for name in (network.server, *network.clients):
                run_tool("ip", "netns", "add", name)
                made.append(name)
                run_tool("ip", "-n", name, "link", "set", "lo", "up")
            for i, name in enumerate(network.clients):
                _link(network, i, name)
        except (OSError, subprocess.CalledProcessError) as error:
            raise NamespacesRefused((getattr(error, "stderr", "") or str(error)).strip()) from error
        yield network
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _link(network: Star, i: int, client: str) -> None:
    peer = ("type", "veth", "peer", "name", f"port{i}", "netns", network.server)
    run_tool("ip", "link", "add", "eth0", "netns", client, *peer)
    for namespace, device, host in ((client, "eth0", 2), (network.server, f"port{i}", 1)):
        run_tool("ip", "-n", namespace, "link", "set", device, "gso_max_size", str(_SEGMENT))
        run_tool("ip", "-n", namespace, "address", "add", f"10.113.{i}.{host}/30", "dev", device)
        run_tool("ip", "-n", namespace, "link", "set", device, "up")
    # Otherwise a connection begins slowly again after each pause of a fifth of a second.
    keep = "echo 0 > /proc/sys/net/ipv4/tcp_slow_start_after_idle"
    for namespace in (client, network.server):
        run_tool("ip", "netns", "exec", namespace, "sh", "-c", keep)


def enter(namespace: str) -> None:
    """Move this process into a network namespace, before it has threads."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    if libc.setns(handle, _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
    os.close(handle)
