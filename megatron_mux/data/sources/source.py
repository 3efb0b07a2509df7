"""What every kind of data file offers."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from operator import attrgetter
from pathlib import Path
from typing import Any

from megatron_mux.data.bad_record import BadRecordError
from megatron_mux.errors import UserError

Stamp = tuple[int, int, int]
"""Size of a file, when it was modified, in nanoseconds, and its inode: another one after it has been written to."""
stamp_of: Callable[[os.stat_result], Stamp] = attrgetter("st_size", "st_mtime_ns", "st_ino")


@dataclass(frozen=True)
class Row:
    """A row of a file.

    Attributes:
        place: Where it is, for `Source.row`; less than 2**47.
        where: The same for people: "line 7".
        value: Its keys and values, or what is wrong with it.
        done: Bytes of the file up to its end, perhaps estimated.
    """

    place: int
    where: str
    value: Any | BadRecordError
    done: int


class Source(ABC):
    """The rows of one file.

    The file is kept open: replacing it by another one does not disturb a reader. Memory holds a few rows at a time.

    Args:
        path: The file.

    Attributes:
        stamp: Of the file when it was opened.

    Raises:
        UserError: The file cannot be read, or is none of this kind.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.file: BufferedReader = open(path, "rb")  # noqa: SIM115 (kept open)
        except FileNotFoundError as error:
            raise UserError(f"{path}: no such file") from error
        except OSError as error:
            raise unreadable(path, error) from error
        self.stamp = stamp_of(os.fstat(self.file.fileno()))

    @property
    def size(self) -> int:
        """Bytes of the file when it was opened."""
        return self.stamp[0]

    @property
    def is_unchanged(self) -> bool:
        """Whether the file has not been written to since it was opened."""
        return stamp_of(os.fstat(self.file.fileno())) == self.stamp

    def digest(self) -> str:
        """SHA-256 of the file."""
        try:
            self.file.seek(0)
            return hashlib.file_digest(self.file, "sha256").hexdigest()
        except OSError as error:
            raise unreadable(self.path, error) from error

    @abstractmethod
    def rows(self) -> Iterator[Row]:
        """All rows in order, those included that are no records.

        Raises:
            UserError: The file cannot be read further.
        """

    @abstractmethod
    def row(self, place: int) -> Any:
        """The value of a row, read again from the file.

        Raises:
            BadRecordError, OSError: There is none, or no longer.
        """

    def count(self) -> int:
        """Number of rows."""
        return sum(1 for _ in self.rows())

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def unreadable(path: Path, error: OSError) -> UserError:
    """The error for a file that the operating system does not let read."""
    return UserError(f"{path}: cannot be read: {error.strerror or error}")
