"""Conversations: lists of messages, in the forms that data sets have them, as chat templates take them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from megatron_mux.data.bad_record import BadRecordError, UnusableRecordError, check_encodable, json_kind
from megatron_mux.data.section import OF_RECORDS, REFUSED_KEYS


@dataclass(frozen=True)
class Messages:
    """A conversation, rendered by the tokenizer's chat template.

    Attributes:
        messages: Its messages, each with "role" and "content".
        prompt: How many of them, from the first, are the prompt of a completion, which is learned as it is rendered; 0:
            the assistant's turns are learned.
        tools: JSON schemas of the tools that may be called.
        template_kwargs: Variables of the chat template.
        unlearned: Numbers of the assistant's messages that are not learned.
    """

    messages: list[dict[str, Any]]
    prompt: int = 0
    tools: list[Any] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    unlearned: frozenset[int] = frozenset()


_CHAT_ROLES = {"human": "user", "gpt": "assistant"}
_ROLES = ("system", "user", "assistant", "tool", *_CHAT_ROLES)
# Keys of a message that tell a trainer whether to learn it, in the formats of OpenAI, axolotl, verl and torchtune.
_LEARNED = {"weight": True, "train": True, "training": True, "loss": True, "trainable": True, "masked": False}
_UNCLEAR = ("loss_mask", "train_on_turn", "train_on_input")
"""Keys that say the same in words that trainers do not share."""
_OF_ROWS = {
    "system_prompt": 'call it "system"',
    "weight": "write it into the messages that it is about",
    "loss_mask": 'write "weight" into the messages that it is about',
    "enable_thinking": 'write it into "chat_template_kwargs"',
}
"""Keys of rows that tell trainers or templates something, and what to write instead."""
_TEXT_PARTS = ("text", "input_text", "output_text")


def messages_of(row: Mapping[str, Any], key: str, unlearned: set[int] | None = None) -> list[dict[str, Any]]:
    """The messages of a key, each with "role" and "content".

    Args:
        row: A mapping of a record's keys.
        key: One whose value is a list of messages.
        unlearned: Gets the numbers of the assistant's messages that ask not to be learned; None: these are refused.

    Raises:
        BadRecordError: It is no list of messages, or asks for something that is not supported.
    """
    messages = row[key]
    if not isinstance(messages, list) or not messages:
        raise BadRecordError(f'"{key}" must be a list of at least one message')
    found = []
    for number, given in enumerate(messages):
        where = f"message {number + 1}" + (f' of "{key}"' if key != "messages" else "")
        message = _message(given, where)
        learned = _pop_learned(message, where)
        if learned and message["role"] != "assistant":
            raise BadRecordError(f"{where} asks to be learned: only those of the assistant are")
        if learned is False and message["role"] == "assistant":
            if unlearned is None:
                raise BadRecordError(f"{where} asks not to be learned: a completion is learned as a whole")
            unlearned.add(number)
        found.append(message)
    return found


def conversation_of(
    row: Mapping[str, Any],
    messages: list[dict[str, Any]],
    prompt: int,
    unlearned: frozenset[int] = frozenset(),
) -> Messages:
    """A conversation, with what its row has beside the messages.

    Args:
        row: The row.
        messages: Its messages.
        prompt: How many of them are the prompt of a completion; 0 for a conversation as a whole.
        unlearned: See `Messages`.

    Raises:
        BadRecordError: What stands beside the messages is no such thing, or is not supported.
    """
    for key, advice in _OF_ROWS.items():
        if row.get(key) not in (None, "") and not (key == "weight" and row[key] == 1):
            raise BadRecordError(f'"{key}" beside messages is not supported: {advice}')
    for key in REFUSED_KEYS:
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
    if system := row.get("system"):
        first = _message({"role": "system", "content": system}, '"system"')
        if messages[0]["role"] == "system":
            raise BadRecordError('has "system" beside a first message of the role system: leave one out')
        messages = [first, *messages]
        prompt, unlearned = prompt and prompt + 1, frozenset(number + 1 for number in unlearned)
    return Messages(messages, prompt, tools or None, template_variables(row), unlearned)


def with_objects(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose calls have objects for arguments, where OpenAI's format has these as JSON text."""
    return [
        {**message, "tool_calls": [_decoded(call) for call in calls]}
        if (calls := message.get("tool_calls"))
        else message
        for message in messages
    ]


