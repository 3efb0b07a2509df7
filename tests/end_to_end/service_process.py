"""`megatron-mux serve` in a process of its own, and OpenAI's client for it."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 150


class ServiceProcess:
    """A server, and the instances that it leaves behind; over HTTPS if clients have a CA."""

    def __init__(
        self,
        backbone: Path,
        state: Path,
        *flags: str,
        address: str = "127.0.0.1",
        ca: Path | None = None,
    ) -> None:
        self.state = state
        self.tls = ssl.create_default_context(cafile=ca) if ca else None
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._words = [
            sys.executable, "-m", "megatron_mux.cli", "serve", "--backbone", f"tiny={backbone}",
            "--state", str(state), "--listen", f"{address}:{self.port}", "--host", "localhost", "--mux-fp32",
            "--mux-policy", "temporal", "--save-interval", "5", *flags,
        ]  # fmt: skip
        self.start()

    @property
    def url(self) -> str:
        return f"{'http' if self.tls is None else 'https'}://localhost:{self.port}"

    def start(self) -> None:
        own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.log = self.state.with_suffix(".log")
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(self._words, env={**os.environ, **own}, stdout=log, stderr=log)

        def answers() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            with suppress(OSError):
                answer = urllib.request.urlopen(f"{self.url}/healthz", context=self.tls)
                return bool(answer.status == 200)
            return False

        until(answers)

    @property
    def first_key(self) -> str:
        return (self.state / "first-key").read_text().strip()

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.first_key, max_retries=5)

    def instances(self) -> list[int]:
        """Processes of instances, by the variable that marks them."""
        mark = f"MEGATRON_MUX_INSTANCE={self.state.resolve()}/".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if mark in path.read_bytes():
                    found.append(int(path.parent.name))
        return found

    def kill_instances(self) -> None:
        for pid in self.instances():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def until(true: Callable[[], Any], seconds: float = SECONDS) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)
