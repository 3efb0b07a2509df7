"""Preference records: a prompt with a better and a worse completion, or with one that is good or not; and their tokens.

The columns are those of TRL:

| loss | keys |
|---|---|
| dpo, orpo | `prompt`, `chosen`, `rejected`; without `prompt` it is what chosen and rejected begin with alike |
| kto | `prompt`, `completion`, `label` (true: desirable); or a pair, which becomes one record of each label |

A pair may also be in OpenAI's format: `input` with `messages`, `preferred_output`, `non_preferred_output`.

Values are texts, or lists of messages for the tokenizer's chat template, beside which `tools` and
`chat_template_kwargs` may stand. Other keys are ignored, and a null is a missing value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_mux.data.bad_record import BadRecordError, UnusableRecordError
from megatron_mux.data.chat import common_beginning
from megatron_mux.data.messages import Messages, conversation_of, messages_of
from megatron_mux.data.records import listed, refuse_keys, row_object, text_of
from megatron_mux.data.tokenise import Example, Tokeniser

Content = str | list[dict[str, Any]]
"""A text, or messages."""

_PAIR = '{"prompt", "chosen", "rejected"}'
_OPENAI = {"prompt": "input", "chosen": "preferred_output", "rejected": "non_preferred_output"}
"""Our keys, and OpenAI's."""
_LABELS = {"true": True, "1": True, "false": False, "0": False}
_SHAPES = {"dpo": _PAIR, "orpo": _PAIR, "kto": f'{{"prompt", "completion", "label"}} or {_PAIR}'}

DESIRABLE, UNDESIRABLE = "desirable", "undesirable"
"""`Example.completion_text` of a record that is good or not: the token cache keeps a digest of it."""


@dataclass(frozen=True)
class PreferenceRecord:
    """A prompt and its completions.

    Attributes:
        prompt: What they continue.
        completions: The chosen and the rejected one; or one alone.
        desirable: Whether the one is good; None for a pair.
        conversation: What stands beside messages; None for texts.
    """

    prompt: Content
    completions: tuple[Content, ...]
    desirable: bool | None = None
    conversation: Messages | None = None

    def unpaired(self) -> list[PreferenceRecord]:
        """A desirable and an undesirable record of a pair; a record with one completion is itself."""
        if self.desirable is not None:
            return [self]
        labels = zip(self.completions, (True, False), strict=True)
        return [replace(self, completions=(completion,), desirable=label) for completion, label in labels]


def parse_preference(row: Any, loss: str) -> PreferenceRecord:
    """Read a record.

    Args:
        row: A mapping of keys to values.
        loss: dpo, orpo or kto.

    Raises:
        BadRecordError: It lacks a key, or a key holds something else.
    """
    row = row_object(row)
    if _OPENAI["chosen"] in row and "chosen" not in row:
        try:
            return parse_preference(_of_openai(row), loss)
        except BadRecordError as error:
            text = str(error)
            for ours, theirs in _OPENAI.items():
                text = text.replace(f'"{ours}"', f'"{theirs}"')
            raise type(error)(text) from error
    # Tables give a null for what a row lacks.
    given = {key for key, value in row.items() if value is not None}
    pair, judged = {"chosen", "rejected"}, {"prompt", "completion", "label"}
    if not pair <= given and not (loss == "kto" and judged <= given):
        given = set(row)  # so that a message names the null
    if pair <= given:
        chosen, rejected = _content(row, "chosen"), _content(row, "rejected")
        prompt = _content(row, "prompt") if "prompt" in given else None
        if isinstance(chosen, str) != isinstance(rejected, str):
            raise BadRecordError('"chosen" and "rejected" must both be texts, or both be messages')
        if prompt is None or isinstance(prompt, str) != isinstance(chosen, str):
            prompt, chosen, rejected = _split_prompt(chosen, rejected)
        return PreferenceRecord(prompt, (chosen, rejected), None, _conversation(row, prompt))
    if loss == "kto" and judged <= given:
        label = _label(row["label"])
        prompt, completion = _content(row, "prompt"), _content(row, "completion")
        if isinstance(prompt, str) != isinstance(completion, str):
            raise BadRecordError('"prompt" and "completion" must both be texts, or both be messages')
        return PreferenceRecord(prompt, (completion,), label, _conversation(row, prompt))
    raise BadRecordError(f"no record for loss: {loss}: its keys must be {_SHAPES[loss]}, got {listed(row)}")