def _decoded(call: dict[str, Any]) -> dict[str, Any]:
    found = dict(call)
    if isinstance(call.get("function"), dict):
        found["function"] = _decoded(call["function"])
    if isinstance(text := call.get("arguments"), str):
        with suppress(ValueError, RecursionError):
            value = json.loads(text)
            if isinstance(value, dict):
                found["arguments"] = value
    return found


def template_variables(row: Mapping[str, Any]) -> dict[str, Any]:
    """The variables that a row has for its chat template.

    Raises:
        BadRecordError: They are no object, or there are documents or arguments of the tokenizer among them.
    """
    options = row.get("chat_template_kwargs") or {}
    if not isinstance(options, dict):
        raise BadRecordError(f'"chat_template_kwargs" must be an object, got a JSON {json_kind(options)}')
    if options.get("documents"):
        raise BadRecordError('"documents" beside messages is not supported')
    for name in OF_RECORDS:
        if name in options:  # a template of the record's own would be run
            raise BadRecordError(f'"chat_template_kwargs" cannot set {name}')
    return options


def _message(message: Any, where: str) -> dict[str, Any]:
    if isinstance(message, dict) and "from" in message and "value" in message and "role" not in message:
        rest = {name: value for name, value in message.items() if name not in ("from", "value")}
        message = {"role": message["from"], "content": message["value"], **rest}
    calls = isinstance(message, dict) and message.get("tool_calls")
    if not isinstance(message, dict) or "role" not in message or not (calls or "content" in message):
        raise BadRecordError(f'{where} must be an object with "role" and "content"')
    content = _joined(message.get("content"), where)
    for name, text in (("role", message["role"]), ("content", "" if calls and content is None else content)):
        if not isinstance(text, str):
            raise BadRecordError(f'"{name}" of {where} must be text, got a JSON {json_kind(text)}')
        check_encodable(text, f'"{name}" of {where}')
    if calls and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise BadRecordError(f'"tool_calls" of {where} must be a list of objects')
    if message.get("function_call") or message["role"] == "function_call":
        raise BadRecordError(f'{where} has a "function_call": write it as "tool_calls" of the assistant')
    # Tables have a null or an empty list for what a message lacks.
    found = {name: value for name, value in message.items() if value is not None and value != []}
    found |= {"role": _role(message["role"], where)}
    if content is not None:
        found["content"] = content
    return found


def _role(role: str, where: str) -> str:
    small = role.strip().lower()
    if small in _ROLES and role != small:
        raise BadRecordError(f'"role" of {where} must be "{small}", got "{role}"')
    return _CHAT_ROLES.get(role, role)


def _joined(content: Any, where: str) -> Any:
    """The text of a list of parts, which OpenAI's format has in place of a text."""
    if not isinstance(content, list) or not content:
        return content
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, dict) else json_kind(part)
        text = part.get("text") if kind in _TEXT_PARTS else None
        if not isinstance(text, str):
            raise UnusableRecordError(
                f'"content" of {where} has a part of type {kind!r}: parts must be {{"type": "text", "text": ...}}'
            )
        texts.append(text)
    return "".join(texts)


def _pop_learned(message: dict[str, Any], where: str) -> bool | None:
    """Take out what a message says of its being learned; None if it says nothing."""
    said = set()
    for key in _UNCLEAR:
        if message.get(key) is not None:
            raise BadRecordError(
                f'"{key}" of {where} is not supported: write "weight": 1 to learn it, 0 not to'
            )
    for key, affirmed in _LEARNED.items():
        value = message.pop(key, None)
        if value is None:
            continue
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            raise BadRecordError(
                f'"{key}" of {where} must be true or false (or 1 or 0), got {value!r}: a message is learned or not'
            )
        said.add(bool(value) == affirmed)
    if len(said) > 1:
        raise BadRecordError(f"{where} asks both to be learned and not to be")
    return said.pop() if said else None
