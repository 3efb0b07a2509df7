"""The rehearsing process: a line for each rank on standard input, its recording a line on standard output."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

from megatron_mux.rehearsal.forks import Forks, LostProcess

if TYPE_CHECKING:
    from megatron_mux.rehearsal.recording import Recording
    from megatron_mux.rehearsal.setting import Setting

_AT_ONCE = 4
"""Ranks rehearsed side by side at the most: each takes memory of its own."""

Part = tuple["Setting", int, bool]
"""A setting, a rank, and whether to rehearse all layers whatever a few tell."""


def main() -> int:
    """Rehearse until the input ends. Whatever libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    lines = sys.stdin.readlines()
    # Imported once, here: each rank's process, forked off, has it.
    from megatron_mux.errors import UserError
    from megatron_mux.memory.trace.guard import NoFakeGpu
    from megatron_mux.rehearsal import perform
    from megatron_mux.rehearsal.setting import Setting

    parts = [(Setting.from_dict(setting), rank, whole) for setting, rank, whole in map(json.loads, lines)]
    try:
        perform.import_all(parts[0][0])
        for recording in _recordings(parts):
            answers.write(recording.to_json() + "\n")
    except (LostProcess, NoFakeGpu, UserError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    answers.flush()
    return 0


def _recordings(parts: list[Part]) -> list[Recording]:
    """In the order of the parts; deep stages from shallow ones where those line up."""
    from megatron_mux.memory.stream.events import StreamError
    from megatron_mux.rehearsal.depth import deepened, shallow

    each = Forks(_rehearse, max(1, min(_AT_ONCE, len(os.sched_getaffinity(0)))))
    fewer: list[list[Part]] = [
        [] if whole else [(small, rank, True) for small in shallow(setting)] for setting, rank, whole in parts
    ]
    asked = [few or [part] for few, part in zip(fewer, parts, strict=True)]
    made = iter(each([one for few in asked for one in few]))
    found: list[Recording | None] = []
    for few, (setting, rank, _) in zip(asked, parts, strict=True):
        own = [next(made) for _ in few]
        try:
            found.append(own[0] if len(own) == 1 else deepened(setting, rank, *own))
        except StreamError:
            found.append(None)
    whole = iter(each([part for part, one in zip(parts, found, strict=True) if one is None]))
    return [next(whole) if one is None else one for one in found]


def _rehearse(part: Part) -> Recording:
    from megatron_mux.rehearsal.perform import rehearse

    return rehearse(*part[:2])


if __name__ == "__main__":
    sys.exit(main())
