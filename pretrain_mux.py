"""Fine-tune many PEFT tasks at once on one frozen backbone.

    torchrun --nproc-per-node 2 pretrain_mux.py --pipeline-model-parallel-size 2 \
        --backbone DIR --mux-tasks tasks.yaml --save runs/first
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from megatron_mux.arguments import parse_args
from megatron_mux.errors import UserError, tell, told_elsewhere
from megatron_mux.gpus import set_allocator_options
from megatron_mux.library_log import LibraryLog


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run.

    Returns:
        Exit status: 0; 2 if the input is wrong (one process prints the error, the others exit silently); 130 after an
        interrupt while no task was training.
    """
    with ExitStack() as cleanup:
        try:
            arguments = parse_args(list(sys.argv[1:] if argv is None else argv))
            set_allocator_options()
            with LibraryLog(wanted=not arguments.mux_no_progress):
                from megatron_mux.runtime import shutdown  # imports torch: seconds
                from megatron_mux.training.run import run

                cleanup.callback(shutdown)
                run(arguments)
        except UserError as error:
            tell(error, "pretrain_mux.py")
            return 2
        except RuntimeError as error:
            if told_elsewhere(error):
                return 2
            raise
        except KeyboardInterrupt:  # while tasks train, the loop takes signals: it saves first
            if os.environ.get("RANK", "0") == "0":
                print("pretrain_mux.py: interrupted: no task was training", file=sys.stderr)
            return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
