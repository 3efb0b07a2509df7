"""The memory of a session, measured once on random inputs when it joins (Menos section 3.3)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from megatron_mux.kernels.attention.short import LONGEST, padded_length
from megatron_mux.split.protocol.agreement import Proposal
from megatron_mux.split.server.body import Body, Rows

PROFILED_PASSES = 5
"""Passes over its largest request that `profile` computes at least: what joining costs a client, in its rows."""


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
        forward_fixed, backward_fixed: Of `forward` and `backward`, what smaller requests need, too.
    """

    rows: int
    forward: int
    graph: int
    backward: int
    hidden: int
    lasting: int
    forward_fixed: int = 0
    backward_fixed: int = 0

    @property
    def joining(self) -> int:
        """What must be there for the session to join: what lasts, and one backward pass."""
        return self.lasting + self.backward

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
        return self._between(self.forward, self.forward_fixed, rows)

    def backward_of(self, rows: int) -> int:
        """`backward` of a request of other rows."""
        return self._between(self.backward, self.backward_fixed, rows)

    def scaled(self, size: int, rows: int) -> int:
        """`graph` or `hidden` of a request of other rows."""
        return -(-size * rows // self.rows)

    def _between(self, size: int, fixed: int, rows: int) -> int:
        """Not below the truth: the peak is at one of several moments, each linear in the rows."""
        return self.scaled(size, rows) if rows > self.rows else fixed + self.scaled(size - fixed, rows)

    def fields(self) -> dict[str, Any]:
        """The figures, for a log."""
        return {f"{name}_bytes": value for name, value in asdict(self).items() if name != "rows"}


def worst_case_lengths(longest: int, device: str) -> list[int]:
    """The lengths, up to the longest, of which a row needs most: one of them does.

    A GPU computes all lengths alike. A CPU keeps the weights of all pairs of a short sequence's tokens, and pads it.
    How many sequences a request has does not matter: short ones may be beside long ones.

    Args:
        longest: Tokens of the longest sequence.
        device: `cpu` or `cuda`.
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
        rows: Of all of them.
        most: Sequences.
        longest: Tokens of the longest one.
    """
    left, lengths = rows, list[int]()
    for behind in reversed(range(min(rows, most))):
        lengths.append(min(left - behind, max(1, longest - len(lengths) % 2)))
        left -= lengths[-1]
    return [*lengths, left] if left else lengths


def profile(body: Body, name: str, proposal: Proposal, layers: range, smaller: bool = True) -> Memory:
    """Measure a session's memory on random inputs of the size that its client has configured.

    Nothing changes: gradients are dropped, no optimizer steps.

    Args:
        body: The session is in it.
        name: Of the session.
        proposal: What the client asked for.
        layers: Of the session's body.
        smaller: Whether to measure a small request, too: without, `forward_fixed` and `backward_fixed` are 0.
    """
    backbone, most = body.backbone, proposal.train_rows
    longest = min(proposal.longest, most)
    prefixed = proposal.adapter_spec().virtual_tokens > 0

    def measured(count: int, length: int) -> tuple[int, int, int, int]:
        lengths = [length] * (count // length) + [count % length] * (count % length > 0)
        if prefixed:
            lengths = sequences_behind_prefixes(count, proposal.sequences, longest)
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(count, backbone.shape.hidden, generator=generator)
        hidden = hidden.to(backbone.device, backbone.dtype)
        rows = Rows(name, tuple(lengths), tuple(range(len(lengths))), 0, True, hidden, True)
        return body.measure(rows, layers)

    def fixed(large: int, little: int) -> int:
        """Where the line through both meets a request without rows."""
        return max(0, (little * most - large * few) // (most - few)) if most > few else 0

    lengths = [longest] if prefixed else worst_case_lengths(longest, backbone.device.type)
    forward, graph, backward, lasting = map(max, zip(*(measured(most, s) for s in lengths), strict=True))
    hidden = most * backbone.shape.hidden * backbone.dtype.itemsize
    memory = Memory(most, forward, graph, backward, hidden, lasting)
    if not smaller:
        return memory
    few = min(most, proposal.sequences) if prefixed else 1
    small = measured(few, 1)
    return replace(memory, forward_fixed=fixed(forward, small[0]), backward_fixed=fixed(backward, small[2]))
