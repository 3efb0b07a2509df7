"""Tokenising in a process of its own, at idle priority, while this one trains."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import megatron_mux
from megatron_mux.data.tokenised_file import TokenisedFile
from megatron_mux.errors import UserError

# Not handed on: the process is none of the run's ranks.
_OF_A_RANK = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


class BackgroundTokenising:
    """A process that tokenises files into the cache (`background_worker.py`).

    It ends when the files are done, when it is cancelled, or soon after this process ends.

    Args:
        backbone: Directory of the tokenizer.
        paths: The files.
        cache: See `token_cache_directory`.
        niceness: Of the process, relative to this one; 19 is idle priority.

    Attributes:
        news: Lines for people, to be taken away: how far it is.
        results: For each file its tokens, or what is wrong with it; None until it is done.
    """

    def __init__(self, backbone: Path, paths: Sequence[str], cache: Path | None, niceness: int = 19) -> None:
        self.paths = tuple(paths)
        self.news: list[str] = []
        self.results: dict[str, TokenisedFile | UserError] | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (both closed in `_close`)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._read = 0
        environment = {key: value for key, value in os.environ.items() if key not in _OF_A_RANK}
        root = str(Path(megatron_mux.__file__).parents[1])
        environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment["CUDA_VISIBLE_DEVICES"] = ""
        request = {
            "backbone": str(backbone),
            "paths": paths,
            "cache": cache and str(cache),
            "niceness": niceness,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megatron_mux.data.background_worker", json.dumps(request)],
            env=environment,
            stdin=subprocess.PIPE,  # it ends with this process
            stdout=self._output,
            stderr=self._errors,
            # Ctrl-C is for this process, which then cancels it. The session stays: `nice` counts within one.
            process_group=0,
        )

    def poll(self) -> bool:
        """Whether it is done: `results` are there. Takes no time."""
        if self.results is not None:
            return True
        status = self._process.poll()
        self._take_output()
        if status is not None and self.results is None:
            self.results = dict.fromkeys(self.paths, self._died(status))
        if status is not None:
            self._close()
        return status is not None

    def cancel(self) -> None:
        """End the process; what it has not finished is lost."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        self._close()

    def _take_output(self) -> None:
        """Read the lines that were written since the last call."""
        size = os.fstat(self._output.fileno()).st_size
        # Reading at a place of its own: the process writes at the file's.
        text = os.pread(self._output.fileno(), size - self._read, self._read)
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in map(json.loads, whole.splitlines()):
            if isinstance(line, str):
                self.news.append(line)
            else:
                self.results = {path: _result(found) for path, found in line.items()}

    def _died(self, status: int) -> UserError:
        how = f"was killed by signal {-status}" if status < 0 else f"failed with status {status}"
        self._errors.seek(0)
        words = [line for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        said = f": {words[-1]}" if words else ""
        return UserError(f"{', '.join(self.paths)}: the process that tokenises {how}{said}")

    def _close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._output.close()
        self._errors.close()


def _result(found: dict[str, str | int] | list[str]) -> TokenisedFile | UserError:
    if isinstance(found, list):
        return UserError(*found)
    return TokenisedFile(str(found["entry"]), int(found["size"]), int(found["modified_ns"]))
