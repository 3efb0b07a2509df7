"""Network namespaces as nodes of several processes: each process has a link to its node's switch, each node an uplink.

    process -- eth0 == port -- switch of the node -- uplink == port -- switch between the nodes

All links are full duplex. Those of processes carry the local bandwidth in each direction, those of nodes the bandwidth
between nodes: all processes of a node share its uplink and its downlink. Needs root and Debian's iproute2.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from namespaces import NamespacesRefused, run_tool

DEVICE = "eth0"
"""The device of a process's namespace."""

HEADER_BYTES = 66
"""Ethernet, IP and TCP headers of a packet, with TCP's timestamps."""

_SEGMENT = 4096
"""Bytes that TCP hands to a device at once, at most; by default 64 KiB, which links would take in one burst."""

_BURST = "4kb"
"""What a link carries at once after a pause: more than a segment, but little beside a message."""


@dataclass(frozen=True)
class Crossing:
    """What crossed between nodes: by node, bytes and packets that left it."""

    bytes: dict[str, int]
    packets: dict[str, int]

    def since(self, before: Crossing) -> Crossing:
        """What crossed after `before`."""
        return Crossing(
            *(
                {node: now[node] - then[node] for node in now}
                for now, then in ((self.bytes, before.bytes), (self.packets, before.packets))
            )
        )

    @property
    def payload(self) -> int:
        """Bytes without packets' headers, which acknowledgements consist of."""
        return sum(self.bytes.values()) - HEADER_BYTES * sum(self.packets.values())


@dataclass(frozen=True)
class Place:
    """Where a process runs.

    Attributes:
        namespace: To enter with `ip netns exec`.
        node: Name of its node.
        address: IPv4 address.
    """

    namespace: str
    node: str
    address: str


@dataclass(frozen=True)
class Network:
    """Namespaces of processes and nodes.

    Attributes:
        places: Of each process.
        nodes: Names, in order.
        prefix: Of the names of namespaces.
    """

    places: tuple[Place, ...]
    nodes: tuple[str, ...]
    prefix: str

    def limit(self, local: float, between: float) -> None:
        """Limit the links.

        Args:
            local, between: Bytes per second of a process's link and of a node's, in each direction.
        """
        for i, place in enumerate(self.places):
            _limit(place.namespace, DEVICE, local)
            _limit(self._switch(place.node), f"port{i}", local)
        for node in self.nodes:
            _limit(self._switch(node), "uplink", between)
            _limit(f"{self.prefix}-core", f"port-{node}", between)

    def unlimit(self) -> None:
        """Let all links carry what they can."""
        for i, place in enumerate(self.places):
            _unlimit(place.namespace, DEVICE)
            _unlimit(self._switch(place.node), f"port{i}")
        for node in self.nodes:
            _unlimit(self._switch(node), "uplink")
            _unlimit(f"{self.prefix}-core", f"port-{node}")

    def crossed(self) -> Crossing:
        """What has crossed between nodes so far, by the interfaces' counters."""
        bytes_of, packets_of = {}, {}
        for node in self.nodes:
            shown = run_tool(
                "ip", "-n", self._switch(node), "-s", "-j", "link", "show", "dev", "uplink"
            ).stdout
            sent = json.loads(shown)[0]["stats64"]["tx"]
            bytes_of[node], packets_of[node] = sent["bytes"], sent["packets"]
        return Crossing(bytes_of, packets_of)

    def _switch(self, node: str) -> str:
        return f"{self.prefix}-{node}"


@contextmanager
def connected_nodes(processes: Sequence[str]) -> Iterator[Network]:
    """Context with a namespace for each process, one for each node, and one between them; removed at its end.

    Args:
        processes: The node of each process; a name has 8 characters at most.

    Raises:
        NamespacesRefused: They cannot be made.
    """
    prefix, nodes = f"mux{os.getpid()}", tuple(dict.fromkeys(processes))
    places = tuple(
        Place(f"{prefix}-{node}-{i}", node, f"10.112.0.{i + 1}") for i, node in enumerate(processes)
    )
    network = Network(places, nodes, prefix)
    made: list[str] = []
    try:
        try:
            for name in (
                f"{prefix}-core",
                *(f"{prefix}-{node}" for node in nodes),
                *(p.namespace for p in places),
            ):
                _ip("netns", "add", name)
                made.append(name)
            _connect(network)
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", "") or str(error)
            raise NamespacesRefused(said.strip()) from error
        yield network
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _connect(network: Network) -> None:
    core = f"{network.prefix}-core"
    _add_switch(core)
    for node in network.nodes:
        switch = f"{network.prefix}-{node}"
        _add_switch(switch)
        _join(switch, "uplink", core, f"port-{node}")
        _plug(switch, "uplink")
        _plug(core, f"port-{node}")
    for i, place in enumerate(network.places):
        switch = f"{network.prefix}-{place.node}"
        _join(place.namespace, DEVICE, switch, f"port{i}")
        _plug(switch, f"port{i}")
        _ip("-n", place.namespace, "link", "set", DEVICE, "gso_max_size", str(_SEGMENT))
        _ip("-n", place.namespace, "address", "add", f"{place.address}/24", "dev", DEVICE)
        for device in ("lo", DEVICE):
            _ip("-n", place.namespace, "link", "set", device, "up")
        # As clusters set it: otherwise a connection begins slowly again after each pause of a fifth of a second.
        keep = "echo 0 > /proc/sys/net/ipv4/tcp_slow_start_after_idle"
        _ip("netns", "exec", place.namespace, "sh", "-c", keep)


def _add_switch(namespace: str) -> None:
    _ip("-n", namespace, "link", "add", "switch", "type", "bridge")
    _ip("-n", namespace, "link", "set", "switch", "up")


def _join(namespace: str, device: str, other: str, other_device: str) -> None:
    words = f"link add {device} netns {namespace} type veth peer name {other_device} netns {other}"
    _ip(*words.split())


def _plug(namespace: str, device: str) -> None:
    _ip("-n", namespace, "link", "set", "dev", device, "master", "switch", "up")


def _limit(namespace: str, device: str, bytes_per_second: float) -> None:
    limit = ["rate", f"{int(8 * bytes_per_second)}bit", "burst", _BURST, "limit", "32mb"]
    run_tool("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *limit)


def _unlimit(namespace: str, device: str) -> None:
    command = ["tc", "-n", namespace, "qdisc", "delete", "dev", device, "root"]
    subprocess.run(command, capture_output=True, check=False)  # it has no limit yet


def _ip(*words: str) -> Any:
    return run_tool("ip", *words)
