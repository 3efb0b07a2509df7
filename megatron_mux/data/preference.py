"""Preference records: a prompt with a better and a worse completion, or with one that is good or not; and their tokens.

The columns are those of TRL:

| loss | keys |
|---|---|
| dpo, orpo | `prompt`, `chosen`, `rejected`; without `prompt` it is what chosen and rejected begin with alike |
| kto | `prompt`, `completion`, `label` (true: desirable); or a pair, which becomes one record of each label |

Values are texts, or lists of messages for the tokenizer's chat template, with `chat_template_kwargs`. Other keys are
ignored, and a null is a missing value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megatron_mux.data.records import BadRecordError, template_variables
from megatron_mux.data.tokenise import Example, Tokeniser
from megatron_mux.errors import UserError

Content = str | list[dict[str, Any]]
"""A text, or messages."""

_PAIR = '{"prompt", "chosen", "rejected"}'
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
        template_kwargs: Variables of the chat template.
    """

    prompt: Content
    completions: tuple[Content, ...]
    desirable: bool | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def unpaired(self) -> list[PreferenceRecord]:
        """A desirable and an undesirable record of a pair; a record with one completion is itself."""
        if self.desirable is not None:
            return [self]
        labels = zip(self.completions, (True, False), strict=True)
        return [replace(self, completions=(completion,), desirable=label) for completion, label in labels]


def parse_preference(value: Mapping[str, Any], loss: str) -> PreferenceRecord:
    """Read a record.

    Args:
        value: Its columns.
        loss: dpo, orpo or kto.

    Raises:
        BadRecordError: It lacks a column, or a column holds something else.
    """
    if value.get("tools"):
        raise BadRecordError('"tools" is not supported in a preference record: leave it out')
    options = template_variables(value)
    given = {key for key, found in value.items() if found is not None}
    forms = [{"chosen", "rejected"}, *([{"prompt", "completion", "label"}] if loss == "kto" else [])]
    if not any(form <= given for form in forms):
        given = set(value)  # so that a message names the null
    if forms[0] <= given:
        chosen, rejected = _content(value, "chosen"), _content(value, "rejected")
        prompt = _content(value, "prompt") if "prompt" in given else None
        if isinstance(chosen, str) != isinstance(rejected, str):
            raise BadRecordError('"chosen" and "rejected" must both be texts, or both be messages')
        if prompt is None or isinstance(prompt, str) != isinstance(chosen, str):
            prompt, chosen, rejected = _split_prompt(chosen, rejected)
        return PreferenceRecord(prompt, (chosen, rejected), None, options)
    if forms[-1] <= given:
        label = _label(value["label"])
        prompt, completion = _content(value, "prompt"), _content(value, "completion")
        if isinstance(prompt, str) != isinstance(completion, str):
            raise BadRecordError('"prompt" and "completion" must both be texts, or both be messages')
        return PreferenceRecord(prompt, (completion,), label, options)
    found = ", ".join(map(repr, value)) or "nothing"
    raise BadRecordError(f"no record for loss: {loss}: its keys must be {_SHAPES[loss]}, got {found[:80]}")


def _label(label: Any) -> bool:
    """A label as JSON and tables have it: a boolean, 1 or 0, or one of these as text."""
    found = _LABELS.get(str(label).strip().lower()) if isinstance(label, (bool, np.bool_, int, str)) else None
    if found is None:
        raise BadRecordError(f'"label" must be true or false (or 1 or 0), got {label!r}')
    return found


def _content(value: Mapping[str, Any], key: str) -> Content:
    content = value[key]
    if isinstance(content, np.ndarray):
        content = content.tolist()
    if isinstance(content, str):
        try:
            content.encode("utf-8")
        except UnicodeEncodeError as error:
            raise BadRecordError(f'"{key}" holds half a surrogate pair (character {error.start})') from None
        return content
    messages = isinstance(content, list) and content
    if messages and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in content):
        return list(content)
    raise BadRecordError(f'"{key}" must be text, or a list of messages with "role" and "content"')


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
    """

    def __init__(self, tokenizer: Any, loss: str) -> None:
        self._texts = Tokeniser(tokenizer, None)
        self._tokenizer = tokenizer
        self._orpo = loss == "orpo"

    def encode(self, record: PreferenceRecord) -> list[Example]:
        """An example for each completion, uncut.

        Raises:
            BadRecordError: The chat template does not take the messages, or a completion is empty.
            UserError: There are messages, and the tokenizer has no chat template.
        """
        if isinstance(record.prompt, str):
            end = self._tokenizer.eos_token
            prompt = self._tokens(record.prompt)
            texts = [str(completion) for completion in record.completions]
            texts = [text if text.endswith(end) else text + end for text in texts]
            whole = [self._tokens(record.prompt + text) for text in texts]
        else:
            options = record.template_kwargs
            prompt = self._chat(record.prompt, options, True)
            whole = [self._chat([*record.prompt, *one], options, False) for one in record.completions]
        start = min(_same(prompt, ids) for ids in whole)
        if self._orpo:
            start, whole = self._closed(start, whole)
        text = None if record.desirable is None else DESIRABLE if record.desirable else UNDESIRABLE
        return [_example(ids, start, text) for ids in whole]

    def _closed(self, start: int, whole: list[list[int]]) -> tuple[int, list[list[int]]]:
        """Sequences with the tokens that ORPO's trainer puts at both ends."""
        begin, end = self._tokenizer.bos_token_id, self._texts.end_of_sequence
        if begin is not None and any(ids[:1] != [begin] for ids in whole):
            start, whole = start + 1, [[begin, *ids] for ids in whole]
        return start, [ids if ids[-1:] == [end] else [*ids, end] for ids in whole]

    def _tokens(self, text: str, **options: bool) -> list[int]:
        ids: list[int] = self._texts._call([text], **options)["input_ids"][0]
        return ids

    def _chat(
        self, messages: Sequence[dict[str, Any]], options: Mapping[str, Any], prompt: bool
    ) -> list[int]:
        if not self._tokenizer.chat_template:
            raise UserError(
                "messages need a chat template, and the backbone's tokenizer has none: write the records as texts"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=prompt, **options
            )
        except Exception as error:  # a template is a program: it may fail in any way
            raise BadRecordError(f"the chat template does not take these messages: {error}") from error
        return self._tokens(str(text), add_special_tokens=False)


def _same(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    pairs: Iterator[tuple[int, int]] = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _example(ids: Sequence[int], start: int, text: str | None) -> Example:
    labelled = np.arange(len(ids)) >= max(start, 1)
    if not labelled.any():
        raise BadRecordError("a completion is empty")
    return Example(np.array(ids, np.int64), labelled, text)
