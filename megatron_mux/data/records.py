"""Records: what one line of a data file may hold.

A file is JSON Lines: one JSON object a line, blank lines skipped. Its keys tell a record's shape:

| shape | keys | learned |
|---|---|---|
| prompt and completion | `prompt`, `completion` | the completion |
| text | `text` | every token |
| messages | `messages`: a list of `{"role", "content"}` | the assistant's turns |
| instruction | `instruction`, `output`, optionally `input` | the output |

Shapes may be mixed in a file. Other keys (an id, a source) are ignored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


class BadRecordError(Exception):
    """A line does not hold a record: the message completes "line 7: "."""


@dataclass(frozen=True)
class PromptCompletion:
    """A text to continue, and how; the prompt is None for a text by itself, of which every token is learned."""

    prompt: str | None
    completion: str


@dataclass(frozen=True)
class Messages:
    """A conversation, rendered by the tokenizer's chat template."""

    messages: list[dict[str, Any]]


Record = PromptCompletion | Messages

_SHAPES = '{"prompt", "completion"}, {"text"}, {"messages"} or {"instruction", "input", "output"}'
_SHAPE_KEYS = ("prompt", "completion", "text", "messages", "instruction", "output")
# Keys that change what a conversation means, and that are not rendered.
_REFUSED = ("tools", "documents", "functions")
_LONGEST_KEYS = 80


def parse_record(line: bytes) -> Record | None:
    """Read one line.

    Args:
        line: The line, with or without its end.

    Returns:
        Its record, or None for a blank line.

    Raises:
        BadRecordError: The line does not hold a record of a known shape.
    """
    line = line.removeprefix(b"\xef\xbb\xbf")  # the mark that some editors put at a file's beginning
    if not line.strip():
        return None
    try:
        value = json.loads(line.decode("utf-8").rstrip(" \t\r\n"))
    except UnicodeDecodeError as error:
        raise BadRecordError(f"not UTF-8 text (byte {error.start} of the line)") from None
    except json.JSONDecodeError as error:
        raise BadRecordError(f"not valid JSON: {error.msg} (column {error.colno})") from None
    except ValueError as error:
        raise BadRecordError(f"not valid JSON: {error}") from None
    except RecursionError:
        raise BadRecordError("not valid JSON: nested too deeply") from None
    if not isinstance(value, dict):
        raise BadRecordError(f"holds a JSON {_kind(value)}, not an object with {_SHAPES}")
    return _shape(value)


def instruction_prompt(instruction: str, given: str = "") -> str:
    """What an instruction record's output answers.

    The one fixed template (without the Input part when it is empty), ending in a line break:

        ### Instruction:
        {instruction}

        ### Input:
        {input}

        ### Response:
    """
    part = f"### Input:\n{given}\n\n" if given else ""
    return f"### Instruction:\n{instruction}\n\n{part}### Response:\n"


def _shape(value: dict[str, Any]) -> Record:
    keys = {key for key in _SHAPE_KEYS if key in value}
    if keys == {"prompt", "completion"}:
        return PromptCompletion(_text(value, "prompt"), _text(value, "completion"))
    if keys == {"text"}:
        return PromptCompletion(None, _text(value, "text"))
    if keys == {"messages"}:
        return _messages(value)
    if keys == {"instruction", "output"}:
        given = "" if value.get("input") is None else _text(value, "input")
        return PromptCompletion(
            instruction_prompt(_text(value, "instruction"), given), _text(value, "output")
        )
    found = ", ".join(map(repr, value)) or "nothing"
    if len(found) > _LONGEST_KEYS:
        found = found[: _LONGEST_KEYS - 3] + "..."
    raise BadRecordError(f"no known form: its keys must be {_SHAPES}, got {found}")


def _text(value: dict[str, Any], key: str) -> str:
    text = value[key]
    if not isinstance(text, str):
        raise BadRecordError(f'"{key}" must be text, got a JSON {_kind(text)}')
    _check_encodable(text, f'"{key}"')
    return text


def _messages(value: dict[str, Any]) -> Messages:
    messages = value["messages"]
    for key in _REFUSED:
        if value.get(key):
            raise BadRecordError(f'"{key}" beside "messages" is not done yet')
    if not isinstance(messages, list) or not messages:
        raise BadRecordError('"messages" must be a list of at least one message')
    for i, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise BadRecordError(f'message {i} must be an object with "role" and "content"')
        for key in ("role", "content"):
            if not isinstance(message[key], str):
                raise BadRecordError(f'"{key}" of message {i} must be text, got a JSON {_kind(message[key])}')
            _check_encodable(message[key], f'"{key}" of message {i}')
        if message.get("tool_calls"):
            raise BadRecordError(f'"tool_calls" of message {i} is not done yet')
    return Messages(messages)


def _check_encodable(text: str, where: str) -> None:
    """JSON may spell half of a surrogate pair, which is no character and no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRecordError(f"{where} holds half a surrogate pair (character {error.start})") from None


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return names[type(value)]
