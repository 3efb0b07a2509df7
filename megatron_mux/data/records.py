"""Records: what one row of a data file may hold.

A row is a mapping of keys to values: a JSON object, a line of a table. Its keys tell a record's shape:

| shape | keys | learned |
|---|---|---|
| prompt and completion | `prompt`, `completion`: texts, or lists of messages | the completion |
| text | `text` | every token |
| messages | `messages` or `conversations`: lists of `{"role", "content"}` or `{"from", "value"}` | assistant's turns |
| instruction | `instruction`, `output`, optionally `input` | the output |

Beside messages, `tools` and `chat_template_kwargs` are handed to the chat template. Shapes may be mixed in a file.
Other keys (an id, a source) are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_mux.data.section import SHAPE_KEYS


class BadRecordError(Exception):
    """A row does not hold a record: the message completes "line 7: "."""


@dataclass(frozen=True)
class PromptCompletion:
    """A text to continue, and how; the prompt is None for a text by itself, of which every token is learned."""

    prompt: str | None
    completion: str


@dataclass(frozen=True)
class Messages:
    """A conversation, rendered by the tokenizer's chat template.

    Attributes:
        messages: Its messages, each with "role" and "content".
        prompt: How many of them, from the first, are the prompt of a completion, which is learned as it is rendered; 0:
            the assistant's turns are learned.
        tools: JSON schemas of the tools that may be called.
        template_kwargs: Variables of the chat template.
    """

    messages: list[dict[str, Any]]
    prompt: int = 0
    tools: list[Any] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


Record = PromptCompletion | Messages

_SHAPES = '{"prompt", "completion"}, {"text"}, {"messages"} or {"instruction", "input", "output"}'
_FORMS = ({"prompt", "completion"}, {"text"}, {"messages"}, {"conversations"}, {"instruction", "output"})
# Keys beside those that tell the shape.
_BESIDE = frozenset({"input", "tools", "chat_template_kwargs"})
# Keys that change what a conversation means, and that are not rendered.
_REFUSED = ("documents", "functions")
_CHAT_ROLES = {"human": "user", "gpt": "assistant"}
_LONGEST_KEYS = 80


def parse_record(line: bytes) -> Record | None:
    """Read the record of a line of JSON.

    Args:
        line: The line, with or without its end.

    Returns:
        Its record, or None for a blank line.

    Raises:
        BadRecordError: The line does not hold a record of a known shape.
    """
    line = line.removeprefix(b"\xef\xbb\xbf")
    return record_of(parse_json(line)) if line.strip() else None


def parse_json(text: bytes) -> Any:
    """Read a JSON value.

    Raises:
        BadRecordError: It is none.
    """
    try:
        return json.loads(text.decode("utf-8").rstrip(" \t\r\n"))
    except UnicodeDecodeError as error:
        raise BadRecordError(f"not UTF-8 text (byte {error.start} of the line)") from None
    except json.JSONDecodeError as error:
        raise BadRecordError(f"not valid JSON: {error.msg} (column {error.colno})") from None
    except ValueError as error:
        raise BadRecordError(f"not valid JSON: {error}") from None
    except RecursionError:
        raise BadRecordError("not valid JSON: nested too deeply") from None


def record_of(row: Any) -> Record:
    """Read the record of a row.

    Args:
        row: A mapping of keys to values.

    Raises:
        BadRecordError: It holds no record of a known shape.
    """
    row = row_object(row)
    keys = {key for key in SHAPE_KEYS if row.get(key) is not None} - _BESIDE
    if keys not in _FORMS:  # tables give a null for what a row lacks, and so may a mistake
        keys = {key for key in SHAPE_KEYS if key in row} - _BESIDE
    if keys == {"prompt", "completion"}:
        if isinstance(row["prompt"], list):
            prompt, completion = messages_of(row, "prompt"), messages_of(row, "completion")
            return conversation_of(row, prompt + completion, len(prompt))
        return PromptCompletion(text_of(row, "prompt"), text_of(row, "completion"))
    if keys == {"text"}:
        return PromptCompletion(None, text_of(row, "text"))
    if keys in ({"messages"}, {"conversations"}):
        return conversation_of(row, messages_of(row, keys.pop()), 0)
    if keys == {"instruction", "output"}:
        given = "" if row.get("input") is None else text_of(row, "input")
        return PromptCompletion(
            instruction_prompt(text_of(row, "instruction"), given), text_of(row, "output")
        )
    if whole := [form for form in _FORMS if form < keys]:
        choices = " or ".join(_mapping(row, form) for form in whole)
        raise BadRecordError(f"has keys of several forms: choose one with columns: {choices}")
    raise BadRecordError(
        f"no known form: its keys must be {_SHAPES} (or map them with columns), got {listed(row)}"
    )


def _mapping(row: dict[str, Any], form: set[str]) -> str:
    """The `columns` that choose a form."""
    beside = frozenset({"input"}) if "instruction" in form else _BESIDE - {"input"}
    return f"{{{', '.join(f'{key}: {key}' for key in SHAPE_KEYS if key in row and key in form | beside)}}}"


def row_object(row: Any) -> dict[str, Any]:
    """The row, if it is a mapping.

    Raises:
        BadRecordError: It is none, or was read with a mistake.
    """
    if isinstance(row, BadRecordError):
        raise row
    if not isinstance(row, dict):
        raise BadRecordError(f"holds a JSON {_kind(row)}, not an object with {_SHAPES}")
    return row


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


def listed(keys: Mapping[str, Any]) -> str:
    """Format a row's keys for a message."""
    found = ", ".join(map(repr, keys)) or "nothing"
    return found if len(found) <= _LONGEST_KEYS else found[: _LONGEST_KEYS - 3] + "..."


