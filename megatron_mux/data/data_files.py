"""The data files of a run: one tokenizer, one cache, and what other processes have tokenised already."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_mux.data.dataset import TaskDataset
from megatron_mux.data.tokenised_file import TokenisedFile, progress_lines
from megatron_mux.errors import UserError


@dataclass(frozen=True)
class DataFiles:
    """Opens the data files of tasks.

    Attributes:
        tokenizer: The backbone's.
        say: Shows a line for people: how far tokenising a long file is.
        cache: See `token_cache_directory`.
        tokenised: What is known of files already: their tokens, or what is wrong with them.
    """

    tokenizer: Any
    say: Callable[[str], None]
    cache: Path | None = None
    tokenised: Mapping[str, TokenisedFile | UserError] = field(default_factory=dict)

    def open(self, path: str | os.PathLike[str], max_length: int) -> TaskDataset:
        """Open a file, tokenising it if need be.

        Raises:
            UserError: See `TaskDataset`.
        """
        known = self.tokenised.get(str(path))
        if isinstance(known, UserError):
            raise known
        progress = progress_lines(Path(path), self.say)
        return TaskDataset(path, self.tokenizer, max_length, progress, known, self.cache)
