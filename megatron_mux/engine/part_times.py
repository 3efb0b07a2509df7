"""When pieces of hybrid tasks computed in turns ran, and their messages: taken while steps are timed only.

Nothing waits for it. On a GPU moments are events, read once the steps are done. A message's arrival is an event of a
stream of its own that waits for the message and computes nothing; on a CPU, gloo's thread takes the time. Gloo tells of
a reduce-scatter's arrival only when it is awaited, so on a CPU it may seem to take longer than it does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from megatron_mux import runtime
from megatron_mux.backbone.pieces import IssuedMessage, Message, PendingTensor
from megatron_mux.clock import Clock, Mark
from megatron_mux.pipeline.action import Action, TimedAction, TimedPart
from megatron_mux.pipeline.execute import Timer


@dataclass
class _Part:
    """A piece or a message; without an end while it is under way."""

    batch: int
    piece: int
    message: str
    start: Mark
    stop: Mark = None


class PassTimes:
    """An `Observer` of one pass.

    Args:
        labels: Text that names each batch.
        clock: Takes the times.
        stream: On a GPU, waits for messages.
    """

    def __init__(self, labels: Sequence[str], clock: Clock, stream: Any = None) -> None:
        self._labels = labels
        self._clock = clock
        self._stream = stream
        self._done = [0] * len(labels)
        self._sent: list[_Part | None] = [None] * len(labels)
        self._parts: list[_Part] = []

    def begins(self, index: int) -> None:
        """A piece begins; the message that it needs has arrived."""
        now, sent = self._clock.mark(), self._sent[index]
        if sent is not None:
            self._arrived(sent, now)
        self._parts.append(_Part(index, self._done[index], "", now))
        self._done[index] += 1

    def ends(self, index: int) -> None:
        """The piece that began last has been computed."""
        self._parts[-1].stop = self._clock.mark()

    def issued(self, index: int, message: Message | IssuedMessage, pending: PendingTensor) -> None:
        """Find out when the message arrives."""
        sent = self._sent[index] = _Part(index, self._done[index] - 1, message.kind, self._clock.mark())
        self._parts.append(sent)
        if self._stream is not None:
            # `pending` keeps the tensors until the stream that computes has waited, too.
            with torch.cuda.stream(self._stream):
                pending.wait()
                self._arrived(sent, self._clock.mark())
            return
        try:
            future = pending.work.get_future()
        except (AttributeError, RuntimeError):  # gloo's reduce-scatter has none
            return
        future.then(lambda _: self._arrived(sent, self._clock.mark()))

    @staticmethod
    def _arrived(sent: _Part, now: Mark) -> None:
        if sent.stop is None:
            sent.stop = now

    def parts(self) -> tuple[TimedPart, ...]:
        """What has ended: the pieces, then the messages, each in order of time."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)  # its last event is read, too
        ended = [part for part in self._parts if part.stop is not None]
        times = iter(self._clock.seconds([mark for part in ended for mark in (part.start, part.stop)]))
        parts = [
            TimedPart(
                part.batch, part.piece, next(times), next(times), self._labels[part.batch], part.message
            )
            for part in ended
        ]
        pieces = [part for part in parts if not part.message]
        # One after another, as they arrive: gloo has two threads, so messages may overtake each other.
        messages = sorted((part for part in parts if part.message), key=lambda part: part.stop)
        link_free = -math.inf
        for i, part in enumerate(messages):
            messages[i] = replace(part, start=max(part.start, link_free))
            link_free = part.stop
        return (*pieces, *messages)


class PartTimes:
    """Times of the pieces and messages of all passes of one or several steps.

    Args:
        device: Where they are computed.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)
        # Of high priority, so that with one hardware queue its waiting does not hold up computation.
        self._stream = torch.cuda.Stream(device, priority=-1) if runtime.is_gpu(device) else None
        self._passes: dict[Action, PassTimes] = {}

    def of(self, action: Action, labels: Sequence[str]) -> PassTimes:
        """The observer of a pass that begins, with a text for each batch."""
        times = self._passes[action] = PassTimes(labels, self._clock, self._stream)
        return times

    def added(self, timer: Timer) -> Timer:
        """A timer that adds the parts of each action before it calls another timer."""
        return partial(self._tell, timer)

    def _tell(self, timer: Timer, timed: TimedAction) -> None:
        times = self._passes.pop(timed.action, None)
        timer(timed if times is None else replace(timed, parts=times.parts()))
