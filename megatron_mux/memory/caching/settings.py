"""Options of PyTorch's caching allocator, as `PYTORCH_ALLOC_CONF` spells them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

from megatron_mux.errors import UserError
from megatron_mux.gpus import ALLOCATOR_OPTIONS, ALLOCATOR_VARIABLES
from megatron_mux.memory.sizes import MIB

SMALLEST = 512
"""All sizes are rounded up to multiples of this."""
SMALL_LIMIT = MIB
"""Largest request that the small pool serves."""
SMALL_SEGMENT = 2 * MIB
MIDDLE_LIMIT = 10 * MIB
"""Requests from this size on get segments of their own, in multiples of `LARGE_STEP`."""
LARGE_STEP = 2 * MIB
_IN_MIB = ("max_split_size_mb", "max_non_split_rounding_mb", "large_segment_size_mb")
_KEYS = (*_IN_MIB, "roundup_power2_divisions", "garbage_collection_threshold", "expandable_segments")


@dataclass(frozen=True)
class Settings:
    """The allocator's options, and how much memory there is.

    Attributes:
        expandable_segments: One growing segment for each stream and pool, instead of a new one for each miss.
        max_split_size: Blocks of at least this many bytes are neither split nor used for smaller requests; None: no
            limit.
        max_non_split_rounding: Such a block serves only requests that are smaller by less than this; None:
            `large_segment`.
        roundup_power2_divisions: Number of equal steps between powers of two to which requests are rounded up; a power
            of two, 1 for none. (One number for all sizes; a list by size is not supported.)
        large_segment: Bytes of a segment for requests of 1 to 10 MiB, and of a page of large expandable segments.
            (It cannot be set in torch 2.10.)
        capacity: Bytes of the device that the process can reserve; None: no limit.
        source: Where the options come from, in words; not an option itself.
    """

    expandable_segments: bool = False
    max_split_size: int | None = None
    max_non_split_rounding: int | None = None
    roundup_power2_divisions: int = 1
    large_segment: int = 20 * MIB
    capacity: int | None = None
    source: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        """Raises ValueError for values that torch would refuse."""
        divisions = self.roundup_power2_divisions
        if divisions < 1 or divisions & (divisions - 1):
            raise ValueError(f"roundup_power2_divisions is a power of two, not {divisions}")
        if self.large_segment < MIDDLE_LIMIT:
            raise ValueError(f"large_segment_size_mb is at least 10, not {self.large_segment / MIB:g}")
        if self.max_split_size is not None and self.max_split_size <= self.large_segment:
            raise ValueError(
                f"max_split_size_mb is more than {self.large_segment / MIB:g}, not {self.max_split_size / MIB:g}"
            )

    @classmethod
    def parse(cls, text: str) -> Settings:
        """Read what `PYTORCH_ALLOC_CONF` holds: `expandable_segments:True,max_split_size_mb:128`.

        Options of pinned host memory, of how `cudaMalloc` is called, and of garbage collection (which only a program
        that limits its own share of the memory triggers) make no difference here.

        Raises:
            ValueError: An option is unknown or its value is invalid.
        """
        if "[" in text:
            raise ValueError(
                "a list of roundup_power2_divisions by size is not replayed, only one number for all"
            )
        found: dict[str, float] = {}
        for option in filter(None, (part.strip() for part in text.split(","))):
            key, _, value = (part.strip() for part in option.partition(":"))
            if key.startswith("pinned_") or key == "release_lock_on_cudamalloc":
                continue
            if key not in _KEYS:
                raise ValueError(f"the replayed allocator has no option {key!r}: it knows {', '.join(_KEYS)}")
            if key == "expandable_segments":
                if value not in ("True", "False"):
                    raise ValueError(f"{key} is True or False, not {value!r}")
                found[key] = value == "True"
                continue
            number = _number(key, value)
            if key == "garbage_collection_threshold":
                if not 0 <= number < 1:
                    raise ValueError(f"{key} is at least 0 and below 1, not {number}")
            else:
                found[key.removesuffix("_mb").replace("_segment_size", "_segment")] = (
                    number * MIB if key in _IN_MIB else number
                )
        return cls(**found)  # type: ignore[arg-type]

    @classmethod
    def of_run(cls) -> Settings:
        """The options of a run of `pretrain_mux.py` that is started from this environment.

        Raises:
            UserError: As `of_environment`.
        """
        if any(name in os.environ for name in ALLOCATOR_VARIABLES):
            return cls.of_environment()
        return replace(cls.parse(ALLOCATOR_OPTIONS), source=f"{ALLOCATOR_OPTIONS}, the default of a run")

    @classmethod
    def of_environment(cls) -> Settings:
        """The options that torch takes from this process's environment.

        Raises:
            UserError: torch would refuse them, they are not supported here, or both variables are set and differ: torch
                takes some options from one, some from the other.
        """
        found = [(name, text) for name in ALLOCATOR_VARIABLES if (text := os.environ.get(name))]
        if len({text for _, text in found}) > 1:
            raise UserError(f"{' and '.join(ALLOCATOR_VARIABLES)} say different things: set one of them")
        if not found:
            return cls()
        name, text = found[0]
        try:
            return replace(cls.parse(text), source=f"{name}={text}")
        except ValueError as error:
            raise UserError(f"{name}={text}: {error}") from None

    def describe(self) -> str:
        """The options in words."""
        return self.source or "the caching allocator's defaults"

    def rounded(self, size: int) -> int:
        """Bytes of the block that serves a request: a multiple of 512."""
        divisions = self.roundup_power2_divisions
        if divisions > 1 and size > SMALLEST * divisions:
            step = (1 << (size.bit_length() - 1)) // divisions
            return -(-size // step) * step
        return max(SMALLEST, (size + SMALLEST - 1) & -SMALLEST)

    def segment(self, rounded: int) -> int:
        """Bytes of the segment that is reserved on a miss."""
        if rounded <= SMALL_LIMIT:
            return SMALL_SEGMENT
        if rounded < MIDDLE_LIMIT:
            return self.large_segment
        return -(-rounded // LARGE_STEP) * LARGE_STEP


def _number(key: str, value: str) -> float:
    """Read a number; raises ValueError with the option's name."""
    try:
        return float(value) if key == "garbage_collection_threshold" else int(value)
    except ValueError:
        raise ValueError(f"{key} is a number, not {value!r}") from None
