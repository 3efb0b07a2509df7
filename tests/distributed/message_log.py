"""A log of the messages that a process issues while hybrid tasks take turns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megatron_mux.backbone import cut_experts
from megatron_mux.backbone.communication import GroupExchange
from megatron_mux.backbone.exchange import PendingResult
from megatron_mux.backbone.pieces import IssuedMessage, Message, PendingTensor


@contextmanager
def logged() -> Iterator[list[tuple[str, int]]]:
    """Context that logs kind and elements of each message, in the order in which they are issued.

    Those of expert ranks differ in size: their elements are logged as 0.
    """
    log: list[tuple[str, int]] = []
    issue = GroupExchange.issue

    def issue_and_log(self: GroupExchange, message: Message) -> PendingResult:
        log.append((message.kind, message.tensor.numel()))
        return issue(self, message)

    def begin_and_log(kind: str, pending: PendingTensor) -> IssuedMessage:
        log.append((kind, 0))
        return IssuedMessage(kind, pending)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cut_experts, "IssuedMessage", begin_and_log)
        patch.setattr(GroupExchange, "issue", issue_and_log)
        yield log
