"""Conversations as a tokenizer's chat template renders them, and where in the text the assistant's turns are.

Three ways, in this order:

- the chat template marks them (`{% generation %}`): its marks are taken as they are;
- the rendering of a conversation's beginning is a beginning of the whole rendering: a turn is what it adds;
- the chat template renders a turn differently once more follows (it drops earlier thinking, say): a turn is what
  changes in the whole rendering when its content does, and the end-of-turn token behind.

What is found without marks is checked in every conversation: no learned part changes when the content of another
message does.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from megatron_mux.data.bad_record import UnusableRecordError
from megatron_mux.data.messages import Messages, with_objects
from megatron_mux.errors import UserError

_MARK = re.compile(r"\{%[-+]?\s*generation\b")
# Nothing that people write begins or ends so.
_STAND_IN = "\u2e28stand-in\u2e29"
_ADVICE = "use a template that marks the assistant's turns ({% generation %}), or one turn a record"

_LEAKING = (
    "the tokenizer's chat template puts something of other messages into what would be learned of the assistant's: "
    + _ADVICE
)


def common_beginning(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many tokens, or characters, two sequences begin with alike."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


_TRIES = 16
"""Records that have a key and render alike without it, before the chat template is taken not to use it."""


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
    _used: set[str] = field(default_factory=set, init=False)
    _unused: Counter[str] = field(default_factory=Counter, init=False)

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """Texts of the tokenizer's special tokens."""
        found = {str(token) for token in self.tokenizer.all_special_tokens}
        found |= {str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        return tuple(sorted(found - {""}))

    @property
    def notes(self) -> list[str]:
        """Lines for people about what records hold and the chat template does not render."""
        unused = [key for key in self._unused if key not in self._used]
        return [f"not used by the chat template, and left out: {', '.join(unused)}"] if unused else []

    def render(self, record: Messages) -> Chat:
        """Render a conversation.

        Raises:
            UnusableRecordError: The chat template does not take it, or a turn cannot be found.
            UserError: The tokenizer has no chat template.
        """
        if self._encodes_arguments:
            record = replace(record, messages=with_objects(record.messages))
        self._note_unused(record)
        if record.prompt:
            prompt = self.apply(record, record.messages[: record.prompt], add_generation_prompt=True)
            chat = Chat(self.apply(record, record.messages), prompt=prompt)
            self._check_completion(record, chat)
            return chat
        turns = [i for i, message in enumerate(record.messages) if message["role"] == "assistant"]
        if self._is_marked:
            chat = self._marked(record)
        else:
            chat = self._searched(record, turns)
            self._check_turns(record, turns, chat)
        if not record.unlearned:
            return chat
        if len(chat.spans) != len(turns):
            raise UnusableRecordError(
                "asks not to learn a message, and the chat template does not mark one part for each of the assistant's"
            )
        learned = [i not in record.unlearned for i in turns]
        spans = tuple(span for span, wanted in zip(chat.spans, learned, strict=True) if wanted)
        return replace(chat, spans=spans, append_end=chat.append_end and learned[-1])

    @cached_property
    def _encodes_arguments(self) -> bool:
        """Whether the chat template encodes arguments of calls, or takes them apart; else it prints JSON as it is."""
        values = {"a": _STAND_IN}
        as_object, as_text = (self._with_call(arguments) for arguments in (values, json.dumps(values)))
        return as_text is None or (as_object is not None and str(values) not in as_object)

    def _with_call(self, arguments: Any) -> str | None:
        """A conversation with a call of these arguments; None if the chat template does not take them."""
        call = {"type": "function", "id": "aaaaaaaaa", "function": {"name": "f", "arguments": arguments}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            return self.apply(Messages([]), [{"role": "user", "content": "a"}, answer])
        except UnusableRecordError:
            return None

    @property
    def _is_marked(self) -> bool:
        return _MARK.search(str(self.tokenizer.chat_template)) is not None

    def _marked(self, record: Messages) -> Chat:
        """Take the spans from the chat template's own marks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered: Any = render_jinja_template(
                conversations=[record.messages],
                tools=record.tools,
                chat_template=self.tokenizer.get_chat_template(None, record.tools),
                return_assistant_tokens_mask=True,
                **{**self.tokenizer.special_tokens_map, **record.template_kwargs},
            )
        except Exception as error:  # a chat template is a program: it may fail in any way
            raise _refused(error) from error
        (text,), (spans,) = rendered
        return Chat(text, tuple((start, stop) for start, stop in spans))

    # -- turns that are not marked

    def _searched(self, record: Messages, turns: Sequence[int]) -> Chat:
        """Find a span for each turn."""
        text = self.apply(record, record.messages)
        spans: list[tuple[int, int]] = []
        append_end = False
        for i in turns:
            start, stop = self._added(record, i, text) or self._changed(record, i, text)
            closed = text[start:stop].rstrip()
            ends_special = closed.endswith(self.special_texts)
            # White space after the end of turn belongs to the frame: nothing generates it.
            spans.append((start, start + len(closed) if ends_special else stop))
            content = str(record.messages[i].get("content", "")).strip()
            append_end = not ends_special and (closed.endswith(content) if content else not closed)
        return Chat(text, tuple(spans), append_end and turns[-1] == len(record.messages) - 1)

    def _added(self, record: Messages, number: int, text: str) -> tuple[int, int] | None:
        """What a turn adds to the rendering of the messages before it; None where that is no beginning of the whole."""
        messages = record.messages
        try:
            before = self.apply(record, messages[:number], add_generation_prompt=True)
            last = number == len(messages) - 1
            after = text if last else self.apply(record, messages[: number + 1])
        except UnusableRecordError:  # a beginning may be what the chat template does not take
            return None
        return (len(before), len(after)) if text.startswith(after) and after.startswith(before) else None

    def _changed(self, record: Messages, number: int, text: str) -> tuple[int, int]:
        """The part of the whole rendering that changes with a turn's content and calls, with its end behind."""
        message = {key: value for key, value in record.messages[number].items() if key != "tool_calls"}
        changed = [*record.messages]
        changed[number] = {**message, "content": _STAND_IN}
        other = self.apply(record, changed)
        if _STAND_IN not in other:
            raise UnusableRecordError(
                f"the assistant's turn (message {number + 1}) cannot be found in what the tokenizer's chat template "
                f"makes of this conversation: {_ADVICE}"
            )
        start = common_beginning(text, other)
        stop = len(text) - common_beginning(text[start:][::-1], other[start:][::-1])
        rest = text[stop:]
        closed = rest.lstrip()
        end = max((end for end in self._ends_of_turn if closed.startswith(end)), key=len, default="")
        return start, stop + (len(rest) - len(closed) + len(end) if end else 0)

    @cached_property
    def _ends_of_turn(self) -> frozenset[str]:
        """The special tokens that close a turn, as the last one and with more behind."""
        ask, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": _STAND_IN}
        nothing = Messages([])

        def behind(*messages: dict[str, Any], prompted: bool = False) -> str:
            return self.apply(nothing, messages, prompted).rpartition(_STAND_IN)[2]

        try:
            last = behind(ask, answer)
            followed, prompted = behind(ask, answer, ask), behind(ask, answer, prompted=True)
            begin = self.apply(nothing, [ask], True)
            begin = begin[common_beginning(begin, self.apply(nothing, [ask])) :]
        except UnusableRecordError:
            return frozenset()
        # What the two have in common is the end of the turn, and perhaps how any message begins.
        shared = followed[: common_beginning(followed, prompted)]
        overlap = max(n for n in range(len(shared) + 1) if begin.startswith(shared[len(shared) - n :]))
        rests = last.strip(), shared[: len(shared) - overlap].strip()
        ends = (max(filter(rest.startswith, self.special_texts), key=len, default="") for rest in rests)
        return frozenset(ends) - {""}

    # -- checks

    def _check_turns(self, record: Messages, turns: Sequence[int], chat: Chat) -> None:
        """Refuse spans that overlap, or that change when the content of other messages does."""
        if any(start < stop for (_, stop), (start, _) in pairwise(chat.spans)):
            raise UnusableRecordError(_LEAKING)
        for place, (turn, (start, stop)) in enumerate(zip(turns, chat.spans, strict=True)):
            others = _with_stand_ins(record, (i for i in range(len(record.messages)) if i != turn))
            if chat.text[start:stop] in self.apply(others, others.messages):
                continue
            # The content may have switched something (`/no_think`): then nothing of it stands in the turn.
            again = self._searched(others, turns)
            start, stop = again.spans[place]
            _refuse_stand_in(again.text[start:stop])

    def _check_completion(self, record: Messages, chat: Chat) -> None:
        """The same for all that a completion adds to the prompt."""
        assert chat.prompt is not None
        learned = chat.text[common_beginning(chat.prompt, chat.text) :]
        others = _with_stand_ins(record, range(record.prompt))
        text = self.apply(others, others.messages)
        if not text.endswith(learned):
            prompt = self.apply(others, others.messages[: record.prompt], add_generation_prompt=True)
            _refuse_stand_in(text[common_beginning(prompt, text) :])

    def _note_unused(self, record: Messages) -> None:
        """Note what the chat template does not use: rendering is the same without it.

        Raises:
            UnusableRecordError: These are the calls of a turn, which would be learned.
        """
        for key, name, part in _parts(record):
            if name not in self._used and self._unused[name] < _TRIES:
                if self.apply(record, record.messages) != self.apply(part, part.messages):
                    self._used.add(name)
                else:
                    self._unused[name] += 1
            if key == "tool_calls" and name not in self._used:
                raise UnusableRecordError('has "tool_calls", and the chat template does not render them')

    def apply(
        self, record: Messages, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = False
    ) -> str:
        """Render messages.

        Args:
            record: Has the tools and variables.
            messages: Rendered in place of those of the record.
            add_generation_prompt: Whether to add what an answer begins with.

        Raises:
            UnusableRecordError: The chat template does not take them.
            UserError: The tokenizer has no chat template.
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
        except Exception as error:  # a chat template is a program: it may fail in any way
            raise _refused(error) from error
        return str(text)


def _refused(error: Exception) -> UnusableRecordError:
    return UnusableRecordError(
        f"the chat template does not take this conversation: {' '.join(str(error).split())}"
    )


def _with_stand_ins(record: Messages, numbers: Iterable[int]) -> Messages:
    """The conversation with other contents in some of its messages."""
    messages = [*record.messages]
    for number in numbers:
        messages[number] = {**messages[number], "content": _STAND_IN}
    return replace(record, messages=messages)


def _refuse_stand_in(learned: str) -> None:
    if _STAND_IN[0] in learned or _STAND_IN[-1] in learned:
        raise UnusableRecordError(_LEAKING)


def _parts(record: Messages) -> Iterator[tuple[str, str, Messages]]:
    """What a conversation may have that a chat template need not use: key, name and the conversation without."""
    for key in dict.fromkeys(key for message in record.messages for key in message):
        if key not in ("role", "content"):
            without = [{k: v for k, v in message.items() if k != key} for message in record.messages]
            yield key, f'"{key}" of messages', replace(record, messages=without)
    for key in record.template_kwargs:
        fewer = {k: v for k, v in record.template_kwargs.items() if k != key}
        yield key, f'"{key}" of chat_template_kwargs', replace(record, template_kwargs=fewer)
    if record.tools:
        yield "tools", '"tools"', replace(record, tools=None)
