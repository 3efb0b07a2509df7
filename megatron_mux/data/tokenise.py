"""From records to tokens, and which of the tokens are learned."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatron_mux.data.bad_record import BadRecordError
from megatron_mux.data.chat import Chat, ChatTemplate, common_beginning
from megatron_mux.data.messages import Messages
from megatron_mux.data.records import PromptCompletion, Record
from megatron_mux.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_one_at_a_time = threading.Lock()
"""Held while a tokenizer works: all data sets share one, which must not be called by two threads at once."""


def kept_part(length: int, max_length: int | None, truncation_side: str) -> slice:
    """The part of a sequence of `length` tokens that is left after it is cut to `max_length`."""
    if max_length is None or length <= max_length:
        return slice(0, length)
    return slice(0, max_length) if truncation_side == "right" else slice(length - max_length, length)


@dataclass(frozen=True, eq=False)
class Example:
    """A record as the backbone sees it.

    Attributes:
        tokens: `[L]` int64, at most `max_length` of them.
        labelled: `[L]` bool, the tokens to predict; the first never is, since nothing precedes it.
        completion_text: The completion of a prompt/completion or instruction record, else None.
        unprompted: Whether it is a text that follows no prompt, or an empty one.
    """

    tokens: npt.NDArray[np.int64]
    labelled: npt.NDArray[np.bool_]
    completion_text: str | None
    unprompted: bool = False


class Tokeniser:
    """Turns records into examples for one tokenizer and one maximum length.

    - Prompt and completion are tokenised separately, the completion without special tokens, and joined; end-of-sequence
      is appended, unless it is there, and learned with the completion.
    - Text is tokenised, end-of-sequence appended, unless it is there; every token is learned.
    - Messages go through the tokenizer's chat template; the assistant's turns are learned, their end-of-turn included.
      Of prompt and completion as messages all is learned that the completion adds to the rendered prompt.
    - Longer sequences are cut to `max_length`.

    Args:
        tokenizer: A Hugging Face tokenizer with an end-of-sequence token.
        max_length: Tokens a sequence is cut to; None leaves sequences whole.
        truncation_side: Where they are cut, "right" or "left".

    Attributes:
        chat_template: Renders conversations.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, max_length: int | None, truncation_side: str = "right"
    ) -> None:
        self.tokenizer: Any = tokenizer
        self.max_length = max_length
        self.truncation_side = truncation_side
        self.end_of_sequence = int(self.tokenizer.eos_token_id)
        self._leading, self._trailing = self._added_specials()
        self.chat_template = ChatTemplate(tokenizer)

    def encode(self, record: Record) -> Example:
        """One record's example; see the class.

        Raises:
            BadRecordError: The chat template does not take the conversation.
            UserError: The tokenizer cannot do messages at all.
        """
        example = self.encode_many([record])[0]
        if isinstance(example, BadRecordError):
            raise example
        return example

    def encode_many(self, records: Sequence[Record | BadRecordError]) -> list[Example | BadRecordError]:
        """The examples of several records, tokenised together for speed; the results are the same as one by one.

        What is wrong with a record stands in its place, and may stand there before.
        """
        parts: list[PromptCompletion | Chat | BadRecordError] = []
        for record in records:
            try:
                parts.append(self.chat_template.render(record) if isinstance(record, Messages) else record)
            except BadRecordError as error:
                parts.append(error)
        pairs = [part for part in parts if isinstance(part, PromptCompletion)]
        heads = iter(self.with_specials([p.completion if p.prompt is None else p.prompt for p in pairs]))
        tails = iter(self.plain([p.completion for p in pairs if p.prompt is not None]))
        chats = [part for part in parts if isinstance(part, Chat)]
        turns = iter(self._with_offsets([chat.text for chat in chats if chat.prompt is None]))
        rendered = [text for chat in chats if chat.prompt is not None for text in (chat.prompt, chat.text)]
        completions = iter(self.plain(rendered))
        examples: list[Example | BadRecordError] = []
        for part in parts:
            if isinstance(part, BadRecordError):
                examples.append(part)
            elif isinstance(part, Chat) and part.prompt is not None:
                same = common_beginning(next(completions), whole := next(completions))
                examples.append(self._example(whole, [i >= same for i in range(len(whole))], None))
            elif isinstance(part, Chat):
                examples.append(self._chat_example(part, *next(turns)))
            elif part.prompt is None:
                ids = self.closed(next(heads))
                examples.append(self._example(ids, [True] * len(ids), None, unprompted=True))
            else:
                examples.append(self.joined(next(heads), self.closed(next(tails)), part))
        return examples

    def joined(self, head: Sequence[int], tail: Sequence[int], record: PromptCompletion) -> Example:
        """The example of a record's prompt and completion, from the tokens of each."""
        mask = [False] * len(head) + [True] * len(tail)
        return self._example([*head, *tail], mask, record.completion, not record.prompt)

    def _example(
        self, tokens: Sequence[int], labelled: Sequence[bool], text: str | None, unprompted: bool = False
    ) -> Example:
        kept = kept_part(len(tokens), self.max_length, self.truncation_side)
        ids, mask = np.array(tokens[kept], np.int64), np.array(labelled[kept], np.bool_)
        mask[:1] = False
        return Example(ids, mask, text, unprompted)

    # -- texts

    def with_specials(self, texts: list[str]) -> list[list[int]]:
        """Tokens with the special ones that begin a sequence, once, without those that would end it."""
        if not texts:
            return []
        ids: list[list[int]] = self.call(texts)["input_ids"]
        begin, end = self._leading, self._trailing
        # A text may have them itself.
        twice = (begin > 0 and i[:begin] == i[begin : 2 * begin] for i in ids)
        return [i[begin * has : len(i) - end] for i, has in zip(ids, twice, strict=True)]

    def closed(self, ids: list[int]) -> list[int]:
        """A sequence with end-of-sequence, which it may have already."""
        return ids if ids[-1:] == [self.end_of_sequence] else [*ids, self.end_of_sequence]

    def plain(self, texts: list[str]) -> list[list[int]]:
        """Tokens without special ones but those in the texts."""
        if not texts:
            return []
        ids: list[list[int]] = self.call(texts, add_special_tokens=False)["input_ids"]
        return ids

    def call(self, texts: list[str], **options: bool) -> Any:
        """Call the tokenizer, which no other thread does meanwhile."""
        with _one_at_a_time:
            return self.tokenizer(texts, verbose=False, **options)

    def _added_specials(self) -> tuple[int, int]:
        """How many special tokens the tokenizer puts before and behind a text by itself."""
        bare, full = self.plain(["a"])[0], self.call(["a"])["input_ids"][0]
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return start, len(full) - start - len(bare)
        return 0, 0

    # -- messages

    def _with_offsets(self, texts: list[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        if not texts:
            return []
        if not self.tokenizer.is_fast:
            raise UserError(
                "messages need a fast tokenizer (tokenizer.json), which tells the place of each token"
            )
        found = self.call(texts, add_special_tokens=False, return_offsets_mapping=True)
        return list(zip(found["input_ids"], found["offset_mapping"], strict=True))

    def _chat_example(self, chat: Chat, ids: list[int], offsets: list[tuple[int, int]]) -> Example:
        places = np.array(offsets, np.int64).reshape(-1, 2)
        mask = np.zeros(len(ids), np.bool_)
        for start, stop in chat.spans:
            # A token that a turn shares with the frame before it is learned, as the turn's first.
            mask |= (places[:, 1] > start) & (places[:, 0] < stop)
        labelled = mask.tolist()
        if chat.append_end:
            ids, labelled = [*ids, self.end_of_sequence], [*labelled, True]
        return self._example(ids, labelled, None)
