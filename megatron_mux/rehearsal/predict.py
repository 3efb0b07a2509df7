"""How much memory each rank of a run needs, when, and for what: by rehearsal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_mux.memory.stream.events import Peak
from megatron_mux.rehearsal.process import rehearsals
from megatron_mux.rehearsal.recording import Recording
from megatron_mux.rehearsal.setting import Setting


@dataclass(frozen=True)
class RankPeak:
    """A rank's memory.

    Attributes:
        rank: Which.
        peak: The most bytes at once from loading to the last step, as asked for; with its moment and what they are for.
        recording: All that it allocates and frees: `memory.caching.replay.replay` tells what the allocator makes of it.
    """

    rank: int
    peak: Peak
    recording: Recording


def predict(setting: Setting, ranks: Sequence[int] | None = None, whole: bool = False) -> list[RankPeak]:
    """The memory of a run's ranks, of a step of the records that are given.

    Args:
        setting: The run.
        ranks: Which; by default the first tensor rank of every stage of every pipeline: the other tensor ranks hold
            parts of the same size.
        whole: Rehearse all layers, also where a few tell.

    Raises:
        TraceError: A rehearsal failed: what is wrong with the run, or with this machine.
    """
    chosen = range(0, setting.world, setting.tensor) if ranks is None else ranks
    found = rehearsals([(setting, rank) for rank in chosen], whole)
    return [RankPeak(rank, one.stream.peak(), one) for rank, one in zip(chosen, found, strict=True)]


def worst(peaks: Sequence[RankPeak]) -> RankPeak:
    """The rank that needs most."""
    return max(peaks, key=lambda one: one.peak.size)
