"""Rows that hold no record, and records that cannot be used."""

from __future__ import annotations

from typing import Any


class BadRecordError(Exception):
    """A row does not hold a record: the message completes "line 7: "."""


class UnusableRecordError(BadRecordError):
    """A row holds a record that no sequence can be made of: it is left out as long as others can be used."""


def check_encodable(text: str, where: str) -> None:
    """Refuse half of a surrogate pair: JSON may spell it, but it is no character and no tokenizer takes it.

    Raises:
        BadRecordError: The text holds one.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRecordError(f"{where} holds half a surrogate pair (character {error.start})") from None


def json_kind(value: Any) -> str:
    """What JSON calls a value's type."""
    if value is None:
        return "null"
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), type(value).__name__)
