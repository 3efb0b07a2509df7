"""Records: what one row of a data file may hold.

A row is a mapping of keys to values: a JSON object, a line of a table. Its keys tell a record's shape:

| shape | keys | learned |
|---|---|---|
| prompt and completion | `prompt`, `completion`: texts, or lists of messages | the completion |
| text | `text` | every token |
| messages | `messages` or `conversations`: lists of `{"role", "content"}` or `{"from", "value"}` | assistant's turns |
| instruction | `instruction`, `output`, optionally `input` and `system` | the output |

Beside messages, `tools` and `chat_template_kwargs` are handed to the chat template, and `system` is the first message.
Shapes may be mixed in a file. Other keys (an id, a source) are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_mux.data.bad_record import BadRecordError, check_encodable, json_kind
from megatron_mux.data.messages import Messages, conversation_of, messages_of
from megatron_mux.data.section import SHAPE_KEYS


@dataclass(frozen=True)
class PromptCompletion:
    """A text to continue, and how; the prompt is None for a text by itself, of which every token is learned."""

    prompt: str | None
    completion: str


Record = PromptCompletion | Messages

_SHAPES = '{"prompt", "completion"}, {"text"}, {"messages"} or {"instruction", "input", "output"}'
_FORMS = ({"prompt", "completion"}, {"text"}, {"messages"}, {"conversations"}, {"instruction", "output"})
# Keys beside those that tell the shape.
_OPTIONAL_KEYS = frozenset({"input", "tools", "chat_template_kwargs", "system", "history"})
_LONGEST_KEYS = 80


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
    keys = {key for key in SHAPE_KEYS if row.get(key) is not None} - _OPTIONAL_KEYS
    if keys not in _FORMS:  # tables give a null for what a row lacks, and so may a mistake
        keys = {key for key in SHAPE_KEYS if key in row} - _OPTIONAL_KEYS
    if keys == {"prompt", "completion"}:
        if isinstance(row["prompt"], list):
            prompt, completion = messages_of(row, "prompt", set()), messages_of(row, "completion")
            return conversation_of(row, prompt + completion, len(prompt))
        refuse_keys(row)
        return PromptCompletion(text_of(row, "prompt"), text_of(row, "completion"))
    if keys == {"text"}:
        refuse_keys(row)
        return PromptCompletion(None, text_of(row, "text"))
    if keys in ({"messages"}, {"conversations"}):
        unlearned = set[int]()
        messages = messages_of(row, keys.pop(), unlearned)
        return conversation_of(row, messages, 0, frozenset(unlearned))
    if keys == {"instruction", "output"}:
        refuse_keys(row, "history")
        given, system = ("" if row.get(key) is None else text_of(row, key) for key in ("input", "system"))
        prompt_text = instruction_prompt(text_of(row, "instruction"), given, system)
        return PromptCompletion(prompt_text, text_of(row, "output"))
    if whole := [form for form in _FORMS if form < keys]:
        choices = " or ".join(_mapping(row, form) for form in whole)
        raise BadRecordError(f"has keys of several forms: choose one with columns: {choices}")
    raise BadRecordError(
        f"no known form: its keys must be {_SHAPES} (or map them with columns), got {listed(row)}"
    )


def _mapping(row: dict[str, Any], form: set[str]) -> str:
    """The `columns` that choose a form."""
    optional = {"input", "system"} if "instruction" in form else {"tools", "chat_template_kwargs", "system"}
    optional -= {"system"} if "text" in form else set()
    return f"{{{', '.join(f'{key}: {key}' for key in SHAPE_KEYS if key in row and key in form | optional)}}}"


def row_object(row: Any) -> dict[str, Any]:
    """The row, if it is a mapping.

    Raises:
        BadRecordError: It is none, or was read with a mistake.
    """
    if isinstance(row, BadRecordError):
        raise row
    if not isinstance(row, dict):
        raise BadRecordError(f"holds a JSON {json_kind(row)}, not an object with {_SHAPES}")
    return row


def refuse_keys(row: Mapping[str, Any], *keys: str) -> None:
    """Refuse what would change the meaning of a record of texts, and has no place there.

    Args:
        row: The row.
        keys: Those that have none; by default all.

    Raises:
        BadRecordError: The row has one.
    """
    for key in keys or ("system", "history"):
        if row.get(key):
            raise BadRecordError(
                f'"{key}" has no place in a record of texts: write messages, or leave it out by naming the keys that '
                "count with columns"
            )


def instruction_prompt(instruction: str, given: str = "", system: str = "") -> str:
    """What an instruction record's output answers.

    The one fixed template (without the System and Input parts when they are empty), ending in a line break:

        ### System:
        {system}

        ### Instruction:
        {instruction}

        ### Input:
        {input}

        ### Response:
    """
    before = f"### System:\n{system}\n\n" if system else ""
    part = f"### Input:\n{given}\n\n" if given else ""
    return f"{before}### Instruction:\n{instruction}\n\n{part}### Response:\n"


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
        raise BadRecordError(f'"{key}" must be text, got a JSON {json_kind(text)}')
    check_encodable(text, f'"{key}"')
    return text
