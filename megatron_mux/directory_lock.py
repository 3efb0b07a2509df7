"""One writer at a time for a directory, on shared file systems too, and a record of who wrote there.

The lock is a file that names its holder and counts its heartbeats. It needs nothing of a file system but exclusive
creation and renaming, because `flock` is missing or local to a host on some shared ones. A holder on the same host is
looked up among its processes, so a dead one is found at once. A holder on another host lives as long as its heartbeats
arrive; clocks of hosts are not compared.
"""

from __future__ import annotations

import getpass
import json
import os
import platform
import secrets
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from megatron_mux.errors import UserError
from megatron_mux.files import sync_directory, write_atomically

LOCK = "run.lock"
"""The lock's file, which goes when its holder leaves."""
RECORD = "run.json"
"""Who wrote last, which stays."""

HEARTBEAT_SECONDS = 5.0
PATIENCE_SECONDS = 45.0
"""Without a heartbeat for so long, a holder on another host is dead: several missed beats, and less than a minute."""
_POLL_SECONDS = 1.0
_BEAT_DIGITS = 12
_ENDED = -1


@dataclass(frozen=True)
class Writer:
    """The process that writes into a directory.

    Attributes:
        host: Its name.
        machine: Boot and process namespace: process numbers mean something only where both are the same.
        pid: Process number.
        started: Clock ticks since boot when the process started, as process numbers are used again; 0: unknown.
        user: Who runs it.
        command: Its command line.
        since: Local time with offset.
        nonce: Differs for every lock taken.
    """

    host: str
    machine: str
    pid: int
    started: int
    user: str
    command: str
    since: str
    nonce: str

    @classmethod
    def this_process(cls) -> Writer:
        """Describe this process, with a new nonce."""
        return cls(
            host=socket.gethostname(),
            machine=_machine(),
            pid=os.getpid(),
            started=_start_ticks(os.getpid()),
            user=_user(),
            command=_command_line(),
            since=time.strftime("%Y-%m-%d %H:%M:%S%z"),
            nonce=secrets.token_hex(8),
        )

    def __str__(self) -> str:
        return f"process {self.pid} of {self.user} on {self.host}, since {self.since}"

    @property
    def is_local(self) -> bool:
        """Whether its process number can be looked up here."""
        return self.machine == _machine()

    @property
    def is_dead(self) -> bool:
        """Whether the process of a local writer has ended; False also if that cannot be seen."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:  # another user's
            pass
        now = _start_ticks(self.pid)
        return now == _ENDED or (now > 0 and now != self.started)

    @property
    def is_alive(self) -> bool:
        """Whether the process of a local writer still runs, for sure (`/proc` may hide other users' processes)."""
        return 0 < self.started == _start_ticks(self.pid)


def refuse_if_held(directory: Path) -> None:
    """Refuse a `--save` that a living process of this machine writes into; a look only, before slow imports.

    Args:
        directory: Need not exist.

    Raises:
        UserError: Another process holds its lock.
    """
    holder, _ = _read(directory / LOCK)
    if holder is not None and holder.is_local and holder.is_alive:
        _refuse(f"--save {directory}", holder)


class DirectoryLock:
    """Keeps other processes from writing into a directory until this one leaves or dies.

    Use it as a context manager. The directory is made if it is missing.

    Args:
        directory: To write into; of `--save`.
        break_lock: Take the lock from whoever holds it.
        say: Told when a start has to wait, and whose lock is taken.
    """

    def __init__(
        self,
        directory: Path,
        *,
        break_lock: bool = False,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.directory = directory
        self.writer = Writer.this_process()
        self._problem = ""
        self._path = directory / LOCK
        self._name = f"--save {directory}"
        self._break = break_lock
        self._say = say
        self._file = -1
        self._beats = 0
        self._recorded = False
        self._made: list[Path] = []
        self._looking = threading.Lock()
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._keep_beating, name="directory-lock", daemon=True)

    def __enter__(self) -> Self:
        """Take the lock.

        Raises:
            UserError: Another process holds it, or the directory cannot be written.
        """
        try:
            self._made = [path for path in (self.directory, *self.directory.parents) if not path.exists()]
            self.directory.mkdir(parents=True, exist_ok=True)
            while not self._create():
                self._remove_if_dead()
        except OSError as error:
            self._remove_made()
            raise UserError(
                f"{self._name}: cannot be written: {error.strerror or error}: choose another directory"
            ) from None
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the lock up, if it is still this process's. A directory that was made, and is empty, goes."""
        self._left.set()
        self._thread.join()
        with suppress(OSError):
            os.close(self._file)
        with suppress(OSError):
            if _read(self._path)[0] == self.writer:
                self._path.unlink()
        self._remove_made()

    def record(self, **about: object) -> None:
        """Note in `run.json` who writes here now.

        Args:
            about: What else should be known of the run, as JSON.
        """
        content = asdict(self.writer) | about
        del content["machine"], content["started"]
        write_atomically(self.directory / RECORD, json.dumps(content, indent=1) + "\n")
        self._recorded = True

    def check(self) -> None:
        """Raise a `UserError` if somebody took the lock. Call it before writing what must not be mixed."""
        with suppress(OSError):  # whoever writes next says what is wrong with the file system
            self._look()
        if self._problem:
            raise UserError(self._problem)

    def _remove_made(self) -> None:
        """Remove the directories that this lock made, if they are empty."""
        with suppress(OSError):
            for path in self._made:
                path.rmdir()

    # -- taking it

    def _create(self) -> bool:
        """Create the lock's file; False if there is one."""
        try:
            self._file = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
        except FileExistsError:
            return False
        try:
            self._beat()
        except OSError:  # the disk is full
            os.close(self._file)
            self._path.unlink()
            raise
        sync_directory(self.directory)
        return True

    def _remove_if_dead(self) -> None:
        """Remove the lock's file if its holder is dead or `break_lock` says so; else refuse to go on."""
        holder, beat = _read(self._path)
        if self._break:
            self._say(f"{self._name}: taking the lock of {_name(holder)}, as --break-lock says")
        elif holder is not None and holder.is_local and holder.is_alive:
            _refuse(self._name, holder)
        elif holder is not None and holder.is_local and holder.is_dead:
            self._say(f"{self._name}: its last writer died ({holder})")
        else:
            self._say(
                f"{self._name}: locked by {_name(holder)}: waiting up to {PATIENCE_SECONDS:.0f} s for its heartbeat "
                "(--break-lock takes the directory over at once)"
            )
            now_held_by, newer_beat = self._watch(holder, beat)
            if now_held_by != holder:
                return  # to look again
            if newer_beat != beat:
                _refuse(self._name, holder)
            self._say(f"{self._name}: no heartbeat: its last writer died")
        self._remove(holder)

    def _watch(self, holder: Writer | None, beat: str) -> tuple[Writer | None, str]:
        """Wait until the lock changes, or long enough to know that it will not; what it holds then."""
        until = time.monotonic() + PATIENCE_SECONDS
        while (now := _read(self._path)) == (holder, beat) and time.monotonic() < until:
            if not self._path.exists():
                break
            time.sleep(_POLL_SECONDS)
        return now

    def _remove(self, holder: Writer | None) -> None:
        """Remove the lock of `holder`, but not one that another process took meanwhile."""
        aside = self._path.with_name(f".{LOCK}-{self.writer.nonce}")
        try:
            os.rename(self._path, aside)
        except FileNotFoundError:
            return
        moved, _ = _read(aside)
        if moved == holder or self._path.exists():
            aside.unlink()  # if it was the lock of a living process, that finds out by `check`
        else:
            os.rename(aside, self._path)

    # -- holding it

    def _keep_beating(self) -> None:
        while not self._left.wait(HEARTBEAT_SECONDS):
            with suppress(OSError):  # a file system that does not answer now may answer to the next one
                self._look()
                if self._problem:
                    return
                self._beat()

    def _beat(self) -> None:
        """Write the holder and the number of this heartbeat, always in equally many bytes."""
        self._beats += 1
        text = json.dumps({"heartbeat": f"{self._beats:0{_BEAT_DIGITS}d}", **asdict(self.writer)})
        os.pwrite(self._file, text.encode(), 0)
        os.fsync(self._file)

    def _look(self) -> None:
        """Find out whether the lock is still this process's; one that a user deleted is made again.

        The lock of a successor that has finished is gone, too, but its record is not.
        """
        with self._looking:
            holder, _ = _read(self._path)
            if self._problem or self._left.is_set():
                return
            if holder == self.writer and os.path.samestat(os.fstat(self._file), self._path.stat()):
                return
            if holder == self.writer:  # moved and put back by a start that took it for another one's
                os.close(self._file)
                self._file = os.open(self._path, os.O_RDWR)
                return
            if holder is None and not self._path.exists() and not self._succeeded():
                before = self._file
                if self._create():
                    os.close(before)
                    return
                holder, _ = _read(self._path)
            whose = f"another process (see {RECORD})" if holder is None else str(holder)
            self._problem = f"{self._name}: taken over by {whose}: this run ends and writes no more there"

    def _succeeded(self) -> bool:
        """Whether another process's record replaced this one's."""
        if not self._recorded:
            return False
        with suppress(OSError, ValueError, KeyError):
            return bool(json.loads((self.directory / RECORD).read_text())["nonce"] != self.writer.nonce)
        return False


def _read(path: Path) -> tuple[Writer | None, str]:
    """Who holds a lock, and the heartbeat it wrote last; no holder if the file is empty, damaged or gone."""
    for _ in range(3):
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            content = json.loads(path.read_text(encoding="utf-8"))
            return Writer(**{entry.name: content[entry.name] for entry in fields(Writer)}), content[
                "heartbeat"
            ]
        if not path.exists():
            break
        time.sleep(0.1)  # it may just be written
    return None, ""


def _refuse(name: str, holder: Writer | None) -> NoReturn:
    command = "" if holder is None else f" ({holder.command})"
    raise UserError(
        f"{name}: is being written by {_name(holder)}{command}: wait for it, stop it, or choose another "
        "directory; if it cannot be running any more, --break-lock takes the directory over"
    )


def _command_line() -> str:
    """Of this process, as a user would type it."""
    program, *words = sys.argv
    if Path(program).parts[-3:] == ("megatron_mux", "cli", "__main__.py"):
        program = "megatron-mux"
    return shlex.join([program, *words])[:2000]


def _name(holder: Writer | None) -> str:
    return "an unknown process" if holder is None else str(holder)


def _machine() -> str:
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}/{socket.gethostname()}"
    return platform.node()


def _start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot; `_ENDED` if only its exit status is left, 0 if unknown."""
    try:
        # The name of the program stands in parentheses and may hold any character.
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return 0
    return _ENDED if state in "ZX" else int(rest[18])


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container without an entry for the user
        return str(os.getuid())
