"""Tokenised files on disk, as memory-mapped arrays: one directory (an entry) per file content and tokenizer.

An entry is written beside its final name, flushed to disk and renamed, so it is whole or not there, whatever happens to
the process that writes it. When two processes write the same entry, the first to finish wins. Entries that nobody has
opened for a month are removed when another one is written.

Records are kept uncut: an entry serves every maximum length.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
import threading
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from megatron_mux.data.cut import Cut, Usable
from megatron_mux.data.tokenise import Example, kept_part
from megatron_mux.files import cache_directory, sync_directory, write

_FORMAT = 4
_META, _TOKENS, _INDEX, _SPANS = "meta.json", "tokens.bin", "index.bin", "spans.bin"
_COMPLETIONS = "completions.json"
DIGESTS = "digests"
"""Directory beside the entries: what is known of data files (`data.digests`)."""

# One row per record, in the order of the files, and a last row with the ends: twice the number of its row in the files
# (`Row`), and one more if its text follows no prompt; its first token, its first span of labels, and a digest of its
# completion (0 where the record has none).
_ROW = np.dtype([("row", "<i8"), ("token", "<i8"), ("span", "<i8"), ("completion", "<u8")])
# The first label and the token after the last, counted from the record's first token.
_SPAN = np.dtype(("<i4", 2))
_TOKEN = np.dtype("<u4")
MAX_DISTINCT = 128
"""Records can be classified among at most this many distinct completions: each is scored with every prompt."""
_MOST_COMPLETIONS, _LONGEST_COMPLETIONS = 4096, 1 << 20
"""Completions that are kept as texts too, and characters of all: a cut may leave few of more than `MAX_DISTINCT`."""
_SEARCHED = 1 << 20
"""Tokens that are looked at together."""

_UNUSED_SECONDS = 30 * 86400.0
_ABANDONED_SECONDS = 2 * 86400.0


def token_cache_directory(given: str | Path | None = None) -> Path:
    """Where tokenised files are kept.

    Args:
        given: The user's choice. By default the user's cache directory, or the system's directory for temporary files
            where the former cannot be written.
    """
    if given is not None:
        return Path(given)
    usual = cache_directory("tokens")
    with suppress(OSError):
        usual.mkdir(parents=True, exist_ok=True)
    if os.access(usual, os.W_OK):
        return usual
    return Path(tempfile.gettempdir()) / f"megatron-mux-{os.getuid()}" / "tokens"


class TokenCacheEntry:
    """A tokenised file, opened for reading; `open_entry` shares one among the tasks of a process.

    Args:
        directory: Of the entry.

    Attributes:
        fingerprint: Of the files.
        records: How many there are.
        largest_token: The largest token; -1 without any.
        notes: See `Cut`.

    Raises:
        OSError: The entry is not there.
        ValueError: It is damaged or of another version.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        meta = json.loads((directory / _META).read_text())
        if not isinstance(meta, dict) or meta.get("format") != _FORMAT:
            raise ValueError(f"{directory}: is of another version")
        self.fingerprint: str = meta["fingerprint"]
        self.records: int = meta["records"]
        self.largest_token: int = meta["largest_token"]
        self.notes: tuple[str, ...] = tuple(meta["notes"])
        self._rows = _map(directory / _INDEX, _ROW, self.records + 1)
        self._spans = _map(directory / _SPANS, _SPAN, meta["spans"])
        self._tokens = _map(directory / _TOKENS, _TOKEN, meta["tokens"])
        self._texts = _map(directory / _COMPLETIONS, np.dtype(np.uint8), meta["texts"])
        self._usable: WeakValueDictionary[tuple[int, str], Usable] = WeakValueDictionary()

    def usable(self, max_length: int, truncation_side: str = "right") -> Usable:
        """The records that have a label left after they are cut to `max_length`; equal cuts share the arrays."""
        found = self._usable.get((max_length, truncation_side))
        if found is None:
            found = self._usable[max_length, truncation_side] = self._cut(max_length, truncation_side)
        return found

    def _cut(self, max_length: int, truncation_side: str) -> Usable:
        whole, nothing = self.lengths, np.zeros(self.records, np.int64)
        lengths = np.minimum(whole, max_length)
        before = self._labels(nothing, whole)
        if truncation_side == "left":
            # The first token that is left is no label, since nothing precedes it.
            after = self._labels(np.where(whole > max_length, whole - max_length + 1, 0), whole)
        else:
            after = self._labels(nothing, lengths)
        numbers = np.flatnonzero(after)
        cut = Cut(
            self.records,
            int((whole > max_length).sum()),
            int((before == 0).sum()),
            int(((before > 0) & (after == 0)).sum()),
            int(before.sum()),
            int((before - after).sum()),
            self.notes,
        )
        return Usable(numbers, lengths[numbers].astype(np.int32), after[numbers].astype(np.int32), cut)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """`[n]`, tokens of all records, uncut."""
        found: npt.NDArray[np.int64] = np.diff(self._rows["token"])
        return found

    def _labels(self, first: npt.NDArray[np.int64], last: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Labels of each record between a first token and the one after the last."""
        spans = self._rows["span"]
        counts = np.diff(spans)
        inside = np.clip(self._spans, np.repeat(first, counts)[:, None], np.repeat(last, counts)[:, None])
        total = np.concatenate([[0], np.cumsum(inside[:, 1] - inside[:, 0])])
        labels: npt.NDArray[np.int64] = total[spans[1:]] - total[spans[:-1]]
        return labels

    def read(
        self, number: int, max_length: int | None, truncation_side: str = "right"
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """A record's tokens and which of them are labels, cut to `max_length`; None leaves it whole."""
        row, end = self._rows[number], self._rows[number + 1]
        start = int(row["token"])
        kept = kept_part(int(end["token"]) - start, max_length, truncation_side)
        tokens = self._tokens[start + kept.start : start + kept.stop].astype(np.int64)
        labelled = np.zeros(kept.stop, np.bool_)
        for first, stop in self._spans[row["span"] : end["span"]].tolist():
            labelled[first:stop] = True
        labelled = labelled[kept]
        labelled[:1] = False
        return tokens, labelled

    def first_beyond(self, limit: int) -> tuple[int, int]:
        """The first record with a token of at least `limit`, which the entry has, and that token."""
        for start in range(0, len(self._tokens), _SEARCHED):
            found = np.flatnonzero(self._tokens[start : start + _SEARCHED] >= limit)
            if len(found):
                at = start + int(found[0])
                return int(np.searchsorted(self._rows["token"], at, side="right")) - 1, int(self._tokens[at])
        raise ValueError(f"{self.directory}: has no token of at least {limit}")

    def row(self, number: int) -> int:
        """Which row of its files a record is of; see `Row`."""
        return int(self._rows["row"][number]) >> 1

    def is_unprompted(self, number: int) -> bool:
        """Whether a record is a text that follows no prompt."""
        return bool(self._rows["row"][number] & 1)

    def completions(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """Digests of records' completions: equal for equal texts, 0 for a record without one."""
        found: npt.NDArray[np.uint64] = self._rows["completion"][numbers]
        return found

    @cached_property
    def completion_texts(self) -> dict[int, str]:
        """The texts of completions by their digests; empty if there are too many of them."""
        return {digest(text): text for text in json.loads(self._texts.tobytes())}


class TokenCacheWriter:
    """Writes an entry; use as a context manager: an entry that is not finished leaves nothing behind.

    Args:
        directory: The cache.

    Raises:
        OSError: The directory cannot be written; any method may raise it.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=directory))
        self._tokens: IO[bytes] = open(self._partial / _TOKENS, "wb")  # noqa: SIM115 (closed in `__exit__`)
        self._numbers, self._starts, self._completions = array("q"), array("q"), array("Q")
        self._texts: dict[str, None] | None = {}
        self._first_spans, self._spans = array("q"), array("i")
        self._count, self._largest = 0, -1

    def __enter__(self) -> TokenCacheWriter:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):
            self._tokens.close()
        shutil.rmtree(self._partial, ignore_errors=True)

    def add(self, records: Sequence[tuple[int, Example]]) -> None:
        """Append records: the number of each one's row, and its tokens, uncut."""
        if not records:
            return
        examples = [example for _, example in records]
        lengths = [len(example.tokens) for example in examples]
        starts = np.cumsum([0, *lengths[:-1]])
        # Runs of labels never join across records: the first token of a record is no label.
        labelled = np.concatenate([example.labelled for example in examples])
        edges = np.flatnonzero(np.diff(labelled, prepend=False, append=False)).reshape(-1, 2)
        owners = np.searchsorted(starts, edges[:, 0], side="right") - 1
        counts = np.bincount(owners, minlength=len(examples))
        self._first_spans.extend(len(self._spans) // 2 + np.cumsum(counts) - counts)
        self._spans.extend((edges - starts[owners, None]).ravel())
        self._numbers.extend(2 * row + own.unprompted for row, own in records)
        self._starts.extend(self._count + starts)
        self._completions.extend(digest(example.completion_text) for example in examples)
        self._keep_texts(example.completion_text for example in examples)
        self._count += sum(lengths)
        tokens = np.concatenate([example.tokens for example in examples])
        self._largest = max(self._largest, int(tokens.max(initial=-1)))
        self._tokens.write(tokens.astype(_TOKEN).tobytes())

    def _keep_texts(self, texts: Iterable[str | None]) -> None:
        if self._texts is not None:
            self._texts.update(dict.fromkeys(text for text in texts if text is not None))
            count, length = len(self._texts), sum(map(len, self._texts))
            if count > _MOST_COMPLETIONS or (count > MAX_DISTINCT and length > _LONGEST_COMPLETIONS):
                self._texts = None

    def finish(self, name: str, fingerprint: str, notes: Sequence[str] = ()) -> Path:
        """Put the entry in its place.

        Args:
            name: Of the entry.
            fingerprint: Of the files.
            notes: See `Cut`.

        Returns:
            The entry's directory.
        """
        self._tokens.flush()
        os.fsync(self._tokens.fileno())
        rows = np.zeros(len(self._numbers) + 1, _ROW)
        for field, values, end in (
            ("row", self._numbers, 0),
            ("token", self._starts, self._count),
            ("span", self._first_spans, len(self._spans) // 2),
            ("completion", self._completions, 0),
        ):
            rows[field][:-1], rows[field][-1] = values, end
        write(self._partial / _INDEX, rows.tobytes())
        write(self._partial / _SPANS, np.array(self._spans, _SPAN.base).tobytes())
        texts = json.dumps(list(self._texts or ())).encode()
        write(self._partial / _COMPLETIONS, texts)
        counts = {"records": len(self._numbers), "tokens": self._count, "spans": len(self._spans) // 2}
        about = {"texts": len(texts), "largest_token": self._largest, "notes": list(notes)}
        meta: dict[str, Any] = {"format": _FORMAT, "fingerprint": fingerprint, **counts, **about}
        write(self._partial / _META, json.dumps(meta).encode())
        sync_directory(self._partial)
        final = self._directory / name
        try:
            os.rename(self._partial, final)
        except OSError:
            if open_entry(final):
                return final  # another process was faster
            shutil.rmtree(final, ignore_errors=True)  # damaged
            os.rename(self._partial, final)
        sync_directory(self._directory)
        _remove_unused(self._directory)
        return final


_opened: WeakValueDictionary[tuple[str, int], TokenCacheEntry] = WeakValueDictionary()
_opening = threading.Lock()


def open_entry(directory: Path) -> TokenCacheEntry | None:
    """The entry in a directory, mapped once for all tasks of this process; None if there is no whole one."""
    try:
        with _opening:
            key = str(directory), os.stat(directory / _TOKENS).st_ino
            entry = _opened.get(key)
            if entry is None:
                entry = _opened[key] = TokenCacheEntry(directory)
    except (OSError, ValueError, KeyError):
        return None
    with suppress(OSError):  # another user's, perhaps: it only tells that the entry is in use
        os.utime(directory / _META)
    return entry


@contextmanager
def locked(lock: Path) -> Iterator[None]:
    """Keep other processes of this host from doing the same; where files cannot be locked, they may."""
    handle = None
    with suppress(OSError):
        lock.parent.mkdir(parents=True, exist_ok=True)
        handle = open(lock, "w")  # noqa: SIM115 (closed below)
        fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if handle is not None:
            # Whoever waits for it holds the file itself, and finds the result in the cache.
            with suppress(OSError):
                lock.unlink(missing_ok=True)
            handle.close()


def _remove_unused(directory: Path) -> None:
    """Remove entries that nobody has opened for long, and what killed processes left."""
    now = time.time()
    with suppress(OSError):  # there is none before a first file is remembered
        for known in (directory / DIGESTS).iterdir():
            if now - known.stat().st_mtime > _UNUSED_SECONDS:
                known.unlink()
    for entry in directory.iterdir():
        partial = entry.name.startswith(".partial-")
        with suppress(OSError):
            age = now - (entry if partial else entry / _META).stat().st_mtime
            if age > (_ABANDONED_SECONDS if partial else _UNUSED_SECONDS):
                shutil.rmtree(entry, ignore_errors=True)


def _map(path: Path, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    """An array of a file, mapped into memory; unlike `numpy.memmap`, torch keeps no descriptor for that."""
    import torch

    size = count * dtype.itemsize
    if path.stat().st_size != size:
        raise ValueError(f"{path}: is damaged: its size is not what the entry says")
    if not size:  # an empty file cannot be mapped
        return np.zeros(count, dtype)
    mapped = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8).numpy()
    mapped.flags.writeable = False
    found: npt.NDArray[Any] = mapped.view(dtype.base).reshape(count, *dtype.shape)
    return found


def digest(text: str | None) -> int:
    """What an entry keeps of a completion's text: equal for equal texts, 0 for None alone."""
    if text is None:
        return 0
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") or 1
