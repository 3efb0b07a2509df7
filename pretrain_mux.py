"""Fine-tune many PEFT tasks at once on one frozen backbone.

    torchrun --nproc-per-node 2 pretrain_mux.py --pipeline-model-parallel-size 2 \
        --backbone DIR --mux-tasks tasks.yaml --save runs/first
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from megatron_mux.arguments import parse_args
from megatron_mux.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, compose, run.

    Returns:
        Exit status: 0, or 2 when the input was wrong (said on standard error by the first process only).
    """
    try:
        arguments = parse_args(list(sys.argv[1:] if argv is None else argv))
        from megatron_mux.training import run  # imports torch and Megatron-Core: seconds

        run(arguments)
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
            for problem in error.problems:
                print(f"pretrain_mux.py: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
