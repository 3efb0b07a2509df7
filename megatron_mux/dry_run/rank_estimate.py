"""Estimates a rank's peak memory from its recording: how much, what it consists of, and when.

A dry run loads the backbone, registers all tasks, takes a few steps with each task's worst-case batch (rolling if the
run does; diff pruning fixes its mask within them) and evaluates. The rest of a run needs less: a task that joins later
finds no activations or gradients; a save copies adapters to host memory between steps. Not covered: memory that other
processes use, and combinations of batches heavier than the ones executed.

All blocks belong to one CUDA stream: side streams and NCCL copy between blocks of the main stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_mux.dry_run.process import dry_runs
from megatron_mux.dry_run.run_spec import Recording, RunSpec
from megatron_mux.memory.caching.settings import Settings
from megatron_mux.memory.estimate import Prediction, predict


@dataclass(frozen=True)
class RankEstimate:
    """Peak memory of one rank.

    Attributes:
        stage: Pipeline rank.
        fits: Whether the run completes on the GPU; the allocator may have to release cached blocks and retry.
        action: The engine's action at the peak.
    """

    rank: int
    stage: int
    fits: bool
    prediction: Prediction
    action: str

    @property
    def when(self) -> str:
        """The moment of the peak and the action, in words."""
        moment = self.prediction.moment
        return f"{moment} ({self.action})" if self.action else moment

    def to_json(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "rank": self.rank,
            "stage": self.stage,
            "fits": self.fits,
            **self.prediction.to_json(),
            "action": self.action,
            "communicators": self.prediction.communicators,
        }


def estimate_rank(recording: Recording, run: RunSpec, rank: int, memory: int) -> RankEstimate:
    """Estimate one rank's memory from its recording."""
    found = predict(recording.stream, run.gpu, Settings.of_run(), recording.communicators)
    stage = rank // (run.world // run.plan.ranks)
    return RankEstimate(rank, stage, found.fits(memory), found, recording.at(found.recorded_at))


def estimate_ranks(parts: Sequence[tuple[RunSpec, int]], memory: int) -> list[RankEstimate]:
    """Estimate ranks by dry runs.

    Raises:
        WorkerError: A dry run failed, because of the run or of this machine.
    """
    made = zip(dry_runs(parts), parts, strict=True)
    return [estimate_rank(recording, run, rank, memory) for recording, (run, rank) in made]


def worst(ranks: Sequence[RankEstimate]) -> RankEstimate:
    """The rank with the highest peak; ranks that do not fit come first."""
    return max(ranks, key=lambda one: (not one.fits, one.prediction.process))
