"""Carries keys and values from chunk to chunk of a sequence, and their gradients back (MuxTune section 3.5).

The chunks of a pack are computed one after another. Each leaves the keys and values of sequences that continue in the
next chunk, and later chunks attend to them as to their own. Backward passes run in reverse: gradients of later chunks
with respect to what earlier ones left are summed here, in fp32 (fp64 for fp64) whatever the backbone's dtype, and each
earlier chunk adds its part in its own backward pass. Chunked gradients so equal unchunked ones.
Shapes: n rows of a segment, T rows of the chunk, p rows of earlier chunks, g key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_mux.kernels.attention.segments import Segment

_Key = tuple[int, str, int]  # layer, task, sequence


class Carry:
    """Keys, values and gradients that the chunks of one micro-batch leave for each other on one stage.

    Forward passes must come in the order of chunks, backward passes in reverse; what a chunk left is dropped once its
    backward pass has run. A forward pass that is computed again (recomputation) finds what it found the first time.
    """

    def __init__(self) -> None:
        self._left: dict[_Key, list[tuple[Tensor, Tensor]]] = {}
        self._gradients: dict[tuple[_Key, int], tuple[Tensor, Tensor]] = {}

    def extend(
        self, layer: int, key: Tensor, value: Tensor, segments: Sequence[Segment]
    ) -> tuple[Tensor, Tensor]:
        """Prepend what earlier chunks left to this chunk's keys and values, and leave these for later ones.

        Args:
            key: `[T, g, D]`, as core attention takes it.
            value: `[T, g, D]`.
            segments: Of the chunk.

        Returns:
            `[p + T, g, D]` each: first the past of every segment that has one, in the order of segments.
        """
        if not any(segment.past or segment.continues for segment in segments):
            return key, value
        extended: tuple[Tensor, Tensor] = _Extend.apply(key, value, self, layer, tuple(segments))  # type: ignore[no-untyped-call]
        return extended

    def past(self, layer: int, segment: Segment) -> list[tuple[Tensor, Tensor]]:
        """The keys and values of a segment's tokens in earlier chunks, chunk by chunk.

        Raises:
            RuntimeError: They have not been computed, or have been dropped.
        """
        caches, rows = [], 0
        for pair in self._left.get((layer, segment.task, segment.sequence), []):
            if rows == segment.past:
                break
            caches.append(pair)
            rows += pair[0].shape[0]
        if rows != segment.past:
            raise RuntimeError(
                f"layer {layer}: sequence {segment.sequence} of {segment.task} begins at token {segment.past}, but "
                f"keys of {rows} tokens are there: chunks run forward in order and backward in reverse"
            )
        return caches

    def leave(self, layer: int, segment: Segment, key: Tensor, value: Tensor) -> None:
        """Keep a segment's keys and values for later chunks."""
        pairs = self._left.setdefault((layer, segment.task, segment.sequence), [])
        if sum(pair[0].shape[0] for pair in pairs) == segment.past:  # else computed again
            pairs.append((key.detach().clone(), value.detach().clone()))

    def give_back(self, layer: int, segment: Segment, key: Tensor, value: Tensor) -> None:
        """Add gradients `[past, g, D]` with respect to what the earlier chunks of a segment left."""
        name, at = (layer, segment.task, segment.sequence), 0
        for pair in self.past(layer, segment):
            rows = slice(at, at + pair[0].shape[0])
            if (name, at) in self._gradients:
                for total, part in zip(self._gradients[name, at], (key, value), strict=True):
                    total.add_(part[rows])
            else:
                dtype = torch.promote_types(key.dtype, torch.float32)
                self._gradients[name, at] = key[rows].to(dtype, copy=True), value[rows].to(dtype, copy=True)
            at = rows.stop

    def forget(self, segments: Sequence[Segment], layers: range) -> None:
        """Drop what a chunk left in these layers, once its backward pass is done, even if nothing had a gradient."""
        for segment in segments:
            if not segment.continues:
                continue
            for layer in layers:
                self._cut(self._left.get((layer, segment.task, segment.sequence), []), segment.past)

    def collect(self, layer: int, segment: Segment) -> tuple[Tensor, Tensor] | None:
        """The summed gradients `[n, g, D]` of later chunks with respect to what this segment left, which is dropped."""
        name = (layer, segment.task, segment.sequence)
        self._cut(self._left.get(name, []), segment.past)
        return self._gradients.pop((name, segment.past), None)

    @staticmethod
    def _cut(pairs: list[tuple[Tensor, Tensor]], rows: int) -> None:
        """Keep the first `rows` rows."""
        while pairs and sum(pair[0].shape[0] for pair in pairs) > rows:
            pairs.pop()


class _Extend(torch.autograd.Function):
    """See `Carry.extend`; the backward is where gradients of different chunks meet."""

    @staticmethod
    def forward(
        ctx: Any, key: Tensor, value: Tensor, carry: Carry, layer: int, segments: tuple[Segment, ...]
    ) -> tuple[Tensor, Tensor]:
        pasts = [carry.past(layer, segment) for segment in segments if segment.past]
        for segment in segments:
            if segment.continues:
                rows = slice(segment.start, segment.start + segment.length)
                carry.leave(layer, segment, key[rows], value[rows])
        ctx.carry, ctx.layer, ctx.segments = carry, layer, segments
        keys = [pair[0] for past in pasts for pair in past]
        values = [pair[1] for past in pasts for pair in past]
        return torch.cat([*keys, key]), torch.cat([*values, value])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_key: Tensor, d_value: Tensor) -> tuple[Tensor | None, ...]:
        carry, layer = ctx.carry, ctx.layer
        at = 0
        for segment in ctx.segments:
            if segment.past:
                rows = slice(at, at + segment.past)
                carry.give_back(layer, segment, d_key[rows], d_value[rows])
                at += segment.past
        own_key, own_value = d_key[at:].clone(), d_value[at:].clone()
        for segment in ctx.segments:
            later = carry.collect(layer, segment) if segment.continues else None
            if later is not None:
                rows = slice(segment.start, segment.start + segment.length)
                for part, total in zip((own_key, own_value), later, strict=True):
                    part[rows] = (part[rows].to(total.dtype) + total).to(part.dtype)
        return own_key, own_value, None, None, None
