"""A JSON array of objects, read element by element."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import IO, Any

from megatron_mux.data.sources.source import Row, Source, unreadable
from megatron_mux.errors import UserError

_PIECE = 1 << 20
# An element that does not end within this is a mistake before it, such as a missing quote.
_LARGEST = 1 << 28
_SPACE = " \t\r\n"
_DECODER = json.JSONDecoder()


class JsonArray(Source):
    """A file that is one JSON array."""

    def rows(self) -> Iterator[Row]:
        """See `Source.rows`."""
        try:
            self.file.seek(0)
            text = _Text(self.file)
            text.skip("\ufeff" + _SPACE)
            text.take("[")
            number = 0
            while text.skip(_SPACE) != "]":
                if number:
                    text.take(",")
                    text.skip(_SPACE)
                number += 1
                value = text.value()
                yield Row(f"row {number}", value, text.byte)
            text.take("]")
            if text.skip(_SPACE):
                raise ValueError("something follows the end of the array: write one array, or JSON Lines")
        except OSError as error:
            raise unreadable(self.path, error) from error
        except UnicodeDecodeError as error:
            raise UserError(f"{self.path}: is not UTF-8 text") from error
        except RecursionError as error:
            raise UserError(f"{self.path}: row {number}: not valid JSON: nested too deeply") from error
        except ValueError as error:
            where = f"row {number}: " if number else ""
            raise UserError(f"{self.path}: {where}not valid JSON: {error} (line {text.line})") from error


class _Text:
    """The text of a file from its current byte on, of which a piece is in memory.

    Attributes:
        byte, line: Where it is read.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._text, self._at, self._ended = "", 0, False
        self.byte, self.line = file.tell(), 1

    def skip(self, characters: str) -> str:
        """Skip characters, and return the next one; empty at the end."""
        while True:
            start = self._at
            while self._at < len(self._text) and self._text[self._at] in characters:
                self._at += 1
            self._count(start)
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more(_PIECE):
                return ""

    def take(self, character: str) -> None:
        """Read a character, which must be the given one."""
        if self.skip("") != character:
            raise ValueError(f"expected {character!r}")
        self._at += 1
        self.byte += 1

    def value(self) -> Any:
        """Read a JSON value."""
        piece = _PIECE
        while True:
            problem = ""
            try:
                found, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:  # not kept: it holds the text
                problem, end = error.msg, error.pos
            # A number or a name may go on in the next piece.
            if not problem and (end < len(self._text) or self._ended):
                start, self._at = self._at, end
                self._count(start)
                return found
            if len(self._text) - self._at > _LARGEST or (not self._more(piece) and problem):
                self.line += self._text.count("\n", self._at, end)
                raise ValueError(problem)
            piece *= 2

    def _more(self, size: int) -> bool:
        """Read on; whether there was more."""
        if self._ended:
            return False
        piece = self._file.read(size)
        self._ended = not piece
        self._text = self._text[self._at :] + self._decoder.decode(piece, final=not piece)
        self._at = 0
        return True

    def _count(self, start: int) -> None:
        read = self._text[start : self._at]
        self.byte += len(read.encode())
        self.line += read.count("\n")
