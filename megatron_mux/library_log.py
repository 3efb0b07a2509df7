"""A log file for what libraries write to the terminal while a live display is drawn there.

Libraries warn through Python's `warnings`, through loggers, and from C++ code. Each warning would cut through the
display, so standard output and error are replaced as file descriptors, for child processes too. `sys.stdout` still is
the terminal. Errors are still seen there: `errors.tell` takes the display down first, tracebacks are printed after the
log has been left, and those of threads and of fatal signals go to the terminal at once.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import shutil
import sys
import tempfile
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.live import Live

LOG_NAME = "warnings.log"
"""Rank 0's file in the run's directory; `rank-N-` precedes it on rank N."""

_OUTPUT, _ERRORS = 1, 2  # file descriptors

_current: LibraryLog | None = None
_display: Live | None = None
_is_below_display = False


class LibraryLog:
    """Keeps what libraries write to the terminal in a file, while it is entered.

    Without a terminal on standard output it does nothing. Until `keep` names the file, an anonymous one serves; if it
    is never named, what it holds is written to standard error at the end.

    Args:
        wanted: Whether a display may be drawn: by rank 0, on the terminal that all ranks of a host share.
    """

    def __init__(self, wanted: bool) -> None:
        self._rank = os.environ.get("RANK", "0")
        self._wanted = wanted and os.isatty(_OUTPUT)
        self._path: Path | None = None
        self._saved: dict[int, int] = {}
        self._file: IO[bytes]
        self._stdout: TextIO
        self._lock = threading.Lock()
        self._had_faulthandler = faulthandler.is_enabled()

    def __enter__(self) -> LibraryLog:
        """Replace the file descriptors."""
        global _current, _is_below_display
        if not self._wanted:
            return self
        self._saved = {fd: os.dup(fd) for fd in (_OUTPUT, _ERRORS) if os.isatty(fd)}
        self._redirect_to(tempfile.TemporaryFile("ab+"))
        self._stdout = sys.stdout
        sys.stdout = open(os.dup(self._saved[_OUTPUT]), "w", buffering=1, encoding=self._stdout.encoding)
        faulthandler.enable(sys.stdout)
        self._hooks = sys.excepthook, threading.excepthook
        threading.excepthook = _print_failed_thread
        if self._rank != "0":
            _is_below_display, sys.excepthook = True, _print_failure
        _current = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the terminal back."""
        release_terminal()

    def keep(self, directory: Path | None) -> Path | None:
        """Keep the log in a file from now on, and return the file; None if it cannot be written, or has one already.

        Args:
            directory: Of the run; None: the system's directory for temporary files.
        """
        try:
            if self._path is not None:
                return None
            if directory is None:
                handle, name = tempfile.mkstemp(".log", "megatron-mux-")
                path, file = Path(name), os.fdopen(handle, "ab+")
            else:
                directory.mkdir(parents=True, exist_ok=True)
                path = log_file(directory, self._rank)
                file = open(path, "ab+")  # noqa: SIM115 (open until `release`)
            with self._lock:
                self._copy_to(file)
                self._redirect_to(file)
        except OSError:
            return None
        self._path = path
        return path

    def release(self) -> None:
        """Give the terminal back, and remove a file that nothing was written to; a second call does nothing."""
        global _current
        with self._lock:
            if not self._saved:
                return
            _flush()
            for fd, saved in self._saved.items():
                os.dup2(saved, fd)
                os.close(saved)
            self._saved = {}
            _current = None
            sys.excepthook, threading.excepthook = self._hooks
            faulthandler.disable()
            if self._had_faulthandler:
                faulthandler.enable()
            sys.stdout.close()
            sys.stdout = self._stdout
            if self._path is None:
                self._copy_to(sys.stderr.buffer)
            else:
                with suppress(OSError):  # somebody removed it
                    held = os.fstat(self._file.fileno())
                    if not held.st_size and os.path.samestat(held, self._path.stat()):
                        self._path.unlink()
            self._file.close()

    def _redirect_to(self, file: IO[bytes]) -> None:
        _flush()
        for fd in self._saved:
            os.dup2(file.fileno(), fd)
        self._file = file

    def _copy_to(self, file: Any) -> None:
        _flush()
        self._file.seek(0)
        shutil.copyfileobj(self._file, file)
        file.flush()


def quiet_imports() -> None:
    """Drop what libraries log while they are imported and that concerns no run: kernels that they cannot load."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def log_file(directory: Path, rank: str) -> Path:
    """The log of a rank in its run's directory."""
    return directory / (LOG_NAME if rank == "0" else f"rank-{rank}-{LOG_NAME}")


def set_display(display: Live) -> None:
    """Note what draws on the terminal, for `release_terminal`."""
    global _display
    _display = display


def keep_library_log(directory: Path | None) -> Path | None:
    """See `LibraryLog.keep`; None without a log."""
    return None if _current is None else _current.keep(directory)


def release_terminal() -> None:
    """Take the display down and give the terminal back, so that what is written next can be read."""
    global _display
    display, _display = _display, None
    if display is not None:
        display.stop()
    if _current is not None:
        _current.release()


def below_display() -> str:
    """Line ends to put behind a message, so that rank 0's display, which overwrites its own lines, spares it."""
    return "\n" * shutil.get_terminal_size().lines if _is_below_display else ""


def _print_failure(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.stderr.write(below_display()[:1])
    sys.__excepthook__(kind, error, trace)
    sys.stderr.write(below_display())


def _print_failed_thread(arguments: Any) -> None:
    """Print a thread's traceback on the terminal, above the display."""
    if arguments.exc_type is not SystemExit:
        lines = traceback.format_exception(arguments.exc_type, arguments.exc_value, arguments.exc_traceback)
        name = "" if arguments.thread is None else arguments.thread.name
        print(f"Exception in thread {name}:\n{''.join(lines)}", end="")


def _flush() -> None:
    """Write out what Python and C have buffered."""
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)
