"""Fine-tune many PEFT tasks at once on one frozen backbone (`megatron-mux train` starts its processes by itself).

    torchrun --nproc-per-node 2 pretrain_mux.py --pipeline-model-parallel-size 2 \
        --backbone DIR --mux-tasks tasks.yaml --save runs/first
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron_mux.arguments import parse_args
from megatron_mux.cli.train import train_here


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run; returns the exit status, see `train_here`."""
    return train_here(lambda: parse_args(list(sys.argv[1:] if argv is None else argv)), "pretrain_mux.py")


if __name__ == "__main__":
    sys.exit(main())
