"""A packed batch in host memory, from where it goes to the device in one copy that the host does not wait for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_mux import runtime
from megatron_mux.batch.balancing import RouterLoadAccumulator, balanced_rows
from megatron_mux.batch.packed_batch import PackedBatch, Ranges
from megatron_mux.kernels.attention.carry import Carry
from megatron_mux.kernels.attention.key_value_cache import KeyValueCache
from megatron_mux.kernels.attention.segments import Bounds, Segment
from megatron_mux.kernels.groups import RowGroups

Array = npt.NDArray[Any]

_ALIGNMENT = 16
"""Bytes. Every tensor begins at a multiple: kernels load 16 bytes at once, and Triton compiles for it once."""


@dataclass(frozen=True)
class Buffer:
    """Named arrays of one dimension, which go to a device in a single copy: those of 64 bits, then those of 32.

    Attributes:
        data: `[n]` uint8.
        wide, narrow: The length of each array of 64 and of 32 bits.
    """

    data: Array
    wide: Mapping[str, int]
    narrow: Mapping[str, int]

    @classmethod
    def of(cls, wide: Mapping[str, Array], narrow: Mapping[str, Array]) -> Buffer:
        """A buffer of arrays that become int64, and of some that become int32; of floats the bits, as integers."""
        sizes = [8 * size for size in _padded(map(len, wide.values()), 8)]
        sizes += [4 * size for size in _padded(map(len, narrow.values()), 4)]
        buffer = np.empty(sum(sizes), np.uint8)
        starts = accumulate(sizes, initial=0)
        for arrays, dtype in ((wide, np.dtype(np.int64)), (narrow, np.dtype(np.int32))):
            for array in arrays.values():
                start = next(starts)
                buffer[start : start + array.size * dtype.itemsize].view(dtype)[:] = array
                next(starts)  # of the padding
        return cls(buffer, *({name: len(own) for name, own in arrays.items()} for arrays in (wide, narrow)))

    def views(self, whole: Tensor) -> dict[str, Tensor]:
        """The arrays, int64 and int32, as views of `data` or of a copy.

        Args:
            whole: `[n]` uint8.
        """
        wide, narrow = _padded(self.wide.values(), 8), _padded(self.narrow.values(), 4)
        end = 8 * sum(wide)
        tensors = whole[:end].view(torch.int64).split(wide)[::2]
        tensors += whole[end:].view(torch.int32).split(narrow)[::2]
        return dict(zip((*self.wide, *self.narrow), tensors, strict=True))


def _padded(lengths: Iterable[int], size: int) -> list[int]:
    """Items of `size` bytes: of each array, and of the padding after it."""
    return [items for length in lengths for items in (length, -length % (_ALIGNMENT // size))]


@dataclass(frozen=True)
class PresentTasks:
    """The tasks with rows and a slot.

    Attributes:
        slots, rows, steps: Of each, see `RowGroups`.
    """

    slots: tuple[int, ...]
    rows: tuple[tuple[int, int], ...]
    steps: tuple[int, ...]

    @classmethod
    def of(cls, ranges: Ranges, slots: Mapping[str, int], task_steps: Mapping[str, int]) -> PresentTasks:
        """Those among the tasks of these rows."""
        names = [name for name, (start, stop) in ranges.items() if start < stop and name in slots]
        own = tuple(slots[name] for name in names), tuple(ranges[name] for name in names)
        return cls(*own, tuple(task_steps[name] for name in names))


@dataclass(frozen=True)
class HostBatch:
    """A micro-batch in host memory.

    Attributes:
        buffer: The arrays that `to` names.
        segments, task_rows, task_steps, training: See `PackedBatch`.
        label_task_rows: Task name to its `(start, stop)` among the N labelled rows; only tasks present.
        present, present_labelled: Of all rows, and of the labelled ones.
        longest: Queries and keys of the longest segment.
    """

    buffer: Buffer
    segments: tuple[Segment, ...]
    task_rows: Ranges
    label_task_rows: Ranges
    task_steps: Mapping[str, int]
    training: bool
    present: PresentTasks
    present_labelled: PresentTasks
    longest: tuple[int, int]

    @property
    def rows(self) -> int:
        """T, padding included."""
        return self.buffer.wide["tokens"]

    @property
    def labels(self) -> int:
        """N."""
        return self.buffer.wide["labels"]

    def to(
        self,
        device: torch.device | str = "cpu",
        carry: Carry | None = None,
        staging: Tensor | None = None,
        loads: RouterLoadAccumulator | None = None,
        cache: KeyValueCache | None = None,
    ) -> PackedBatch:
        """Take the batch to a device. The host does not wait.

        Args:
            device: Of the tensors. On a CPU they are views of `buffer`.
            carry: See `PackedBatch.carry`; needed if spans leave tokens out.
            staging: Pinned memory of the buffer's size, to be left alone until the device has copied it; None takes
                some from torch, which may wait for the device to get it.
            cache: See `PackedBatch.cache`; then spans may leave tokens out without a `carry`.
            loads: Those of the micro-batch, if an earlier chunk has made it; None: this one makes it, if it needs one.
        """
        whole = torch.from_numpy(self.buffer.data)
        if torch.device(device).type == "cuda":
            whole = runtime.to_device(whole, device, staging)
        arrays = self.buffer.views(whole)
        gather = arrays["gather"]
        common: dict[str, Any] = {
            "labels": arrays["labels"],
            "label_weights": arrays["label_weights"].view(torch.float32),
            "label_tasks": arrays["label_tasks"],
            "task_steps": self.task_steps,
            "training": self.training,
        }
        labelled = PackedBatch(
            segments=(),
            bounds=None,
            task_rows=self.label_task_rows,
            groups=self._groups(self.present_labelled, arrays, "labelled_"),
            tokens=arrays["labelled_tokens"],
            positions=arrays["labelled_positions"],
            label_rows=arrays["labelled_label_rows"],
            **common,
        )
        return PackedBatch(
            segments=self.segments,
            bounds=Bounds(arrays["queries"], arrays["keys"], *self.longest, gather if len(gather) else None),
            task_rows=self.task_rows,
            groups=self._groups(self.present, arrays),
            tokens=arrays["tokens"],
            positions=arrays["positions"],
            label_rows=arrays["label_rows"],
            carry=carry,
            label_batch=labelled,
            balanced=balanced_rows(arrays, loads),
            cache=cache,
            **common,
        )

    def _groups(self, present: PresentTasks, arrays: Mapping[str, Tensor], prefix: str = "") -> RowGroups:
        return RowGroups(
            slots=present.slots,
            rows=present.rows,
            steps=present.steps,
            training=self.training,
            row_ranges=arrays[f"{prefix}row_ranges"].view(-1, 4),
            tiles=arrays[f"{prefix}tiles"].view(-1, 3),
            sequence_ids=arrays[f"{prefix}sequence_ids"],
            token_index=arrays[f"{prefix}token_index"],
        )
