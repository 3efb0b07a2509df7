"""When each rank issues its transfers, so that ranks never wait for each other in a circle.

NCCL occupies a stream with a transfer until both ranks have issued it. Much on a GPU waits for transfers that the rank
has issued: computations that need them, a wait for the device, the release of memory, the first launch of a kernel,
and with one hardware queue everything that is issued later. If the other rank issues its end only after something of
this rank that waits, both hang.

They cannot if every rank issues its actions and transfers in the order of one sequence of the whole pipeline, in which
a transfer is one event of both its ranks. Consider the first event of the sequence that is not complete: everything
before it is complete on all ranks, so nothing that its ranks have issued before still waits, they issue the event, and
it completes. This holds wherever a rank waits for what it has issued, even if it runs one operation at a time.

The sequence comes from a simulation in which every pass takes the same time. A receive is then issued just before the
pass during which its tensor is likely to arrive.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron_mux.pipeline.action import Action
from megatron_mux.pipeline.template import Template

AHEAD = 2
"""Most tensors that a rank has received from a neighbour, or is receiving, before it needs them."""


def received_ahead(stages: int, ranks: int, backward: bool) -> int:
    """Most tensors that a rank has received in one direction before it needs them.

    In 1F1B the next input comes during a backward pass, and gradients are used at once.

    Args:
        stages, ranks: Of the pipeline.
        backward: Whether they are gradients.
    """
    if stages > ranks:
        return AHEAD
    return int(not backward)


def sends_kept(ranks: int) -> int:
    """How many sent tensors are kept alive in each direction."""
    return 2 * (ranks + 1)


@dataclass(frozen=True)
class Transfer:
    """A tensor on its way to the neighbouring stage.

    Attributes:
        source: The action that computes it.
        target: The action that needs it.
    """

    source: Action
    target: Action


def transfers_to(actions: Iterable[Action], stages: int, ranks: int) -> Iterator[Transfer]:
    """The transfers that these actions need."""
    for action in actions:
        if (source := action.before(stages, ranks)) is not None:
            yield Transfer(source, action)


def issue_order(
    template: Template, rank: int, stages: int, ends_in_turn: bool = False, given: Iterable[Transfer] = ()
) -> Iterator[Action | Transfer]:
    """One rank's actions, and the transfers that it sends or receives, in the order in which it must issue them.

    The order is worked out as far as it is asked for.

    Args:
        template: Actions of all ranks, validated by `check`.
        ends_in_turn: Whether all ranks finish a bucket before any finishes the next one. Pipelines that sum their
            gradients meet where buckets end: if their templates differ, they need one order of these ends.
        given: Transfers from outside the template, in order: their tensors are there from the beginning.

    Raises:
        RuntimeError: Actions wait for each other in a circle.
    """
    ranks = len(template)
    for event in _Sequence(template, stages, ends_in_turn).run(given):
        if isinstance(event, Action):
            if event.stage % ranks == rank:
                yield event
        elif rank in (event.source.stage % ranks, event.target.stage % ranks):
            yield event


class _Sequence:
    """The sequence of all ranks' actions and transfers; see `issue_order` for the arguments."""

    def __init__(self, template: Template, stages: int, ends_in_turn: bool) -> None:
        self.stages, self.ranks = stages, len(template)
        self._rows = [iter(actions) for actions in template]
        self._due = [next(row, None) for row in self._rows]
        self._is_running = [False] * self.ranks
        self._events: list[tuple[float, int, int]] = []  # when a rank's running action ends, in order, rank
        self._begun = 0
        # By receiving rank and direction: tensors computed but not transferred, transferred but not taken.
        self._outgoing = {
            (r, backward): deque[Transfer]() for r in range(self.ranks) for backward in (False, True)
        }
        self._arrived: dict[tuple[int, bool], set[Action]] = {inbox: set() for inbox in self._outgoing}
        self._ends_in_turn = ends_in_turn
        self._ended = 0

    def run(self, given: Iterable[Transfer]) -> Iterator[Action | Transfer]:
        """All events."""
        for transfer in given:
            self._outgoing[self._inbox(transfer.target)].append(transfer)
        for rank in range(self.ranks):
            yield from self._begin(rank, 0.0)
        while self._events:
            now, _, rank = heapq.heappop(self._events)
            action = self._due[rank]
            assert action is not None
            yield action
            self._is_running[rank] = False
            self._due[rank] = next(self._rows[rank], None)
            if (target := action.after(self.stages, self.ranks)) is not None:
                inbox = self._inbox(target)
                self._outgoing[inbox].append(Transfer(action, target))
                yield from self._transfers(inbox, None)
                yield from self._begin(inbox[0], now)
            yield from self._begin(rank, now)
            if action.kind == "N" and self._ends_in_turn:
                self._ended += 1
                for other in range(self.ranks):
                    yield from self._begin(other, now)
        if stuck := [str(action) for action in self._due if action is not None]:
            raise RuntimeError(f"these actions wait for each other: {', '.join(stuck)}")

    def _inbox(self, target: Action) -> tuple[int, bool]:
        return target.stage % self.ranks, target.is_backward

    def _begin(self, rank: int, now: float) -> Iterator[Transfer]:
        """Begin a rank's next action if the rank is free and has what the action needs."""
        action = self._due[rank]
        if self._is_running[rank] or action is None or not self._is_its_turn(action):
            return
        takes = action.before(self.stages, self.ranks) is not None
        inbox = self._inbox(action)
        if takes:
            yield from self._transfers(inbox, action)
            if action not in self._arrived[inbox]:
                return
            self._arrived[inbox].remove(action)
        self._is_running[rank] = True
        self._begun += 1
        heapq.heappush(self._events, (now + action.is_pass, self._begun, rank))
        if takes:
            yield from self._transfers(inbox, None)

    def _is_its_turn(self, action: Action) -> bool:
        """Whether an action that ends a bucket may run: bucket by bucket, from the last rank to the first."""
        if action.kind != "N" or not self._ends_in_turn:
            return True
        return (action.bucket, self.ranks - 1 - action.stage) == divmod(self._ended, self.ranks)

    def _transfers(self, inbox: tuple[int, bool], wanted: Action | None) -> Iterator[Transfer]:
        """Transfer what has been computed: `AHEAD` tensors, or as many as it takes to get to what `wanted` needs.

        With several stages to a rank, tensors are not always needed in the order in which they are sent.
        """
        outgoing, arrived = self._outgoing[inbox], self._arrived[inbox]
        is_done = self._due[inbox[0]] is None
        while outgoing and (
            is_done or len(arrived) < AHEAD or (wanted is not None and wanted not in arrived)
        ):
            transfer = outgoing.popleft()
            arrived.add(transfer.target)
            yield transfer
