"""From a recording to an answer: the peak of a rank's memory in a whole run, what it is made of, and when it comes.

The recording is of a run in small: the backbone is loaded, all tasks join, they take steps with their heaviest batch,
rolling if the run does, and are evaluated. Diff pruning fixes its mask within them. What else a run does needs less: a
task that joins later finds others without activations and gradients; a save copies adapters to host memory, for which
diff pruning has a byte for each of its entries on the device, between steps. Left out are what was on the GPU before,
and moments (of two tasks' heaviest steps, say) that the rehearsed ones do not stand for.

All blocks are of one CUDA stream: side streams and NCCL's copy between what the main stream has allocated.
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

from megatron_mux.memory.caching.replay import replay
from megatron_mux.memory.caching.settings import Settings
from megatron_mux.memory.estimate import Prediction, cublas, outside
from megatron_mux.memory.store import Store
from megatron_mux.memory.stream.insertion import inserted
from megatron_mux.rehearsal.process import rehearsals
from megatron_mux.rehearsal.recording import Recording
from megatron_mux.rehearsal.setting import Setting

_PACKAGES = ("torch", "megatron-core", "transformers")


@dataclass(frozen=True)
class RankAnswer:
    """What a rank takes of its GPU. Sizes are bytes.

    Attributes:
        rank: Of the world.
        stage: Its place in the pipeline.
        fits: Whether all goes well on the GPU, if need be once the allocator has returned what it does not use.
        communicators: Of NCCL that it has used.
        peak_allocated: The most in use.
        peak_reserved: The most that the allocator has from the device.
        peak_reserved_expandable: The same with expandable segments.
        peak_process: The most that the process has, CUDA context and NCCL included.
        interval: What that may be at the least and at the most, by what is not known of kernels, context and NCCL.
        breakdown: What it is made of.
        moment: When first most is in use: phase, layer, operator.
        action: And in which of the engine's actions.
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
        """As programs read it."""
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


def prediction(recording: Recording, setting: Setting, settings: Settings | None = None) -> Prediction:
    """A recording with what dispatch does not see, on the caching allocator.

    Args:
        recording: Of a rank of the run.
        setting: The run.
        settings: The allocator's options; `torch`'s defaults if None.
    """
    stream = inserted(recording.stream, cublas(recording.stream, setting.gpu))
    return Prediction(stream, settings or Settings(), recording.communicators)


def answer(
    recording: Recording, setting: Setting, rank: int, memory: int, settings: Settings | None = None
) -> RankAnswer:
    """What a recording says of a rank.

    Args:
        recording: The rank's.
        setting: The run.
        rank: Which.
        memory: Bytes of its GPU.
        settings: The allocator's options; `torch`'s defaults if None.
    """
    found = prediction(recording, setting, settings)
    capacity = memory - outside(found.communicators)
    limited = replay(found.stream, replace(found.settings, capacity=max(capacity, 0)))
    return RankAnswer(
        rank,
        rank // (setting.world // setting.plan.ranks),
        limited.out_of_memory is None,
        found.communicators,
        found.peak_allocated,
        found.peak_reserved,
        found.peak_reserved_expandable,
        found.process,
        found.interval,
        found.breakdown,
        found.moment,
        recording.at(_recorded(recording, setting, found.replay.peak_allocated_at)),
    )


def answers(
    parts: Sequence[tuple[Setting, int]],
    memory: int,
    settings: Settings | None = None,
    store: Store | None = None,
) -> list[RankAnswer]:
    """What ranks take, rehearsed unless it is known.

    Args:
        parts: Runs, and of each a rank.
        memory: Bytes of each GPU.
        settings: The allocator's options; `torch`'s defaults if None.
        store: What is known; None: nothing.

    Raises:
        TraceError: A rehearsal failed: what is wrong with the run, or with this machine.
    """
    known = [None if store is None else _read(store, _key(*part, memory, settings)) for part in parts]
    missing = [part for part, one in zip(parts, known, strict=True) if one is None]
    made = iter(zip(rehearsals(missing), missing, strict=True))
    found = []
    for one in known:
        if one is None:
            recording, (setting, rank) = next(made)
            one = answer(recording, setting, rank, memory, settings)
            if store is not None:
                store.write(_key(setting, rank, memory, settings), json.dumps(asdict(one)))
        found.append(one)
    return found


def worst(ranks: Sequence[RankAnswer]) -> RankAnswer:
    """The rank that needs most; one that does not fit, if any."""
    return max(ranks, key=lambda one: (not one.fits, one.peak_process))


def _recorded(recording: Recording, setting: Setting, index: int) -> int:
    """The event of a recording that is one of its prediction, where blocks have been put in."""
    before = sorted(block.before for block in cublas(recording.stream, setting.gpu))
    return index - sum(place + more <= index for more, place in enumerate(before))


def _read(store: Store, key: Mapping[str, Any]) -> RankAnswer | None:
    text = store.read(key)
    return None if text is None else RankAnswer.from_text(text)


def _key(setting: Setting, rank: int, memory: int, settings: Settings | None) -> dict[str, Any]:
    allocator = asdict(settings or Settings())
    return {"run": setting.to_dict(), "rank": rank, "memory": memory, "allocator": allocator, **versions()}


@cache
def versions() -> Mapping[str, str]:
    """What a rehearsal depends on: the whole of this package, since all of it runs, and those it runs on."""
    room = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for file in sorted(room.rglob("*.py")):
        digest.update(file.read_bytes())
    return {"sources": digest.hexdigest(), **{name: version(name) for name in _PACKAGES}}