def text_of(row: dict[str, Any], key: str) -> str:
    """The text of a key.

    Raises:
        BadRecordError: It is none.
    """
    text = row[key]
    if not isinstance(text, str):
        raise BadRecordError(f'"{key}" must be text, got a JSON {_kind(text)}')
    _check_encodable(text, f'"{key}"')
    return text


def conversation_of(row: dict[str, Any], messages: list[dict[str, Any]], prompt: int) -> Messages:
    """A conversation, with the tools and variables that its row has for the chat template.

    Args:
        row: The row.
        messages: Its messages.
        prompt: How many of them are the prompt of a completion; 0 for a conversation as a whole.

    Raises:
        BadRecordError: What stands beside the messages is no such thing, or is not supported.
    """
    for key in _REFUSED:
        if row.get(key):
            raise BadRecordError(f'"{key}" beside messages is not supported')
    tools = row.get("tools")
    if isinstance(tools, str):  # as data sets of varied schemas often keep them
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError as error:
            raise BadRecordError(
                f'"tools" must be a list of JSON schemas, or one as JSON text: {error}'
            ) from None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise BadRecordError('"tools" must be a list of JSON schemas, or one as JSON text')
    return Messages(messages, prompt, tools or None, template_variables(row))


def template_variables(row: Mapping[str, Any]) -> dict[str, Any]:
    """The variables that a row has for its chat template.

    Raises:
        BadRecordError: They are no object, or there are documents among them.
    """
    options = row.get("chat_template_kwargs") or {}
    if not isinstance(options, dict):
        raise BadRecordError(f'"chat_template_kwargs" must be an object, got a JSON {_kind(options)}')
    if options.get("documents"):
        raise BadRecordError('"documents" beside messages is not supported')
    return options


def messages_of(row: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """The messages of a key, each with "role" and "content".

    Raises:
        BadRecordError: It is no list of messages.
    """
    messages = row[key]
    if not isinstance(messages, list) or not messages:
        raise BadRecordError(f'"{key}" must be a list of at least one message')
    return [_message(message, f"message {i}", key) for i, message in enumerate(messages, 1)]


def _message(message: Any, where: str, key: str) -> dict[str, Any]:
    if key != "messages":
        where += f' of "{key}"'
    if isinstance(message, dict) and "from" in message and "value" in message and "role" not in message:
        rest = {name: value for name, value in message.items() if name not in ("from", "value")}
        role = message["from"]
        message = {
            "role": _CHAT_ROLES.get(role, role) if isinstance(role, str) else role,
            "content": message["value"],
            **rest,
        }
    # Tables give a null for what a message lacks.
    calls = isinstance(message, dict) and message.get("tool_calls")
    if not isinstance(message, dict) or "role" not in message or not (calls or "content" in message):
        raise BadRecordError(f'{where} must be an object with "role" and "content"')
    content = message.get("content")
    for name, text in (("role", message["role"]), ("content", "" if calls and content is None else content)):
        if not isinstance(text, str):
            raise BadRecordError(f'"{name}" of {where} must be text, got a JSON {_kind(text)}')
        _check_encodable(text, f'"{name}" of {where}')
    if calls and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise BadRecordError(f'"tool_calls" of {where} must be a list of objects')
    return {name: value for name, value in message.items() if value is not None}


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
    return names.get(type(value), type(value).__name__)
