"""The traced process: a case a line on standard input, its stream a line on standard output."""

from __future__ import annotations

import json
import os
import sys

from megatron_mux.memory.trace.case import Case


def main() -> int:
    """Trace until the input ends. Whatever libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from megatron_mux.memory.trace.guard import NoFakeGpu
    from megatron_mux.memory.trace.model import UntraceableError
    from megatron_mux.memory.trace.training import trace

    for line in sys.stdin:
        try:
            answers.write(trace(Case.from_dict(json.loads(line))).to_json() + "\n")
            answers.flush()
        except (NoFakeGpu, UntraceableError) as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
