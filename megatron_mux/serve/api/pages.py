"""Lists as OpenAI's clients page through them: `after` the last id that they know, at most `limit` entries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import Query

Row = TypeVar("Row")
Limit = Annotated[int, Query(ge=1, le=100)]
After = Annotated[str | None, Query(max_length=64)]


def page(rows: Sequence[Row], limit: int, show: Callable[[Row], dict[str, Any]]) -> dict[str, Any]:
    """A page of a list.

    Args:
        rows: Those of the page, and the next one if there is any.
        limit: Most entries of the page.
        show: Makes the object that the API answers with.
    """
    data = [show(row) for row in rows[:limit]]
    return {
        "object": "list",
        "data": data,
        "has_more": len(rows) > limit,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }
