"""Estimates a rank's peak memory from its recording: how much, what it consists of, and when.

A dry run loads the backbone, registers all tasks, takes a few steps with each task's heaviest batch (rolling if the
run does; diff pruning fixes its mask within them) and evaluates. The rest of a run needs less: a task that joins later
finds no activations or gradients; a save copies adapters to host memory between steps. Not covered: memory that other
processes use, and combinations of batches heavier than the ones executed.

All blocks belong to one CUDA stream: side streams and NCCL copy between blocks of the main stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_mux.dry_run.process import dry_runs
from megatron_mux.dry_run.recording import Recording
from megatron_mux.dry_run.run_spec import RunSpec
from megatron_mux.memory.caching.replay import replay
from megatron_mux.memory.caching.settings import Settings
from megatron_mux.memory.estimate import Prediction, cublas, process_overhead
from megatron_mux.memory.stream.insertion import inserted


@dataclass(frozen=True)
class RankEstimate:
    """Peak memory of one rank, in bytes.

    Attributes:
        rank: Global rank.
        stage: Pipeline rank.
        fits: Whether the run completes on the GPU; the allocator may have to release cached blocks and retry.
        communicators: Number of NCCL communicators it uses.
        peak_allocated: Peak of allocated bytes.
        peak_reserved: Peak of bytes the caching allocator holds.
        peak_reserved_expandable: The same with expandable segments.
        peak_process: Peak of the process, CUDA context and NCCL buffers included.
        interval: Lower and upper bound of `peak_process`, from the uncertainty about kernels, context and NCCL.
        breakdown: `peak_process` by purpose.
        moment: When the peak is first reached: phase, layer, operator.
        action: The engine's action at that moment.
    """

    rank: int
    stage: int
    fits: bool
    communicators: int
    peak_allocated: int
    peak_reserved: int
    peak_reserved_expandable: int
    peak_process: int
    interval: tuple[int, int]
    breakdown: Mapping[str, int]
    moment: str
    action: str

    @property
    def when(self) -> str:
        """The moment and the action in words."""
        return f"{self.moment} ({self.action})" if self.action else self.moment

    def to_json(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "rank": self.rank,
            "stage": self.stage,
            "fits": self.fits,
            "peak_process_bytes": self.peak_process,
            "peak_process_interval_bytes": list(self.interval),
            "peak_reserved_bytes": self.peak_reserved,
            "peak_reserved_expandable_bytes": self.peak_reserved_expandable,
            "peak_allocated_bytes": self.peak_allocated,
            "breakdown": dict(self.breakdown),
            "moment": self.moment,
            "action": self.action,
            "communicators": self.communicators,
        }


def prediction(recording: Recording, run: RunSpec, settings: Settings | None = None) -> Prediction:
    """Combine a recording with cuBLAS workspaces and the caching allocator.

    Args:
        recording: Recording of one rank.
        run: The run it was recorded from.
        settings: Allocator options; those of the environment if None.
    """
    stream = inserted(recording.stream, cublas(recording.stream, run.gpu))
    return Prediction(stream, settings or Settings.of_environment(), recording.communicators)


def estimate_rank(
    recording: Recording, run: RunSpec, rank: int, memory: int, settings: Settings | None = None
) -> RankEstimate:
    """Estimate one rank's memory from its recording.

    Args:
        recording: Recording of that rank.
        run: The run it was recorded from.
        rank: Global rank.
        memory: GPU memory in bytes.
        settings: Allocator options; those of the environment if None.
    """
    found = prediction(recording, run, settings)
    capacity = memory - process_overhead(found.communicators)
    limited = replay(found.stream, replace(found.settings, capacity=max(capacity, 0)))
    return RankEstimate(
        rank,
        rank // (run.world // run.plan.ranks),
        limited.out_of_memory is None,
        found.communicators,
        found.peak_allocated,
        found.peak_reserved,
        found.peak_reserved_expandable,
        found.process,
        found.interval,
        found.breakdown,
        found.moment,
        recording.at(_recorded(recording, run, found.replay.peak_allocated_at)),
    )


def estimate_ranks(parts: Sequence[tuple[RunSpec, int]], memory: int) -> list[RankEstimate]:
    """Estimate ranks by dry runs.

    Args:
        parts: Pairs of a run and a rank.
        memory: Memory of each GPU in bytes.

    Raises:
        WorkerError: A dry run failed, because of the run or of this machine.
    """
    made = zip(dry_runs(parts), parts, strict=True)
    return [estimate_rank(recording, run, rank, memory) for recording, (run, rank) in made]


def worst(ranks: Sequence[RankEstimate]) -> RankEstimate:
    """The rank with the highest peak; ranks that do not fit come first."""
    return max(ranks, key=lambda one: (not one.fits, one.peak_process))


def _recorded(recording: Recording, run: RunSpec, index: int) -> int:
    """Index of a recorded event, from its index in the prediction (which has inserted blocks)."""
    before = sorted(block.before for block in cublas(recording.stream, run.gpu))
    return index - sum(place + more <= index for more, place in enumerate(before))
