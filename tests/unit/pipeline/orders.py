"""Orders in which ranks may not issue their transfers: with them, pipelines hang."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from megatron_mux.pipeline.action import Action
from megatron_mux.pipeline.template import Template
from megatron_mux.pipeline.transfers import AHEAD, Transfer, issue_order

Order = Callable[..., Iterator[Action | Transfer]]


def receives_two_ahead(
    template: Template, rank: int, stages: int, ends_in_turn: bool, given: Iterable[Transfer]
) -> Iterator[Action | Transfer]:
    """Receives are issued as they used to be: always two ahead of their use."""
    ranks = len(template)
    coming = {
        backward: [
            Transfer(action, target)
            for action in template[(rank + (1 if backward else -1)) % ranks]
            if action.is_backward == backward and (target := action.after(stages, ranks)) is not None
        ]
        for backward in (False, True)
    }
    arrived: set[Action] = set()
    for action in template[rank]:
        inbox = coming[action.is_backward]
        ahead = 0
        while inbox and action.before(stages, ranks) is not None and (ahead < AHEAD or action not in arrived):
            ahead += action in arrived
            arrived.add(inbox[0].target)
            yield inbox.pop(0)
        yield action
        if (target := action.after(stages, ranks)) is not None:
            yield Transfer(action, target)


def sends_at_once(
    template: Template, rank: int, stages: int, ends_in_turn: bool, given: Iterable[Transfer]
) -> Iterator[Action | Transfer]:
    """A result is sent right after it was computed, whether or not its receiver has room by then."""
    for event in issue_order(template, rank, stages, ends_in_turn, given):
        if isinstance(event, Action):
            yield event
            if (target := event.after(stages, len(template))) is not None:
                yield Transfer(event, target)
        elif event.target.stage % len(template) == rank:
            yield event


def ends_in_any_order(
    template: Template, rank: int, stages: int, ends_in_turn: bool, given: Iterable[Transfer]
) -> Iterator[Action | Transfer]:
    """Each pipeline ends its buckets when it gets there."""
    return issue_order(template, rank, stages, False, given)
