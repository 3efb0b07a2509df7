"""The sequences of a preference file, by number: a record's own are neighbours. Tokens come from the token cache."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_mux.data.preference import DESIRABLE, PreferenceRecord, PreferenceTokeniser, parse_preference
from megatron_mux.data.records import BadRecordError
from megatron_mux.data.token_cache import TokenCacheEntry, TokenCacheWriter, token_cache_directory
from megatron_mux.data.tokenise import Example
from megatron_mux.data.tokenizer import tokenizer_fingerprint
from megatron_mux.errors import UserError

_BATCH = 1000
"""Lines that are unpaired together: the desirable records of all, then the undesirable ones, as in TRL."""
_SHOWN = 20
_UNCUT = 1 << 62


class PreferenceDataset:
    """The sequences of a preference file that the engine takes for a `TaskDataset`.

    A pair's chosen and rejected sequence have the numbers `2 i` and `2 i + 1`.

    Args:
        path: JSON Lines file.
        tokenizer: The backbone's.
        max_length: Tokens a sequence is cut to.
        loss: dpo, orpo or kto.
        cache: See `token_cache_directory`.

    Attributes:
        lengths: `[n]` int32, tokens of each sequence.
        label_counts: `[n]` int32, tokens of each that are learned; for ORPO a chosen sequence's prompt counts.
        completion_counts: `[n]` int32, tokens of each completion.
        starts: `[n]` int32, where each completion begins.
        desirable: `[n]` bool; True for the chosen sequences of pairs.
        dropped: Records left out since a completion begins beyond `max_length`.

    Raises:
        UserError: The file cannot be read, has bad lines, or no record fits.
    """

    distinct_completions = None

    def __init__(
        self,
        path: str | os.PathLike[str],
        tokenizer: Any,
        max_length: int,
        loss: str,
        cache: Path | None = None,
    ) -> None:
        self.path = Path(path)
        self.max_length = max_length
        self.loss = loss
        self.together = 1 if loss == "kto" else 2
        self.end_of_sequence = int(tokenizer.eos_token_id)
        self._entry = _entry(self.path, tokenizer, loss, token_cache_directory(cache))
        numbers, lengths, counts = self._entry.usable(max_length)
        fits = np.zeros(self._entry.records, np.bool_)
        fits[numbers] = True
        whole = fits.reshape(-1, self.together).all(axis=1)
        self._numbers = np.flatnonzero(np.repeat(whole, self.together))
        self.dropped = int((~whole).sum())
        if not len(self._numbers):
            raise UserError(
                f"{self.path}: none of its {self.dropped} records has a completion that begins within "
                f"data.max_length {max_length}: raise it"
            )
        chosen = np.searchsorted(numbers, self._numbers)
        self.lengths, self.completion_counts = lengths[chosen], counts[chosen]
        self.starts = self.lengths - self.completion_counts
        self.label_counts = self.completion_counts.copy()
        if loss == "orpo":
            self.label_counts[0::2] = self.lengths[0::2] - 1

    def __len__(self) -> int:
        """Sequences."""
        return len(self._numbers)

    def __getitem__(self, number: int) -> Example:
        """A sequence, and which of its tokens are learned."""
        example = self.completion(number)
        if self.loss == "orpo" and number % 2 == 0:
            example.labelled[1:] = True
        return example

    def completion(self, number: int) -> Example:
        """A sequence with its completion alone labelled."""
        return Example(*self._entry.read(int(self._numbers[number]), self.max_length), None)

    def mismatched(self, prompt: int, completion: int) -> Example:
        """One sequence's prompt with another's completion (KTO's KL term), cut to `max_length`."""
        head, labelled = self._entry.read(int(self._numbers[prompt]), _UNCUT)
        tail, wanted = self._entry.read(int(self._numbers[completion]), _UNCUT)
        tokens = np.concatenate([head[~labelled], tail[wanted]])[: self.max_length]
        return Example(tokens, np.arange(len(tokens)) >= np.count_nonzero(~labelled), None)

    def candidates(self, number: int) -> tuple[list[Example], int]:
        """A sequence alone: there is nothing to classify."""
        return [self[number]], 0

    @cached_property
    def desirable(self) -> npt.NDArray[np.bool_]:
        """`[n]`, see the class."""
        if self.together == 2:
            return np.equal(np.arange(len(self)) % 2, 0)
        return np.equal(self._entry.completions(self._numbers), _DESIRABLE)

    @property
    def fingerprint(self) -> str:
        """Identifies the file's content."""
        return self._entry.fingerprint

    def close(self) -> None:
        """Nothing is kept open."""


_DESIRABLE = np.uint64(
    int.from_bytes(hashlib.blake2b(DESIRABLE.encode(), digest_size=8).digest(), "little") or 1
)
"""The token cache's digest of a desirable record."""


def _entry(path: Path, tokenizer: Any, loss: str, directory: Path) -> TokenCacheEntry:
    """The tokens of a file, from the cache or made now."""
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    digest = hashlib.sha256(content).hexdigest()
    kind = loss if loss == "orpo" else "kto" if loss == "kto" else "pairs"
    name = f"{digest[:32]}-{tokenizer_fingerprint(tokenizer)[:16]}-{kind}"
    try:
        return TokenCacheEntry(directory / name)
    except (OSError, ValueError, KeyError):
        pass
    try:
        return TokenCacheEntry(
            _write(path, content, PreferenceTokeniser(tokenizer, loss), loss, directory, name, digest)
        )
    except OSError as error:
        raise UserError(
            f"{directory}: the tokens of {path} cannot be kept there: {error.strerror or error}: make room, or choose "
            "another directory with --mux-data-cache"
        ) from error


def _write(
    path: Path,
    content: bytes,
    tokeniser: PreferenceTokeniser,
    loss: str,
    directory: Path,
    name: str,
    digest: str,
) -> Path:
    problems: list[str] = []
    count = 0
    lines = content.splitlines(keepends=True)
    with TokenCacheWriter(directory) as writer:
        for first in range(0, len(lines), _BATCH):
            records = list(_records(path, lines[first : first + _BATCH], first + 1, loss, problems))
            for line, record in _unpaired(records) if loss == "kto" else records:
                count += 1
                try:
                    writer.add([(line, example) for example in tokeniser.encode(record)])
                except BadRecordError as error:
                    problems.append(f"{path}: line {line}: {error}")
                except UserError as error:
                    raise UserError(*(f"{path}: {text}" for text in error.problems)) from error
        if problems:
            more = f"{path}: {len(problems)} bad lines in all, of which the first are named above"
            raise UserError(*problems[:_SHOWN], *([more] if len(problems) > _SHOWN else []))
        if not count:
            raise UserError(f"{path}: is empty: it must hold at least one record")
        return writer.finish(name, digest, len(content))


def _records(
    path: Path, lines: Sequence[bytes], number: int, loss: str, problems: list[str]
) -> Iterator[tuple[int, PreferenceRecord]]:
    """The records of some lines with the number of each; problems are added to the list."""
    for line, text in enumerate(lines, number):
        if not (text := text.removeprefix(b"\xef\xbb\xbf")).strip():
            continue
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            problems.append(f"{path}: line {line}: not valid JSON: {error}")
            continue
        if not isinstance(value, dict):
            problems.append(f"{path}: line {line}: must hold a JSON object")
            continue
        try:
            yield line, parse_preference(value, loss)
        except BadRecordError as error:
            problems.append(f"{path}: line {line}: {error}")


def _unpaired(records: Sequence[tuple[int, PreferenceRecord]]) -> list[tuple[int, PreferenceRecord]]:
    """Records with one completion each: the desirable halves of pairs, then the others."""
    halves = [[(line, half) for half in record.unpaired()] for line, record in records]
    first = [own[0] for own in halves]
    return first + [own[1] for own in halves if len(own) > 1]
