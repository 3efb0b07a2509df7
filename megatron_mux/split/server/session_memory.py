"""What a session and its requests take in memory, and the passes that tell (Menos section 3.3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_mux.kernels.attention.short import LONGEST, padded_length
from megatron_mux.split.protocol.agreement import Proposal
from megatron_mux.split.server.body import Body, Rows


@dataclass(frozen=True)
class Peak:
    """Bytes that a computation took.

    Attributes:
        peak: The most at once, beyond what was there before.
        lasting: What is still there.
    """

    peak: int
    lasting: int


Meter = Callable[[Callable[[], object]], Peak]
"""Runs a computation and counts its memory."""


@dataclass(frozen=True)
class Memory:
    """What a session and its requests take, in bytes.

    Attributes:
        rows: Rows of the request that the figures of requests are of.
        forward: M_f, a forward pass without a graph.
        graph: What the graph of a forward pass keeps until its backward.
        backward: M_b, a forward pass with a graph and its backward.
        hidden: The hidden states of the request.
        lasting: A + O, adapter, gradients and optimizer state.
        few: Rows of a small request.
        few_forward, few_backward: `forward` and `backward` of it.
    """

    rows: int
    forward: int
    graph: int
    backward: int
    hidden: int
    lasting: int
    few: int = 0
    few_forward: int = 0
    few_backward: int = 0

    @property
    def standing(self) -> int:
        """What a session may hold while it waits for more: what lasts, and the input of a forward pass."""
        return self.lasting + self.hidden

    def most(self, rows: int) -> int:
        """What a request needs at most beside `standing`.

        Args:
            rows: Of its largest request, which may be an evaluation's; then no other input is kept.
        """
        evaluation = self.forward_of(rows) + self.scaled(self.hidden, rows)
        return max(self.backward, evaluation - self.hidden)

    def forward_of(self, rows: int) -> int:
        """`forward` of a request of other rows."""
        return self._between(self.forward, self.few_forward, rows)

    def backward_of(self, rows: int) -> int:
        """`backward` of a request of other rows."""
        return self._between(self.backward, self.few_backward, rows)

    def scaled(self, size: int, rows: int) -> int:
        """`graph` or `hidden` of a request of other rows."""
        return -(-size * rows // self.rows)

    def _between(self, size: int, small: int, rows: int) -> int:
        """Not below the truth: the peak is at one of several moments, each linear in the rows."""
        if rows > self.rows or self.few >= self.rows:
            return self.scaled(size, rows)
        # Where the line through both requests meets one without rows.
        fixed = max(0, (small * self.rows - size * self.few) // (self.rows - self.few))
        return fixed + self.scaled(size - fixed, rows)

    def fields(self) -> dict[str, Any]:
        """The figures, for a log."""
        names = ("forward", "graph", "backward", "hidden", "lasting")
        return {f"{name}_bytes": getattr(self, name) for name in names}


def worst_case_lengths(longest: int, device: str) -> list[int]:
    """The lengths, up to the longest, of which a row needs most: one of them does.

    A GPU computes all lengths alike. A CPU keeps the weights of all pairs of a short sequence's tokens, and pads it.
    How many sequences a request has does not matter: short ones may be beside long ones.

    Args:
        longest: Tokens of the longest sequence.
    """
    if device != "cpu":
        return [longest]
    # Of those that are padded to one length, the shortest is padded most; few sequences are shorter than that.
    short = [n for n in range(2, min(longest, LONGEST) + 1) if padded_length(n) > padded_length(n - 1)]
    most_pairs = max(short, key=lambda n: padded_length(n) ** 2 / n, default=longest)
    most_padding = max(short, key=lambda n: padded_length(n) / n, default=longest)
    return sorted({longest, most_pairs, most_padding})


def sequences_behind_prefixes(rows: int, most: int, longest: int) -> list[int]:
    """Lengths that need most with virtual tokens, which are copied for each sequence: as many as there may be.

    The others are as long as they may be; neighbours of different lengths share no mask.

    Args:
        longest: Tokens of the longest one.
    """
    left, lengths = rows, list[int]()
    for behind in reversed(range(min(rows, most))):
        lengths.append(min(left - behind, max(1, longest - len(lengths) % 2)))
        left -= lengths[-1]
    return [*lengths, left] if left else lengths


def profile(body: Body, name: str, proposal: Proposal, layers: range, meter: Meter) -> Memory:
    """Count a session's memory on random inputs of the size that its client has configured.

    Nothing changes: gradients are dropped, no optimizer steps.
    """
    backbone, most = body.backbone, proposal.train_rows
    longest = min(proposal.longest, most)
    prefixed = proposal.adapter_spec().virtual_tokens > 0

    def counted(count: int, length: int) -> tuple[int, int, int]:
        lengths = [length] * (count // length) + [count % length] * (count % length > 0)
        if prefixed:
            lengths = sequences_behind_prefixes(count, proposal.sequences, longest)
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(count, backbone.shape.hidden, generator=generator)
        hidden = hidden.to(backbone.device, backbone.dtype)
        rows = Rows(name, tuple(lengths), tuple(range(len(lengths))), 0, True, hidden, True)
        return count_passes(body, rows, layers, meter)

    lengths = [longest] if prefixed else worst_case_lengths(longest, backbone.device.type)
    forward, graph, backward = map(max, zip(*(counted(most, s) for s in lengths), strict=True))
    few = min(most, proposal.sequences) if prefixed else 1
    few_forward, _, few_backward = counted(few, 1)
    hidden = most * backbone.shape.hidden * backbone.dtype.itemsize
    lasting = int(body.parallel.most([body.bytes_of(name)])[0])
    return Memory(most, forward, graph, backward, hidden, lasting, few, few_forward, few_backward)


def count_passes(body: Body, rows: Rows, layers: range, meter: Meter) -> tuple[int, int, int]:
    """Count the memory of passes of a session's rows; its gradients are made zero.

    Returns:
        Bytes of a forward pass without a graph, of a graph, and of a forward pass with its backward, beyond what is
        there before. Of each the most of any rank.
    """
    gradient = torch.zeros_like(rows.hidden)

    def both() -> None:
        _, kept = body.forward([rows], layers, graph=True)
        assert kept is not None
        body.backward(kept, [gradient])

    body.forward([rows], layers, graph=False)  # whatever is allocated once
    forward = meter(lambda: body.forward([rows], layers, graph=False))
    graph = meter(lambda: body.forward([rows], layers, graph=True))
    backward = meter(both)
    body.zero(rows.session)
    most = body.parallel.most((forward.peak, graph.lasting, backward.peak))
    return int(most[0]), int(most[1]), int(most[2])
