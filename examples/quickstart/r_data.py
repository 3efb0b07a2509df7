"""Text out of an R package's data, without R.

Reads the character vectors of a lazy-load database: `.rdx` is its index, `.rdb` holds the compressed values.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import struct
import zlib
from pathlib import Path
from typing import Any

# R's internal type numbers ("Serialization Formats" in R Internals): those that plain text needs.
SYMBOL, PAIRLIST, CHARACTER, LOGICAL, INTEGER, STRINGS, LIST = 1, 2, 9, 10, 13, 16, 19
NIL, GLOBAL_ENVIRONMENT, REFERENCE = 254, 253, 255
HAS_ATTRIBUTES, HAS_TAG = 0x200, 0x400


class _Reader:
    """Reads R's XDR serialisation into lists, strings and integers."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        self.symbols: list[Any] = []

    def integer(self) -> int:
        (value,) = struct.unpack_from(">i", self.data, self.at)
        self.at += 4
        return int(value)

    def take(self, count: int) -> bytes:
        self.at += count
        return self.data[self.at - count : self.at]

    def document(self) -> Any:
        """The whole value, header first.

        Raises:
            ValueError: Not R's binary format, or a type that text does not need.
        """
        if self.take(2) != b"X\n":
            raise ValueError("not R data in binary (XDR) form")
        version = self.integer()
        self.at += 8  # the versions of R that wrote it and that can read it
        if version == 3:
            self.take(self.integer())  # name of the native encoding
        return self.item()

    def item(self) -> Any:
        flags = self.integer()
        kind = flags & 0xFF
        if kind in (NIL, GLOBAL_ENVIRONMENT):
            return None
        if kind == REFERENCE:
            return self.symbols[(flags >> 8) - 1]
        if kind == SYMBOL:
            self.symbols.append(self.item())
            return self.symbols[-1]
        if kind == CHARACTER:
            length = self.integer()
            return None if length < 0 else self.take(length).decode("utf-8", errors="replace")
        if kind == PAIRLIST:
            return self.pairlist(flags)
        value: Any
        if kind in (STRINGS, LIST):
            value = [self.item() for _ in range(self.integer())]
        elif kind in (INTEGER, LOGICAL):
            value = [self.integer() for _ in range(self.integer())]
        else:
            raise ValueError(f"R value of type {kind}: only text, integers and lists are read here")
        names = (self.item() or {}).get("names") if flags & HAS_ATTRIBUTES else None
        return dict(zip(names, value, strict=True)) if names else value

    def pairlist(self, flags: int) -> dict[str, Any]:
        """A chain of tagged cells, which is how R keeps attributes."""
        cells = {}
        while flags & 0xFF == PAIRLIST:
            if flags & HAS_ATTRIBUTES:
                self.item()
            tag = self.item() if flags & HAS_TAG else ""
            cells[str(tag)] = self.item()
            flags = self.integer()
        return cells


def _decompress(chunk: bytes) -> bytes:
    """One chunk of an `.rdb` file: its length, then zlib data, or a letter for the method and the data."""
    body = chunk[4:]
    method = body[:1]
    if method == b"2":
        return bz2.decompress(body[1:])
    if method == b"Z":
        return lzma.decompress(body[1:], lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_LZMA2, "preset": 6}])
    return body[1:] if method == b"0" else zlib.decompress(body)


def character_vectors(stem: Path) -> dict[str, list[str]]:
    """Every character vector of a lazy-load database.

    Args:
        stem: Path without suffix: `stem.rdx` and `stem.rdb` are read.

    Returns:
        Variable name to its lines; other variables are left out.
    """
    index = _Reader(gzip.decompress(stem.with_suffix(".rdx").read_bytes())).document()
    chunks = stem.with_suffix(".rdb").read_bytes()
    found = {}
    for name, (start, length) in index["variables"].items():
        value = _Reader(_decompress(chunks[start : start + length])).document()
        if isinstance(value, list) and all(isinstance(line, str) for line in value):
            found[str(name)] = value
    return found
