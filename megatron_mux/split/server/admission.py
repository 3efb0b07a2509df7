"""Which sessions are let in: those that the server can compute, and that fit beside the others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from megatron_mux.errors import UserError
from megatron_mux.memory.worker import LostProcess
from megatron_mux.shape import BackboneShape
from megatron_mux.split.protocol.agreement import Proposal
from megatron_mux.split.protocol.wire import Dtype, RefusedError
from megatron_mux.split.server.session_memory import Memory

_MIB = 1 << 20


@dataclass(frozen=True)
class _Claim:
    """What a session has been promised: bytes that it may hold while it waits, and of its largest request beside."""

    standing: int
    most: int


class AdmissionController:
    """Memory that sessions have been promised.

    A session may hold `Memory.standing` while it waits for the memory of its next request. If all sessions' fits beside
    the largest request of any of them, then each request can run once those before it have ended. Graphs that policies
    keep need not be counted: their backward passes wait for no memory, and free them.

    Args:
        capacity: Bytes.
        share: Part of the capacity that one client's sessions may be promised.
    """

    def __init__(self, capacity: int, share: float = 1.0) -> None:
        self._capacity = capacity
        self._most_each = int(capacity * share)
        self._claims: dict[str, _Claim] = {}

    def claim(self, name: str, memory: Memory, rows: int) -> None:
        """Promise a session its memory.

        Args:
            name: Of the session, `CLIENT/TASK`.
            rows: Of its largest request, which may be an evaluation's.

        Raises:
            RefusedError: It does not fit: `too_large` not even alone, `too_many` not beside the client's others, `full`
                not beside those of all clients. It is then promised nothing.
        """
        asked = _Claim(memory.standing, memory.most(rows))
        if _needed([asked]) > self._most_each:
            raise RefusedError(
                "too_large",
                f"its adapter ({memory.lasting / _MIB:.0f} MiB) and a request of {memory.rows} tokens with a backward "
                f"pass, or {rows} without, need {_needed([asked]) / _MIB:.0f} MiB, and a client may have "
                f"{self._most_each / _MIB:.0f} of the server's {self._capacity / _MIB:.0f} MiB beside its weights "
                "(--max-memory-each): use smaller batches, for training (gradient_accumulation_steps) and for "
                "evaluation",
            )
        others = self._claims
        needed = _needed([asked, *others.values()])
        if needed > self._capacity:
            raise RefusedError(
                "full",
                f"{len(others)} sessions use the server's memory: with one more they could need "
                f"{needed / _MIB:.0f} MiB, and there are {self._capacity / _MIB:.0f} MiB beside the weights",
                retry=True,
            )
        client = f"{name.partition('/')[0]}/"
        claims = [claim for other, claim in others.items() if other.startswith(client)]
        if _needed([asked, *claims]) > self._most_each:
            raise RefusedError(
                "too_many",
                f"with {len(claims)} others of this client the session could need "
                f"{_needed([asked, *claims]) / _MIB:.0f} MiB, and a client may have {self._most_each / _MIB:.0f} "
                "(--max-memory-each)",
                retry=True,
            )
        self._claims[name] = asked

    def leave(self, name: str) -> None:
        """Take back what a session was promised, if anything."""
        self._claims.pop(name, None)


def _needed(claims: Sequence[_Claim]) -> int:
    """Bytes with which each request of some sessions can run in the end."""
    return sum(claim.standing for claim in claims) + max(claim.most for claim in claims)


async def examine(
    proposal: Proposal,
    shape: BackboneShape,
    layers: range,
    most_message: int,
    predict: Callable[[Proposal], Awaitable[Memory]],
) -> tuple[range, Memory]:
    """The layers of a session's body, and the memory that it needs on the rank that needs most.

    Args:
        layers: That the server has.
        most_message: Bytes of the largest message that it receives.
        predict: See `SessionPredictor`.

    Raises:
        RefusedError: The server cannot compute it, or would not receive its requests.
    """
    wire = Dtype[proposal.wire.upper()]
    decoded = Dtype.F32.row_bytes(shape.hidden) if wire is Dtype.I8 else 0
    message = proposal.rows * (wire.row_bytes(shape.hidden) + decoded)
    if message > most_message:
        raise RefusedError(
            "too_large",
            f"a request of {proposal.rows} tokens takes {message / _MIB:.0f} MiB, and the server receives "
            f"{most_message / _MIB:.0f} MiB of a client (a quarter of --max-bytes-in-flight): use smaller batches",
        )
    try:
        body = proposal.body(shape)
        if body.start < layers.start or body.stop > layers.stop:
            least = f"--cut-front {layers.start} and --cut-back {shape.layers - layers.stop}"
            raise UserError(
                f"the server holds layers {layers.start} to {layers.stop - 1}: it needs at least {least}"
            )
        return body, await predict(proposal)
    except UserError as error:
        raise RefusedError("proposal", str(error)) from None
    except LostProcess:
        why = "the server lost the process that predicts a session's memory"
        raise RefusedError("full", why, retry=True) from None
