"""What every kind of data file offers: its rows in order, once."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from megatron_mux.data.bad_record import BadRecordError
from megatron_mux.errors import UserError


@dataclass(frozen=True)
class Row:
    """A row of a file.

    Attributes:
        where: Its place for people: "line 7".
        value: Its keys and values, or what is wrong with it.
        done: Bytes of the file up to its end, perhaps estimated.
        number: Among the rows of a `Selection`, from 0.
    """

    where: str
    value: Any | BadRecordError
    done: int
    number: int = 0


class Source(ABC):
    """The rows of one file.

    Memory holds a few rows at a time.

    Args:
        path: The file.

    Attributes:
        size: Bytes of the file when it was opened.

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
        about = os.fstat(self.file.fileno())
        self.size, self._modified = about.st_size, about.st_mtime_ns

    @property
    def is_unchanged(self) -> bool:
        """Whether the file has not been written to since it was opened."""
        about = os.fstat(self.file.fileno())
        return (about.st_size, about.st_mtime_ns) == (self.size, self._modified)

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

    def count(self) -> int:
        """Number of rows."""
        return sum(1 for _ in self.rows())

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def unreadable(path: Path, error: OSError) -> UserError:
    """The error for a file that the operating system does not let read."""
    return UserError(f"{path}: cannot be read: {error.strerror or error}")
