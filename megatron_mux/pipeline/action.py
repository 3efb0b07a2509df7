"""An action: what one stage computes in one clock."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

_FORM = re.compile(r"(\d+)([FB])(\d+)\.(\d+)")


@dataclass(frozen=True, order=True)
class Action:
    """One forward or backward pass of one micro-batch on one stage.

    Its string form is `<stage><F|B><bucket>.<micro-batch>`, for instance `0F1.3`.

    Attributes:
        stage: Pipeline stage, from 0.
        kind: `F` forward, `B` backward.
        bucket: Index of the bucket, from 0.
        micro_batch: Index of the micro-batch within its bucket, from 0.
    """

    stage: int
    kind: Literal["F", "B"]
    bucket: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.bucket}.{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read the string form.

        Raises:
            ValueError: `text` is not the form of an action.
        """
        match = _FORM.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{text!r} is not an action: write <stage><F|B><bucket>.<micro-batch>, like 0F1.3"
            )
        stage, kind, bucket, micro_batch = match.groups()
        return cls(int(stage), "F" if kind == "F" else "B", int(bucket), int(micro_batch))
