"""megatron-mux against Hugging Face PEFT: the same LoRA tasks trained together, and one at a time.

    python benchmarks/vs_peft.py                          # backbone and data of `make prepare`, two threads
    python benchmarks/vs_peft.py --rival packed           # PEFT without padding only
    python benchmarks/vs_peft.py --dtype bfloat16
    python benchmarks/vs_peft.py --backbone-shape tiny    # to try it out: a minute

All sides start from the same adapters and train on the same records in the same order with the same number of threads.
They take turns, so that other load of the machine affects both, and run in separate processes, so that they do not
share an allocator. Memory is measured in a new process for each case. On a GPU: `gpu_table.py`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from script import QUICKSTART, add_machine, add_output, command_line, publish


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = command_line(__doc__)
    parser.add_argument("--backbone", type=Path, help="Hugging Face directory (.quickstart/backbone)")
    parser.add_argument("--data", type=Path, help="directory of the mix's .jsonl files (.quickstart/data)")
    parser.add_argument("--backbone-shape", choices=("tiny",), help="a random backbone, random records")
    add_machine(parser, device=False)
    parser.add_argument("--repeats", type=int, default=7, help="turns of each side")
    parser.add_argument("--steps", type=int, default=2, help="steps in a turn")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before the first turn")
    parser.add_argument("--targets", nargs="+", default=["q_proj", "v_proj"])
    parser.add_argument(
        "--rival",
        choices=("padded", "packed", "all"),
        default="all",
        help="how PEFT trains: batches padded to their longest sequence, or packed without padding",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the backbone")
    parser.add_argument("--skip-memory", action="store_true")
    parser.add_argument("--skip-speed", action="store_true", help="measure memory only")
    add_output(parser)
    arguments = parser.parse_args(argv)
    if arguments.backbone is not None and arguments.backbone_shape is not None:
        parser.error("give --backbone DIR or --backbone-shape NAME, not both")
    if arguments.backbone is None and arguments.backbone_shape is None:
        arguments.backbone = QUICKSTART / "backbone"
        arguments.data = arguments.data or QUICKSTART / "data"
        if not (arguments.backbone / "config.json").exists():
            parser.error(f"{arguments.backbone} does not exist: run `make prepare`, or give --backbone DIR")
    if arguments.skip_memory and arguments.skip_speed:
        parser.error("--skip-memory leaves nothing to measure with --skip-speed")
    if min(arguments.warm_up, arguments.repeats, arguments.steps) < 1:
        parser.error("--warm-up, --repeats and --steps must be at least 1")
    arguments.rivals = ("padded", "packed") if arguments.rival == "all" else (arguments.rival,)
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the tables, and write the result if --output is given."""
    arguments = parse(argv)
    os.environ.setdefault("OMP_NUM_THREADS", str(arguments.threads))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from vs_peft_measure import about, measure_memory, measure_speed
    from vs_peft_tables import markdown
    from workload import write_random_backbone

    with tempfile.TemporaryDirectory() as temporary:
        if arguments.backbone is None:
            arguments.backbone = Path(temporary) / arguments.backbone_shape
            dtype = getattr(torch, arguments.dtype)
            write_random_backbone(arguments.backbone_shape, arguments.backbone, dtype)
        memory = {} if arguments.skip_memory else measure_memory(arguments)
        speed = {} if arguments.skip_speed else measure_speed(arguments, Path(temporary))
        result: dict[str, Any] = {**about(arguments), **speed, "memory": memory}
    publish(result, markdown(result), arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
