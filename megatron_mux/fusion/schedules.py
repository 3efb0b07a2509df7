"""The pipeline schedules that a run may ask for; `fusion.step.step_template` makes their templates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Schedule = Literal["planned", "1f1b", "gpipe", "interleaved"]


@dataclass(frozen=True)
class Traits:
    """What a schedule can do.

    Attributes:
        rolls: Its steps can follow each other without a flush.
        single: It has an order for one stage per rank.
        virtual: It has an order for several stages per rank.
    """

    rolls: bool
    single: bool = True
    virtual: bool = True


PIPELINE_SCHEDULES: Mapping[Schedule, Traits] = MappingProxyType(
    {
        "planned": Traits(rolls=True),
        "1f1b": Traits(rolls=True, virtual=False),
        "gpipe": Traits(rolls=False, virtual=False),
        "interleaved": Traits(rolls=False, single=False),
    }
)
"""By name; the first is the default."""
