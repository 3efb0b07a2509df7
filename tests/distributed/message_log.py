"""A log of the messages of tensor ranks that a process issues."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megatron_mux.backbone.communication import GroupExchange
from megatron_mux.backbone.exchange import Pending
from megatron_mux.backbone.pieces import Message


@contextmanager
def logged() -> Iterator[list[tuple[str, int]]]:
    """Context that logs kind and elements of each message, in the order in which they are issued."""
    log: list[tuple[str, int]] = []
    issue = GroupExchange.issue

    def issue_and_log(self: GroupExchange, message: Message) -> Pending:
        log.append((message.kind, message.tensor.numel()))
        return issue(self, message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupExchange, "issue", issue_and_log)
        yield log
