"""Starts the processes of a command on this machine, as `torchrun --standalone` does, and ends as they end."""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from megatron_mux.arguments.values import at_least
from megatron_mux.errors import UserError, tell, told_elsewhere
from megatron_mux.gpus import set_allocator_options
from megatron_mux.library_log import log_file, quiet_imports

_SECONDS_TO_LEAVE = 15
"""After one process has failed, the others have so long to report it and end by themselves."""
_SECONDS_TO_END = 30
"""After SIGTERM, before SIGKILL."""
_PR_SET_PDEATHSIG = 1


def is_launched() -> bool:
    """Whether torchrun, a scheduler or `run_processes` has started this process as one of several."""
    return "RANK" in os.environ or "WORLD_SIZE" in os.environ


def add_process_flags(parser: argparse.ArgumentParser, default: str) -> None:
    """Add `--gpus` and `--processes`.

    Args:
        parser: Of a command that may run on several processes.
        default: How many there are without either flag, for `--help`.
    """
    group = parser.add_argument_group("processes on this machine").add_mutually_exclusive_group()
    group.add_argument(
        "--gpus", type=at_least(1), metavar="N", help=f"start N processes, one on each GPU ({default})"
    )
    group.add_argument(
        "--processes", type=at_least(1), metavar="N", help="start N processes, on the CPU if there is no GPU"
    )


def process_count(arguments: argparse.Namespace, default: int = 1) -> int:
    """The number of processes that the flags ask for.

    Args:
        arguments: With the flags of `add_process_flags`.
        default: Used without either flag.

    Raises:
        UserError: The machine has fewer GPUs; or a launcher has started another number of processes.
    """
    flag, count = "--gpus", arguments.gpus
    if count is None:
        flag, count = "--processes", arguments.processes
    if is_launched():
        started = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or "1")
        if count not in (None, started):
            raise UserError(f"{flag} {count}: the launcher has started {started} here: leave the flag to it")
        return started
    if arguments.gpus is not None:
        set_allocator_options()
        import torch

        gpus = torch.cuda.device_count()
        if count > gpus:
            advice = (
                "over several machines, start it with torchrun (docs/running.md)"
                if gpus
                else f"use --processes {count} to train on the CPU"
            )
            raise UserError(f"--gpus {count}: this machine has {gpus} GPU(s): {advice}")
    return default if count is None else int(count)


def processes_needed(arguments: Any) -> int:
    """The fewest processes that parallel sizes can divide.

    Args:
        arguments: With the names of `MuxArguments`; a command may lack the pipeline size.
    """
    tensor, expert = arguments.tensor_model_parallel_size, arguments.expert_model_parallel_size
    each = arguments.expert_tensor_parallel_size or (tensor if expert > 1 else 1)
    stages: int = getattr(arguments, "pipeline_model_parallel_size", 1)
    return stages * math.lcm(tensor, expert * each)


def run_command(
    name: str,
    words: Sequence[str],
    parser: argparse.ArgumentParser,
    work: Callable[[argparse.Namespace], None],
    program: str,
    needed: Callable[[argparse.Namespace], int] = lambda arguments: 1,
) -> int:
    """Run a command on as many processes as its flags ask for.

    Args:
        name: The command's.
        words: Its flags.
        parser: Of the flags, among them those of `add_process_flags`.
        work: What each process does.
        program: Printed before messages.
        needed: Processes that the flags need.

    Returns:
        Exit status.
    """
    try:
        arguments = parser.parse_args(words)
        count = process_count(arguments, needed(arguments))
    except UserError as error:
        tell(error, program)
        return 2
    if count > 1 and not is_launched():
        return run_processes([name, *words], count, program)
    return run_here(lambda: work(arguments), program)


def run_here(work: Callable[[], None], program: str) -> int:
    """Run `work` in this process, and leave the world of processes that it may have joined.

    Args:
        work: Raises `UserError` for wrong input.
        program: Printed before messages.

    Returns:
        Exit status: 0; 2 if the input was wrong (one process prints the error, the others exit silently).
    """
    with ExitStack() as cleanup:
        cleanup.callback(_leave_world)
        try:
            set_allocator_options()  # before torch is imported
            quiet_imports()
            work()
        except UserError as error:
            tell(error, program)
            return 2
        except RuntimeError as error:
            if told_elsewhere(error):
                return 2
            raise
    return 0


def _leave_world() -> None:
    runtime = sys.modules.get("megatron_mux.runtime")
    if runtime is not None:
        runtime.shutdown()


def run_processes(words: Sequence[str], count: int, program: str, directory: Path | None = None) -> int:
    """Run `megatron-mux WORDS` as so many ranks on this machine, and wait for them.

    SIGINT, SIGTERM and SIGHUP (unless it is ignored, as by `nohup`) are passed on to all ranks; nothing else ends them
    early, so that they can save. If a rank fails, the others are ended once they have had time to report it. Ranks get
    SIGTERM if this process is killed.

    Args:
        words: The command and its flags.
        count: Ranks.
        program: Printed before a message.
        directory: Of the run, which may hold what ranks' libraries wrote.

    Returns:
        Exit status of the first rank that failed (128 plus the signal, if one killed it); else 0.
    """
    # Ranks start at once, and connect to this socket once torch is imported here.
    listening = socket.create_server(("127.0.0.1", 0))
    shared = _environment(count, listening.getsockname()[1])
    ranks: list[subprocess.Popen[bytes]] = []
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for rank in ranks:
            rank.send_signal(number)

    before = {number: signal.signal(number, forward) for number in _forwarded()}
    try:
        for number in range(count):
            ranks.append(_start(words, {**shared, "RANK": str(number), "LOCAL_RANK": str(number)}))
            for missed in received:  # by this one
                ranks[-1].send_signal(missed)
        store = _store(listening, count)  # until the ranks have ended
        failed = _wait(ranks)
        del store
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
        for number, handler in before.items():
            signal.signal(number, handler)
    if failed is None:
        return 0
    status = ranks[failed].returncode
    if status < 0 and -status not in received:
        name = signal.Signals(-status).name
        cause = " (was the machine out of memory?)" if name == "SIGKILL" else ""
        print(f"{program}: rank {failed} was ended by {name}{cause}", file=sys.stderr)
    if status not in (0, 2) and directory is not None:
        log = log_file(directory, str(failed))
        if log.is_file():
            print(f"{program}: what libraries of rank {failed} wrote is in {log}", file=sys.stderr)
    return status if status > 0 else 128 - status


def _environment(count: int, port: int) -> dict[str, str]:
    """What torchrun would set for so many ranks that find its store at `port`, but for their numbers."""
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    if "OMP_NUM_THREADS" not in os.environ:
        shared["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // count))
    return shared


def _forwarded() -> list[signal.Signals]:
    """Signals that are passed on to ranks: none outside the main thread, which alone gets them in Python."""
    if threading.current_thread() is not threading.main_thread():
        return []
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hangs_up else [])]


def _start(words: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a rank."""
    prctl = ctypes.CDLL(None).prctl
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_mux.cli", *words],
        env={**os.environ, **environment},
        start_new_session=True,  # Ctrl-C of the terminal reaches it once, passed on
        preexec_fn=partial(prctl, _PR_SET_PDEATHSIG, int(signal.SIGTERM)),  # noqa: PLW1509 (one C call)
    )


def _store(listening: socket.socket, count: int) -> object:
    """torchrun's key-value store, at a socket that listens already."""
    import torch.distributed as dist

    port = listening.getsockname()[1]
    return dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Wait until all ranks have ended; returns the first that failed."""
    failed: int | None = None
    deadline, ending = float("inf"), False
    while None in [rank.poll() for rank in ranks]:
        if failed is None:
            failed = next((i for i, rank in enumerate(ranks) if rank.returncode), None)
            deadline = time.monotonic() + _SECONDS_TO_LEAVE if failed is not None else deadline
        if time.monotonic() > deadline:
            for rank in ranks:
                rank.kill() if ending else rank.terminate()
            deadline, ending = time.monotonic() + _SECONDS_TO_END, True
        time.sleep(0.05)
    return (
        failed if failed is not None else next((i for i, rank in enumerate(ranks) if rank.returncode), None)
    )
