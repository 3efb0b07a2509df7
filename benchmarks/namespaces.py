"""Two network namespaces joined by a link whose bandwidth is limited, so that messages take time on one machine.

Needs root and Debian's iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from processes import flag_words

_PORT = "29500"  # free: each namespace has ports of its own
_BURST = "96kb"
"""What the link carries at once after a pause: more than the largest packet that is handed to it, which is 64 KiB."""


class NamespacesRefused(Exception):
    """This process may not make network namespaces."""


@contextmanager
def joined_namespaces() -> Iterator[tuple[str, str]]:
    """Context with two namespaces, removed at its end; the link's ends have the namespaces' names.

    Raises:
        NamespacesRefused: They cannot be made.
    """
    names = f"mux{os.getpid()}-0", f"mux{os.getpid()}-1"
    made: list[str] = []
    try:
        try:
            for name in names:
                _ip("netns", "add", name)
                made.append(name)
            here, there = names
            _ip(*f"link add {here} netns {here} type veth peer {there} netns {there}".split())
            for i, name in enumerate(names):
                _ip("-n", name, "address", "add", f"10.111.0.{i + 1}/30", "dev", name)
                for device in ("lo", name):
                    _ip("-n", name, "link", "set", device, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", "") or str(error)
            raise NamespacesRefused(said.strip()) from error
        yield names
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def run_in_namespaces(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run a command as rank 0 and as rank 1 of two, each in a namespace of its own; ends both if one fails.

    Raises:
        NamespacesRefused: There can be none.
        subprocess.CalledProcessError: A rank failed.
    """
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that namespaces are removed
    running: list[subprocess.Popen[bytes]] = []
    try:
        with joined_namespaces() as names:
            try:
                for rank, name in enumerate(names):
                    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": name}
                    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.111.0.1"}
                    place = {**environment, **shared, **own, "MASTER_PORT": _PORT}
                    running.append(subprocess.Popen(["ip", "netns", "exec", name, *command], env=place))
                _await(running)
            finally:
                for process in running:
                    process.kill()
                    process.wait()
    finally:
        signal.signal(signal.SIGTERM, before)


def measure_in_namespaces(arguments: argparse.Namespace, script: str, flags: Sequence[str]) -> dict[str, Any]:
    """Run a script again as two ranks in namespaces; returns what rank 0 writes to the file of `--worker`.

    Args:
        arguments: The script's command line.
        script: Its `__file__`.
        flags: Flags of the command line to pass on to the ranks.

    Raises:
        NamespacesRefused: There can be none.
    """
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "result.json"
        command = [sys.executable, script, *flag_words(arguments, flags), "--worker", str(file)]
        run_in_namespaces(command, {**os.environ, "OMP_NUM_THREADS": "1"})
        found: dict[str, Any] = json.loads(file.read_text())
        return found


def _await(running: Sequence[subprocess.Popen[bytes]]) -> None:
    left = list(running)
    while left:
        for process in list(left):
            try:
                status = process.wait(0.2)
            except subprocess.TimeoutExpired:
                continue
            left.remove(process)
            if status:
                raise subprocess.CalledProcessError(status, process.args)


def limit_bandwidth(bits_per_second: float) -> None:
    """Limit what this process's namespace sends over its link."""
    device = os.environ["GLOO_SOCKET_IFNAME"]
    limit = ["rate", f"{int(bits_per_second)}bit", "burst", _BURST, "limit", "32mb"]
    run_tool("tc", "qdisc", "replace", "dev", device, "root", "tbf", *limit)


def _ip(*words: str) -> None:
    run_tool("ip", *words)


def run_tool(*words: str) -> Any:
    """Run a command and return it; raises `subprocess.CalledProcessError` with what it said."""
    return subprocess.run(words, check=True, capture_output=True, text=True)
