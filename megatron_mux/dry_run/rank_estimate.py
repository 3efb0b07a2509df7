"""Estimates a rank's peak memory from its recording: how much, what it consists of, and when.

A dry run loads the backbone, registers all tasks, takes a few steps with each task's heaviest batch (rolling if the
run does; diff pruning fixes its mask within them) and evaluates. The rest of a run needs less: a task that joins later
finds no activations or gradients; a save copies adapters to host memory between steps. Not covered: memory that other
processes use, and combinations of batches heavier than the ones executed.

All blocks belong to one CUDA stream: side streams and NCCL copy between blocks of the main stream.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from megatron_mux.dry_run.process import dry_runs
from megatron_mux.dry_run.recording import Recording
from megatron_mux.dry_run.run_spec import RunSpec
from megatron_mux.memory.caching.replay import replay
from megatron_mux.memory.caching.settings import Settings
from megatron_mux.memory.estimate import Prediction, cublas, outside
from megatron_mux.memory.store import Store
from megatron_mux.memory.stream.insertion import inserted

_PACKAGES = ("torch", "megatron-core", "transformers")


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

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Read what `json.dumps(asdict(...))` made."""
        data = json.loads(text)
        return cls(**{**data, "interval": tuple(data["interval"])})


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
    capacity = memory - outside(found.communicators)
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


def estimate_ranks(
    parts: Sequence[tuple[RunSpec, int]],
    memory: int,
    settings: Settings | None = None,
    store: Store | None = None,
) -> list[RankEstimate]:
    """Estimate ranks, with a dry run of those that are not in the store.

    Args:
        parts: Pairs of a run and a rank.
        memory: Memory of each GPU in bytes.
        settings: Allocator options; those of the environment if None.
        store: Earlier estimates; None disables it.

    Raises:
        TraceError: A dry run failed, because of the run or of this machine.
    """
    known = [None if store is None else _read(store, _key(*part, memory, settings)) for part in parts]
    missing = [part for part, one in zip(parts, known, strict=True) if one is None]
    made = iter(zip(dry_runs(missing), missing, strict=True))
    found = []
    for one in known:
        if one is None:
            recording, (run, rank) = next(made)
            one = estimate_rank(recording, run, rank, memory, settings)
            if store is not None:
                store.write(_key(run, rank, memory, settings), json.dumps(asdict(one)))
        found.append(one)
    return found


def worst(ranks: Sequence[RankEstimate]) -> RankEstimate:
    """The rank with the highest peak; ranks that do not fit come first."""
    return max(ranks, key=lambda one: (not one.fits, one.peak_process))


def _recorded(recording: Recording, run: RunSpec, index: int) -> int:
    """Index of a recorded event, from its index in the prediction (which has inserted blocks)."""
    before = sorted(block.before for block in cublas(recording.stream, run.gpu))
    return index - sum(place + more <= index for more, place in enumerate(before))


def _read(store: Store, key: Mapping[str, Any]) -> RankEstimate | None:
    text = store.read(key)
    return None if text is None else RankEstimate.from_text(text)


def _key(run: RunSpec, rank: int, memory: int, settings: Settings | None) -> dict[str, Any]:
    allocator = asdict(settings or Settings.of_environment())
    return {"run": run.to_dict(), "rank": rank, "memory": memory, "allocator": allocator, **versions()}


@cache
def versions() -> Mapping[str, str]:
    """Versions that a dry run depends on: this package's sources, all of which may run, and its libraries."""
    room = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for file in sorted(room.rglob("*.py")):
        digest.update(file.read_bytes())
    return {"sources": digest.hexdigest(), **{name: version(name) for name in _PACKAGES}}
