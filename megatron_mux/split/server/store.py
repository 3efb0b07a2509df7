"""The server's saves: its part of each session's adapter and optimizer, one file a save, written durably.

`DIR/IDENTITY/TASK/RUN/step-N.safetensors`. The client names the saves that it still needs, and the others are removed,
so that both ends can always go back to the same step. What finished sessions leave is kept as
`DIR/IDENTITY/TASK/final-N.safetensors`.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

from megatron_mux.errors import UserError
from megatron_mux.files import sync_directory, write
from megatron_mux.split.protocol.pieces import Piece, from_index, to_index
from megatron_mux.split.protocol.wire import RefusedError

_STEP = re.compile(r"step-([0-9]+)\.safetensors")
_FINAL = re.compile(r"final-([0-9]+)\.safetensors")


class SessionStore:
    """Saves of sessions in a directory.

    Args:
        directory: Where to; made if it is not there.
        most_each: Runs, and states of finished ones, that are kept of an identity.
        check: Raises a `UserError` once another server writes there; called before anything is written or removed.

    Raises:
        UserError: It cannot be written.
    """

    def __init__(
        self, directory: Path, most_each: int = 256, check: Callable[[], None] = lambda: None
    ) -> None:
        self.directory = directory
        self._check = check
        self._most_each = most_each
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # clients' adapters are nobody else's
            write(directory / ".writable", b"")
            (directory / ".writable").unlink()
        except OSError as error:
            raise UserError(f"--save {directory}: cannot be written: {error.strerror or error}") from None

    def reserve(self, session: str) -> None:
        """Make the directory of a run that starts.

        Raises:
            RefusedError: Its client has too many.
            OSError: It cannot be written.
        """
        self._check_ours()
        self._check_count(session)
        self._folder(session).mkdir(parents=True, exist_ok=True)

    def _check_ours(self) -> None:
        try:
            self._check()
        except UserError as error:
            raise PermissionError(errno.EACCES, str(error)) from None

    def tidy(self, session: str) -> None:
        """Remove the directory of a run that has no saves."""
        with suppress(OSError):
            self._folder(session).rmdir()

    def _check_count(self, session: str) -> None:
        """Raise `RefusedError` if the client has other runs and states of finished ones, as many as it may have."""
        identity, folder = self.directory / session.partition("/")[0], self._folder(session)
        kept = [entry for entry in identity.glob("*/*") if entry != folder]
        if len(kept) >= self._most_each:
            raise RefusedError(
                "too_many",
                f"the server keeps {len(kept)} runs of this client, the most that it may have (--max-runs-each): its "
                f"operator can remove old ones from {identity.name} in the server's --save",
            )

    def steps(self, session: str) -> list[int]:
        """Steps that a session's saves hold, ascending."""
        return sorted(self._numbers(session, _STEP))

    def save(
        self, session: str, step: int, pieces: Sequence[Piece], keep: Collection[int] | None = None
    ) -> None:
        """Write a save and flush it to disk, then remove those that the client needs no more.

        Args:
            session: Name of its saves, `IDENTITY/TASK/RUN`.
            step: Optimizer steps that the pieces have done.
            keep: Steps of other saves that the client needs; None: all.

        Raises:
            OSError: The disk is full or not writable; earlier saves are as they were.
        """
        path = self._path(session, step)
        self._write(path, pieces)
        for other in self.steps(session) if keep is not None else ():
            if other != step and other not in (keep or ()):
                self._path(session, other).unlink(missing_ok=True)

    def finish(self, session: str, pieces: Sequence[Piece]) -> Path:
        """Write what a finished session, `IDENTITY/TASK`, leaves, under the next free `final-N`.

        Raises:
            RefusedError: Its client has too many.
            OSError: It cannot be written.
        """
        self._check_count(session)
        number = 1 + max(self._numbers(session, _FINAL), default=0)
        path = self._folder(session) / f"final-{number}.safetensors"
        self._write(path, pieces)
        return path

    def load(self, session: str, step: int) -> list[Piece] | None:
        """The pieces of a save; None if there is none of that step.

        Raises:
            UserError: The file is damaged.
        """
        from safetensors import SafetensorError, safe_open

        path = self._path(session, step)
        if not path.is_file():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                index = json.loads(file.metadata()["pieces"])
                tensors = [file.get_tensor(str(i)) for i in range(len(file.keys()))]
            return from_index(index, tensors)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is damaged: {error}") from None

    def forget(self, session: str) -> None:
        """Remove the saves of a run that starts anew."""
        self._check_ours()
        for step in self.steps(session):
            self._path(session, step).unlink(missing_ok=True)

    def _write(self, path: Path, pieces: Sequence[Piece]) -> None:
        from safetensors.torch import save

        self._check_ours()
        tensors = {str(i): piece.tensor.contiguous() for i, piece in enumerate(pieces)}
        content = save(tensors, {"pieces": json.dumps(to_index(pieces))})
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".partial-{path.name}")
        try:
            write(partial, content)
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)

    def _folder(self, session: str) -> Path:
        return self.directory / session

    def _path(self, session: str, step: int) -> Path:
        return self._folder(session) / f"step-{step}.safetensors"

    def _numbers(self, session: str, pattern: re.Pattern[str]) -> list[int]:
        folder = self._folder(session)
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        return [int(match[1]) for name in names if (match := pattern.fullmatch(name))]
