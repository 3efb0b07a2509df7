"""From rows of data files to sequences: one for each record, or those of a preference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from megatron_mux.data.bad_record import BadRecordError
from megatron_mux.data.preference import PreferenceTokeniser, parse_preference
from megatron_mux.data.records import Record, record_of
from megatron_mux.data.sources.selection import Selection
from megatron_mux.data.sources.source import Row
from megatron_mux.data.tokenise import Example, Tokeniser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Found = Iterable[tuple[Row, Example | BadRecordError]]
"""The uncut sequences of rows in order, each with its row, or what is wrong with the row."""


class SupervisedReader:
    """Makes a sequence of each record.

    Attributes:
        rows, nbytes: How many rows, or of how many bytes, are read together.
        chat_template: Renders conversations.
    """

    rows, nbytes = 256, 1 << 22

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokeniser = Tokeniser(tokenizer, None)
        self.chat_template = self._tokeniser.chat_template

    def sequences(self, selection: Selection, rows: Sequence[Row], only_parse: bool) -> Found:
        """The sequences of rows.

        Args:
            selection: What the rows are of.
            rows: Up to `self.rows` of them.
            only_parse: Tell of rows that hold no record, and make no sequences.
        """
        records: list[Record | BadRecordError] = []
        for row in rows:
            try:
                records.append(selection.read(row.value, record_of))
            except BadRecordError as error:
                records.append(error)
        if only_parse:
            bad = zip(rows, records, strict=True)
            return [(row, error) for row, error in bad if isinstance(error, BadRecordError)]
        return zip(rows, self._tokeniser.encode_many(records), strict=True)


class PreferenceReader:
    """Makes a sequence of each completion; see `SupervisedReader`.

    For KTO first the desirable ones of all rows that are read together, then the undesirable ones of pairs, as TRL
    orders them.
    """

    rows, nbytes = 1000, 1 << 62  # TRL's number, whatever their size

    def __init__(self, tokenizer: PreTrainedTokenizerBase, loss: str) -> None:
        self._loss = loss
        self._tokeniser = PreferenceTokeniser(tokenizer, loss)
        self.chat_template = self._tokeniser.chat_template

    def sequences(self, selection: Selection, rows: Sequence[Row], only_parse: bool) -> Found:
        """See `SupervisedReader.sequences`."""
        firsts, seconds = list[tuple[Row, Example]](), list[tuple[Row, Example]]()
        for row in rows:
            try:
                record = selection.read(row.value, lambda value: parse_preference(value, self._loss))
                if only_parse:
                    continue
                own = record.unpaired() if self._loss == "kto" else [record]
                made = [[(row, example) for example in self._tokeniser.encode(each)] for each in own]
            except BadRecordError as error:
                yield row, error
                continue
            firsts += made[0]
            seconds += made[1] if len(made) > 1 else []
        yield from firsts + seconds


RowReader = SupervisedReader | PreferenceReader


def reader_of(tokenizer: PreTrainedTokenizerBase, loss: str) -> RowReader:
    """The reader for tasks of a loss."""
    return SupervisedReader(tokenizer) if loss == "sft" else PreferenceReader(tokenizer, loss)
