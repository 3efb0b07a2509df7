"""Messages, issued without waiting: computations that do not need them go on meanwhile."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from megatron_mux.backbone.pieces import CollectiveGenerator, IssuedMessage, Message, PendingTensor
from megatron_mux.batch.packed_batch import PackedBatch, activate

Made = TypeVar("Made")


class Exchange(ABC):
    """Issues the messages of one rank to other tensor ranks, in the same order on all of them."""

    @abstractmethod
    def issue(self, message: Message) -> PendingResult:
        """Begin to exchange a message, after what the current stream has computed so far.

        The host waits for nothing: neither for the computation nor for the other ranks.
        """


@dataclass(frozen=True)
class PendingResult:
    """A message on its way.

    Attributes:
        result: What it makes.
        work: Its `wait` holds up what follows until the result is there: on a GPU the current stream, not the host.
        sent: Kept until then.
    """

    result: Tensor
    work: Any
    sent: Tensor | None = None

    def wait(self) -> Tensor:
        """The result, for computations that follow."""
        self.work.wait()
        return self.result


@dataclass
class Course(Generic[Made]):
    """A computation with messages that is under way.

    Attributes:
        steps: The computation.
        batch: Its micro-batch.
    """

    steps: CollectiveGenerator[Made]
    batch: PackedBatch


class Observer(Protocol):
    """Is told what `interleave` does, as it does it."""

    def begins(self, index: int) -> None:
        """A piece of a computation begins: what it needs has been awaited."""
        ...

    def ends(self, index: int) -> None:
        """The piece has been computed, or enqueued on a GPU."""
        ...

    def issued(self, index: int, message: Message | IssuedMessage, pending: PendingTensor) -> None:
        """The message after the piece is on its way."""
        ...


def interleave(
    courses: Sequence[Course[Made]],
    order: Sequence[int],
    exchange: Exchange,
    observer: Observer | None = None,
) -> list[Made]:
    """Run computations piece by piece, in an order in which the pieces of one hide the messages of another.

    Args:
        courses: The computations.
        order: For each piece, the index of the computation that it belongs to: as often as that yields, and once more.
        exchange: Carries their messages of tensor ranks.
        observer: Is told of pieces and messages.

    Returns:
        What each has made.

    Raises:
        RuntimeError: The order ends before some computation does, or goes on after its end.
    """
    pending: list[PendingTensor | None] = [None] * len(courses)
    made: dict[int, Made] = {}
    for index in order:
        if index in made:
            raise RuntimeError(f"the launch order goes on with computation {index}, which has ended")
        waiting, pending[index] = pending[index], None
        result = None if waiting is None else waiting.wait()
        course = courses[index]
        if observer is not None:
            observer.begins(index)
        message = None
        try:
            with activate(course.batch):
                message = course.steps.send(result)
        except StopIteration as end:
            made[index] = end.value
        if observer is not None:
            observer.ends(index)
        if message is not None:
            sent = message.pending if isinstance(message, IssuedMessage) else exchange.issue(message)
            pending[index] = sent
            if observer is not None:
                observer.issued(index, message, sent)
    if len(made) < len(courses):
        raise RuntimeError(
            f"the launch order ends before computations {set(range(len(courses))) - set(made)}"
        )
    return [made[index] for index in range(len(courses))]
