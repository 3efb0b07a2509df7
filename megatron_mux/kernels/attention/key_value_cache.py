"""Keys and values of sequences that are generated, a token at a time, with room for the tokens to come.

A `Carry` keeps pieces and joins them for every chunk. Here each layer has one tensor, which is written in place and
read where it lies: a step copies the new tokens only, however long the sequences are.
Shapes: T rows of the micro-batch, n sequences, S positions of the longest, h query heads, g key-value heads, D head
size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_mux.kernels.attention.segments import Bounds, Prefix, Segment, segment_attention
from megatron_mux.runtime import to_device

_Name = tuple[str, int]  # task, sequence


@dataclass(frozen=True)
class _Step:
    """Where the tokens of a micro-batch belong, one of each sequence.

    Attributes:
        segments: Of the micro-batch.
        rows: `[n]` int64, the cache row of each.
        at: `[n]` int64, its position in that row.
        order: `[n]` int64, which of the tokens is that of each cache row.
        longest: S.
    """

    segments: Sequence[Segment]
    rows: Tensor
    at: Tensor
    order: Tensor
    longest: int = field(kw_only=True)


class KeyValueCache:
    """Keys and values of some sequences on one stage.

    The first micro-batches hold the sequences' prompts, whole; each later one holds the next token of every sequence
    that is left, except those that were added and whose prompts come in the same run of passes. A task's prefix is kept
    as the first positions of its sequences.

    Args:
        sequences: Task and number of each sequence.
        room: Positions of the longest sequence, those of a prefix included.
    """

    def __init__(self, sequences: Iterable[_Name], room: int) -> None:
        self._rows = {name: row for row, name in enumerate(sequences)}
        self._size = len(self._rows)
        self._room = room
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}  # [n, g, room, D] each
        self._step: _Step | None = None

    def add(self, sequences: Iterable[_Name], room: int) -> None:
        """Take in more sequences, whose prompts come next.

        Args:
            sequences: Task and number of each.
            room: Positions of the longest of all that are left and these.

        Raises:
            torch.OutOfMemoryError: There is no room for them; then nothing has changed.
        """
        names = list(sequences)
        count, used = len(self._rows) + len(names), len(self._rows)
        size, most = max(self._size, count), max(self._room, room)
        if (size, most) != (self._size, self._room):
            if size * most > 2 * count * room:  # of sequences that have ended
                size, most = count, room

            def moved(old: Tensor) -> Tensor:
                new = old.new_zeros(size, old.shape[1], most, old.shape[3])
                kept = min(most, old.shape[2])
                new[:used, :, :kept] = old[:used, :, :kept]
                return new

            layers = {layer: (moved(keys), moved(values)) for layer, (keys, values) in self._layers.items()}
            self._layers, self._size, self._room = layers, size, most
        self._step = None
        self._rows |= {name: used + i for i, name in enumerate(names)}

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        segments: Sequence[Segment],
        *,
        scale: float,
        window: int | None = None,
        prefix: Prefix | None = None,
        bounds: Bounds | None = None,
    ) -> Tensor:
        """Keep the keys and values of a micro-batch, and attend to those of each sequence so far.

        Args:
            query, key, value, segments, scale, window, prefix, bounds: As for `segment_attention`.

        Returns:
            As `segment_attention`.
        """
        prefix = prefix or {}
        keys, values = self._of_layer(layer, key, value)
        if not any(segment.past for segment in segments):
            self._keep_prompts(keys, values, key, value, segments, prefix)
            return segment_attention(
                query, key, value, segments, scale=scale, window=window, prefix=prefix, bounds=bounds
            )
        step, count = self._step_of(segments, prefix, key.device), len(segments)
        keys[step.rows, :, step.at], values[step.rows, :, step.at] = key[:count], value[:count]
        seen = torch.arange(step.longest, device=key.device)
        at = step.at.index_select(0, step.order).unsqueeze(1)
        mask = seen <= at
        if window is not None and window < step.longest:
            mask &= seen > at - window
        heads, groups = query.shape[1], keys.shape[1]
        # The query heads of a group stand where several queries of one head would: no key is copied for them.
        heads_of_rows = query[:count].index_select(0, step.order).unflatten(1, (groups, heads // groups))
        out = F.scaled_dot_product_attention(
            heads_of_rows,
            keys[:count, :, : step.longest],
            values[:count, :, : step.longest],
            attn_mask=mask[:, None, None],
            scale=scale,
        )
        out = out.flatten(1, 2).index_select(0, step.rows)
        padding = query.shape[0] - count
        return torch.cat((out, out.new_zeros(padding, *out.shape[1:]))) if padding else out

    def drop(self, sequences: Iterable[_Name]) -> None:
        """Forget sequences that have ended. The last ones take their rows: all others stay side by side."""
        self._step = None
        for name in sequences:
            if name not in self._rows:
                continue
            hole = self._rows.pop(name)
            last = len(self._rows)
            moved = next((other for other, row in self._rows.items() if row == last), None)
            if moved is None:
                continue
            self._rows[moved] = hole
            for pair in self._layers.values():
                for tensor in pair:
                    tensor[hole] = tensor[last]

    def _of_layer(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in self._layers:
            # Zeros: what is not written yet is multiplied by weights of zero, which leave no number but a number.
            keys, values = (x.new_zeros(self._size, x.shape[1], self._room, x.shape[2]) for x in (key, value))
            self._layers[layer] = keys, values
        return self._layers[layer]

    def _keep_prompts(
        self,
        keys: Tensor,
        values: Tensor,
        key: Tensor,
        value: Tensor,
        segments: Sequence[Segment],
        prefix: Prefix,
    ) -> None:
        for segment in segments:
            row, start = self._rows[segment.task, segment.sequence], 0
            rows = slice(segment.start, segment.start + segment.length)
            pieces = [prefix[segment.task]] if segment.task in prefix else []
            for more_keys, more_values in (*pieces, (key[rows], value[rows])):
                place = slice(start, start + more_keys.shape[0])
                keys[row, :, place] = more_keys.transpose(0, 1)
                values[row, :, place] = more_values.transpose(0, 1)
                start = place.stop
            # Another sequence may have left anything here, and a weight of zero makes no number of what is none.
            keys[row, :, start:], values[row, :, start:] = 0, 0

    def _step_of(self, segments: Sequence[Segment], prefix: Prefix, device: torch.device) -> _Step:
        """Where the tokens of a micro-batch belong; found once for all layers, without waiting for the device."""
        if self._step is None or self._step.segments is not segments:
            rows = [self._rows[segment.task, segment.sequence] for segment in segments]
            at = [
                segment.past + (prefix[segment.task][0].shape[0] if segment.task in prefix else 0)
                for segment in segments
            ]
            order = sorted(range(len(rows)), key=rows.__getitem__)
            table = to_device(torch.tensor([rows, at, order]), device)
            self._step = _Step(segments, *table.unbind(), longest=max(at) + 1)
        return self._step