def _of_openai(row: dict[str, Any]) -> dict[str, Any]:
    """A pair in OpenAI's format by TRL's keys."""
    if missing := [key for key in _OPENAI.values() if row.get(key) is None]:
        raise BadRecordError(f'"{missing[0]}" is missing: got {listed(row)}')
    asked = row_object(row["input"])
    made = {key: row[theirs] for key, theirs in _OPENAI.items() if key != "prompt"}
    return {**made, "prompt": asked.get("messages"), "tools": asked.get("tools")}


def _conversation(row: dict[str, Any], prompt: Content) -> Messages | None:
    if isinstance(prompt, str):
        refuse_keys(row)
        return None
    return conversation_of(row, prompt, len(prompt))


def _label(label: Any) -> bool:
    """A label as JSON and tables have it: a boolean, 1 or 0, or one of these as text."""
    found = _LABELS.get(str(label).strip().lower()) if isinstance(label, (bool, int, str)) else None
    if found is None:
        raise BadRecordError(f'"label" must be true or false (or 1 or 0), got {label!r}')
    return found


def _content(row: dict[str, Any], key: str) -> Content:
    if isinstance(row[key], list):
        return messages_of(row, key, set() if key == "prompt" else None)
    return text_of(row, key)


def _split_prompt(chosen: Content, rejected: Content) -> tuple[Content, Content, Content]:
    """What two completions begin with alike, and the rest of each; a space goes with the rest."""
    same = next(
        (i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b),
        min(len(chosen), len(rejected)) - 1,
    )
    if same <= 0:
        raise BadRecordError('"prompt" is missing, and "chosen" and "rejected" do not begin alike')
    if chosen[same - 1] == " ":
        same -= 1
    return chosen[:same], chosen[same:], rejected[same:]


class PreferenceTokeniser:
    """Turns preference records into examples, whose completions are labelled.

    As TRL does, prompt and completion are tokenised together, and the completion begins where this differs from the
    prompt tokenised alone. End-of-sequence is appended to texts. For ORPO every sequence begins with the tokenizer's
    beginning-of-sequence token and ends with end-of-sequence.

    Args:
        tokenizer: The backbone's.
        loss: dpo, orpo or kto.

    Attributes:
        chat_template: Renders conversations.
    """

    def __init__(self, tokenizer: Any, loss: str) -> None:
        self._tokeniser = Tokeniser(tokenizer, None)
        self.chat_template = self._tokeniser.chat_template
        self._tokenizer = tokenizer
        self._orpo = loss == "orpo"

    def encode(self, record: PreferenceRecord) -> list[Example]:
        """An example for each completion, uncut.

        Raises:
            BadRecordError: The chat template does not take the messages, or a completion is empty.
            UserError: There are messages, and the tokenizer has no chat template.
        """
        if record.conversation is None:
            end = self._tokenizer.eos_token
            texts = [str(completion) for completion in record.completions]
            texts = [text if text.endswith(end) else text + end for text in texts]
            pieces = [str(record.prompt), *(f"{record.prompt}{text}" for text in texts)]
            prompt, *whole = self._tokeniser.with_specials(pieces)
        else:
            given = record.conversation
            wholes = [replace(given, messages=[*given.messages, *own]) for own in record.completions]
            chats = [self.chat_template.render(each) for each in wholes]
            prompt, *whole = self._tokeniser.plain([str(chats[0].prompt), *(chat.text for chat in chats)])
        start = min(common_beginning(prompt, ids) for ids in whole)
        if self._orpo:
            start, whole = self._closed(start, whole)
        text = None if record.desirable is None else DESIRABLE if record.desirable else UNDESIRABLE
        return [_example(ids, start, text) for ids in whole]

    def _closed(self, start: int, whole: list[list[int]]) -> tuple[int, list[list[int]]]:
        """Sequences with the tokens that ORPO's trainer puts at both ends."""
        begin = self._tokenizer.bos_token_id
        if begin is not None and any(ids[:1] != [begin] for ids in whole):
            start, whole = start + 1, [[begin, *ids] for ids in whole]
        return start, [self._tokeniser.closed(ids) for ids in whole]


def _example(ids: Sequence[int], start: int, text: str | None) -> Example:
    labelled = np.arange(len(ids)) >= max(start, 1)
    if not labelled.any():
        raise UnusableRecordError("a completion is empty")
    return Example(np.array(ids, np.int64), labelled, text)
