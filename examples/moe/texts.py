"""Kinds of text in the quickstart's data: each kind gets an expert of its own to start with."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Record = dict[str, Any]

HELD_OUT = 16
"""One record of so many is held out."""

_NOVELS = {
    "emma": r"Emma|Harriet|Knightley|Weston|Elton|Woodhouse|Churchill|Bates|Fairfax",
    "mansfield-park": r"Fanny|Crawford|Edmund|Bertram|Norris|Rushworth|Mansfield",
    "pride-and-prejudice": r"Elizabeth|Darcy|Bingley|Bennet|Jane|Collins|Wickham",
    "sense-and-sensibility": r"Elinor|Marianne|Dashwood|Willoughby|Brandon|Middleton|Jennings|Lucy",
    "northanger-abbey": r"Catherine|Tilney|Thorpe|Morland|Allen|Isabella",
}
"""Persons and places by which a passage's novel is recognised."""


@dataclass(frozen=True)
class Kind:
    """One kind of text.

    Attributes:
        name: Its name.
        train: [tokens] int64, records end to end, each ended by the end-of-sequence token.
        held_out: The same of records that nothing trains on.
    """

    name: str
    train: Tensor
    held_out: Tensor

    def batch(self, rows: int, length: int, generator: torch.Generator) -> Tensor:
        """[rows, length] int64 slices of the training text from random places."""
        last = max(1, len(self.train) - length)
        starts = torch.randint(last, (rows,), generator=generator)
        return torch.stack([self.train[start : start + length] for start in starts.tolist()])


def read_kinds(data: Path, tokenizer: Any, length: int) -> list[Kind]:
    """Read the quickstart's files and divide them into kinds, those with most text first.

    Args:
        data: Folder that examples/quickstart/prepare.py fills.
        tokenizer: Of the backbone.
        length: Tokens that a kind needs at least.

    Raises:
        OSError: A file is missing.
    """
    texts: dict[str, list[str]] = {}
    for name in ("movie", "dialogue", "glosses", "austen"):
        with (data / f"{name}.jsonl").open(encoding="utf-8") as lines:
            for line in lines:
                for kind, text in _kinds_of(name, json.loads(line)):
                    texts.setdefault(kind, []).append(text)
    kinds = [_tokenised(name, records, tokenizer) for name, records in texts.items()]
    kinds = [kind for kind in kinds if min(len(kind.train), len(kind.held_out)) > length]
    return sorted(kinds, key=lambda kind: -len(kind.train))


def _kinds_of(name: str, record: Record) -> Iterator[tuple[str, str]]:
    """Kind and text of a record."""
    if name == "movie":
        yield f"movie-{record['completion'].strip()}", record["prompt"] + record["completion"]
    elif name == "dialogue":
        yield name, "\n".join(f"{turn['role']}: {turn['content']}" for turn in record["messages"])
    elif name == "glosses":
        what = re.sub(r"^Define the (\w+)\.$", r"\1", record["instruction"])
        kind = f"glosses-{what}" if what != record["instruction"] else name
        yield kind, f"{record['instruction']}\n{record['input']}\n{record['output']}"
    else:
        text = record["text"]
        found = {novel: len(re.findall(rf"\b(?:{names})\b", text)) for novel, names in _NOVELS.items()}
        best = max(found, key=lambda novel: found[novel])
        yield (best if found[best] else "prose"), text


def _tokenised(name: str, records: list[str], tokenizer: Any) -> Kind:
    end = [int(tokenizer.eos_token_id)]
    held_out = records[::HELD_OUT]
    train = [text for i, text in enumerate(records) if i % HELD_OUT]
    made = [
        torch.tensor([token for ids in tokenizer(part).input_ids for token in [*ids, *end]])
        for part in (train or held_out, held_out)
    ]
    return Kind(name, *made)
