"""What a save holds of a configuration, besides its task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass
class SavedConfiguration:
    """All that decisions about a configuration depend on.

    Attributes:
        sweep: Which one it is of; empty: the task is of none.
        settings: Values by field.
        figure: Name of the deciding figure; empty: it has not been evaluated.
        mode: Whether a better adapter has it lower (`min`) or higher (`max`); None: its name says that.
        evaluations: Its values by the steps before; None: not finite, or not measured.
        decided: After which step its scheduler has last decided about it.
        decisions: How many decisions were about it.
    """

    sweep: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    figure: str = ""
    mode: Literal["min", "max"] | None = None
    evaluations: dict[int, float | None] = field(default_factory=dict)
    decided: int = 0
    decisions: int = 0

    @classmethod
    def read(cls, value: Mapping[str, Any]) -> SavedConfiguration:
        """From JSON, whose keys are text."""
        evaluations = {int(step): figure for step, figure in value.get("evaluations", {}).items()}
        return cls(**{**value, "evaluations": evaluations})
