"""The rehearsing process: a setting and a rank a line on standard input, a recording a line on standard output."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys

_AT_ONCE = 4
"""Ranks rehearsed side by side at the most: each takes memory of its own."""


def main() -> int:
    """Rehearse until the input ends. Whatever libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    lines = sys.stdin.readlines()
    # Imported once, here: each rank's process, forked off, has it.
    from megatron_mux.rehearsal import perform  # noqa: F401

    processes = min(_AT_ONCE, len(os.sched_getaffinity(0)), len(lines)) or 1
    with multiprocessing.get_context("fork").Pool(processes, maxtasksperchild=1) as pool:
        for said, problem in pool.imap(_rehearse, lines, chunksize=1):
            if problem:
                print(problem, file=sys.stderr)
                return 1
            answers.write(said + "\n")
    answers.flush()
    return 0


def _rehearse(line: str) -> tuple[str, str]:
    """A recording as text; or what is wrong."""
    from megatron_mux.errors import UserError
    from megatron_mux.memory.trace.guard import NoFakeGpu
    from megatron_mux.rehearsal.perform import rehearse
    from megatron_mux.rehearsal.setting import Setting

    setting, rank = json.loads(line)
    try:
        found = rehearse(Setting.from_dict(setting), rank)
    except (NoFakeGpu, UserError) as error:
        return "", " ".join(str(error).split())
    return f"{json.dumps(found.begins, separators=(',', ':'))} {found.stream.to_json()}", ""


if __name__ == "__main__":
    sys.exit(main())
