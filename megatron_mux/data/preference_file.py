"""The sequences of a preference file, by number: a record's own are neighbours. Tokens come from the token cache."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_mux.data.cut import Cut
from megatron_mux.data.preference import DESIRABLE
from megatron_mux.data.section import DataSource
from megatron_mux.data.token_cache import digest
from megatron_mux.data.tokenise import Example
from megatron_mux.data.tokenised_file import (
    TokenisedFile,
    as_source,
    check_tokens,
    opened_entry,
    tokenise_file,
)
from megatron_mux.errors import UserError


class PreferenceDataset:
    """The sequences of a preference file that the engine takes for a `TaskDataset`.

    A pair's chosen and rejected sequence have the numbers `2 i` and `2 i + 1`.

    Args:
        source: Files, or the path of one.
        tokenizer: The backbone's.
        max_length: Tokens a sequence is cut to.
        loss: dpo, orpo or kto.
        cache: See `token_cache_directory`.
        tokenised: What another process of this host made of the source; by default it is tokenised here.

    Attributes:
        lengths: `[n]` int32, tokens of each sequence.
        label_counts: `[n]` int32, tokens of each that are learned; for ORPO a chosen sequence's prompt counts.
        completion_counts: `[n]` int32, tokens of each completion.
        starts: `[n]` int32, where each completion begins.
        desirable: `[n]` bool; True for the chosen sequences of pairs.
        cut: What was lost by the cut: tokens of completions.
        dropped: Records left out since a completion begins beyond `max_length`.

    Raises:
        UserError: The file cannot be read, has bad lines, or no record fits.
    """

    distinct_completions = None

    def __init__(
        self,
        source: str | os.PathLike[str] | DataSource,
        tokenizer: Any,
        max_length: int,
        loss: str,
        cache: str | Path | None = None,
        tokenised: TokenisedFile | None = None,
    ) -> None:
        given = as_source(source)
        self.path, self._source, self._tokenizer = given.label, given, tokenizer
        self.max_length = max_length
        self.loss = loss
        self.together = 1 if loss == "kto" else 2
        self.end_of_sequence = int(tokenizer.eos_token_id)
        tokenised = tokenised or tokenise_file(given, tokenizer, cache, loss=loss)
        self._entry = opened_entry(tokenised, self.path)
        usable = self._entry.usable(max_length)
        fits = np.zeros(self._entry.records, np.bool_)
        fits[usable.numbers] = True
        whole = fits.reshape(-1, self.together).all(axis=1)
        self._numbers = np.flatnonzero(np.repeat(whole, self.together))
        self.dropped = int((~whole).sum())
        if not len(self._numbers):
            raise UserError(
                f"{self.path}: none of its {self.dropped} records has a completion that begins within "
                f"data.max_length {max_length}: raise it"
            )
        chosen = np.searchsorted(usable.numbers, self._numbers)
        self.lengths, self.completion_counts = usable.lengths[chosen], usable.label_counts[chosen]
        self.starts = self.lengths - self.completion_counts
        self.label_counts = self.completion_counts.copy()
        longest = self._entry.lengths.reshape(-1, self.together).max(axis=1)
        labels, lost = usable.cut.labels, usable.cut.labels - int(self.completion_counts.sum())
        longer = int((longest > max_length).sum())
        self.cut = Cut(len(longest), longer, 0, self.dropped, labels, lost, self._entry.notes)
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
        head, labelled = self._entry.read(int(self._numbers[prompt]), None)
        tail, wanted = self._entry.read(int(self._numbers[completion]), None)
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
        return np.equal(self._entry.completions(self._numbers), np.uint64(digest(DESIRABLE)))

    def check_tokens(self, rows: int) -> None:
        """Refuse tokens that an embedding of `rows` rows lacks; see the function of that name."""
        check_tokens(self._entry, self._source, self._tokenizer, rows)

    @property
    def fingerprint(self) -> str:
        """Identifies the file's content."""
        return self._entry.fingerprint

    def close(self) -> None:
        """Nothing is kept open."""
