"""Conversations as a tokenizer's chat template renders them, and where in the text the assistant's turns are.

Three ways, in this order:

- the template marks them (`{% generation %}`): its marks are taken as they are;
- the rendering of a conversation's beginning is a beginning of the whole rendering: a turn is what it adds;
- the template renders a turn differently once more follows (it drops earlier thinking, say): a turn begins where the
  rendering changes when its content does, and lasts to its end-of-turn token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_mux.data.records import BadRecordError, Messages
from megatron_mux.errors import UserError

_MARK = re.compile(r"\{%[-+]?\s*generation\b")
# Nothing that people write begins or ends so.
_STAND_IN = "\u2e28stand-in\u2e29"


def common_beginning(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many tokens, or characters, two sequences begin with alike."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@dataclass(frozen=True)
class Chat:
    """A rendered conversation.

    Attributes:
        text: All of it.
        spans: Characters to learn, as pairs of first and last + 1.
        append_end: Whether the last turn still has to be closed by end-of-sequence.
        prompt: The rendered prompt of a conversation's completion: what differs from it is learned, instead of spans.
    """

    text: str
    spans: tuple[tuple[int, int], ...] = ()
    append_end: bool = False
    prompt: str | None = None


@dataclass
class ChatTemplate:
    """Renders conversations.

    Attributes:
        tokenizer: A Hugging Face tokenizer.
    """

    tokenizer: Any

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """Texts of the tokenizer's special tokens."""
        found = {str(token) for token in self.tokenizer.all_special_tokens}
        found |= {str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        return tuple(sorted(found - {""}))

    def render(self, record: Messages) -> Chat:
        """Render a conversation.

        Raises:
            BadRecordError: The template does not take it, or a turn cannot be found.
            UserError: The tokenizer has no template.
        """
        if record.prompt:
            prompt = self.apply(record, record.messages[: record.prompt], add_generation_prompt=True)
            return Chat(self.apply(record, record.messages), prompt=prompt)
        messages = record.messages
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if turns and turns[0] == 0:
            raise BadRecordError(
                "a conversation must not begin with the assistant: nothing asks for that turn"
            )
        if self._is_marked:
            return self._marked(record)
        text = self.apply(record, messages)
        spans: list[tuple[int, int]] = []
        append_end = False
        for i in turns:
            before = self.apply(record, messages[:i], add_generation_prompt=True)
            after = text if i == len(messages) - 1 else self.apply(record, messages[: i + 1])
            if text.startswith(after) and after.startswith(before):
                turn = after[len(before) :]
                closed = turn.rstrip()
                ends_special = closed.endswith(self.special_texts)
                # White space after the end of turn belongs to the frame: nothing generates it.
                spans.append((len(before), len(before) + len(closed if ends_special else turn)))
                content = str(messages[i].get("content", "")).strip()
                append_end = not ends_special and (closed.endswith(content) if content else not closed)
            else:
                spans.append(self._by_change(record, i, text))
                append_end = False
        return Chat(text, tuple(spans), append_end and turns[-1] == len(messages) - 1)

    @property
    def _is_marked(self) -> bool:
        return _MARK.search(str(self.tokenizer.chat_template)) is not None

    def _marked(self, record: Messages) -> Chat:
        """Take the spans from the template's own marks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered: Any = render_jinja_template(
                conversations=[record.messages],
                tools=record.tools,
                chat_template=self.tokenizer.get_chat_template(None, record.tools),
                return_assistant_tokens_mask=True,
                **{**self.tokenizer.special_tokens_map, **record.template_kwargs},
            )
        except Exception as error:  # a template is a program: it may fail in any way
            raise _refused(error) from error
        (text,), (spans,) = rendered
        return Chat(text, tuple((start, stop) for start, stop in spans))

    def _by_change(self, record: Messages, number: int, text: str) -> tuple[int, int]:
        """Find a turn in the whole rendering by what changes with its content."""
        messages = record.messages
        changed = [*messages]
        changed[number] = {**messages[number], "content": _STAND_IN}
        other = self.apply(record, changed)
        start = common_beginning(text, other)
        stop = len(text) - common_beginning(text[start:][::-1], other[start:][::-1])
        end = self._end_of_turn
        at = text.find(end, stop) if end else -1
        if at >= 0:
            return start, at + len(end)
        if _STAND_IN not in other or messages[number].get("tool_calls"):
            raise BadRecordError(
                f"the assistant's turn (message {number + 1}) cannot be found in what the tokenizer's chat template "
                "makes of this conversation: use a template that marks it ({% generation %}), or one turn a record"
            )
        return start, stop

    @cached_property
    def _end_of_turn(self) -> str:
        """The special token that closes a turn; empty if none does."""
        ask, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": _STAND_IN}
        try:
            text = self.apply(Messages([]), [ask, answer])
        except BadRecordError:
            return ""
        rest = text[text.rfind(_STAND_IN) + len(_STAND_IN) :].strip() if _STAND_IN in text else ""
        return max(
            (special for special in self.special_texts if rest.startswith(special)), key=len, default=""
        )

    def apply(
        self, record: Messages, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = False
    ) -> str:
        """Render messages.

        Args:
            record: Has the tools and variables.
            messages: Rendered in place of those of the record.
            add_generation_prompt: Whether to add what an answer begins with.

        Raises:
            BadRecordError: The template does not take them.
            UserError: The tokenizer has no template.
        """
        if not self.tokenizer.chat_template:
            raise UserError(
                "messages need a chat template, and the backbone's tokenizer has none: add chat_template.jinja to "
                "the backbone's directory, or write the records as texts"
            )
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tools=record.tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **record.template_kwargs,
            )
        except Exception as error:  # a template is a program: it may fail in any way
            raise _refused(error) from error
        return str(text)


def _refused(error: Exception) -> BadRecordError:
    return BadRecordError(
        f"the chat template does not take this conversation: {' '.join(str(error).split())}"
    )
