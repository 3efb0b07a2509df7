"""The dry-run process: reads one line per rank from standard input, writes its recording to standard output."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

from megatron_mux.dry_run.fork_pool import ForkPool, LostProcess

if TYPE_CHECKING:
    from megatron_mux.dry_run.recording import Recording
    from megatron_mux.dry_run.run_spec import RunSpec

_AT_ONCE = 4
"""Maximum number of concurrent ranks, since each takes host memory."""

Part = tuple["RunSpec", int, bool]
"""A run, a rank, and whether to execute all layers instead of extending from a few."""


def main() -> int:
    """Execute dry runs until the input ends. Output of libraries goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    lines = sys.stdin.readlines()
    # Imported once, before ranks are forked.
    from megatron_mux.dry_run import execute
    from megatron_mux.dry_run.run_spec import RunSpec
    from megatron_mux.errors import UserError
    from megatron_mux.memory.fake_gpu.guard import NoFakeGpu

    parts = [(RunSpec.from_dict(run), rank, whole) for run, rank, whole in map(json.loads, lines)]
    try:
        execute.import_all(parts[0][0])
        for recording in _recordings(parts):
            answers.write(recording.to_json() + "\n")
    except (LostProcess, NoFakeGpu, UserError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    answers.flush()
    return 0


def _recordings(parts: list[Part]) -> list[Recording]:
    """In the order of the parts; deep stages from shallow ones where those line up."""
    from megatron_mux.dry_run.depth import deepened, shallow
    from megatron_mux.memory.stream.events import StreamError

    each = ForkPool(_dry_run, max(1, min(_AT_ONCE, len(os.sched_getaffinity(0)))))
    fewer: list[list[Part]] = [
        [] if whole else [(small, rank, True) for small in shallow(run)] for run, rank, whole in parts
    ]
    asked = [few or [part] for few, part in zip(fewer, parts, strict=True)]
    made = iter(each([one for few in asked for one in few]))
    found: list[Recording | None] = []
    for few, (run, rank, _) in zip(asked, parts, strict=True):
        own = [next(made) for _ in few]
        try:
            found.append(own[0] if len(own) == 1 else deepened(run, rank, *own))
        except StreamError:
            found.append(None)
    whole = iter(each([part for part, one in zip(parts, found, strict=True) if one is None]))
    return [next(whole) if one is None else one for one in found]


def _dry_run(part: Part) -> Recording:
    from megatron_mux.dry_run.execute import execute_dry_run

    return execute_dry_run(*part[:2])


if __name__ == "__main__":
    sys.exit(main())
