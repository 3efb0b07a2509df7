"""Attributes that have another value for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Context in which an attribute has another value."""
    with replaced_in((owner,), name, value):
        yield


@contextmanager
def replaced_in(owners: Iterable[Any], name: str, value: Any) -> Iterator[None]:
    """Context in which an attribute of several objects has another value."""
    before = [(owner, getattr(owner, name)) for owner in owners]
    try:
        for owner, _ in before:
            setattr(owner, name, value)
        yield
    finally:
        for owner, own in before:
            setattr(owner, name, own)
