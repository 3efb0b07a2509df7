"""megatron-mux against Hugging Face PEFT: the same LoRA tasks trained together, and one at a time.

    python benchmarks/vs_peft.py                    # backbone and data of `make prepare`, two threads
    python benchmarks/vs_peft.py --rival packed     # PEFT without padding only
    python benchmarks/vs_peft.py --zero-padded      # also our engine, all sequences padded to the longest
    python benchmarks/vs_peft.py --replicas 32      # also the memory of 32 tasks, against 32 processes of PEFT
    python benchmarks/vs_peft.py --profile          # also the time of a step by operator
    python benchmarks/vs_peft.py --device cuda      # bf16, a random backbone of Llama-3-8B's shape, eight tasks

All sides start from the same adapters and train on the same records in the same order with the same number of threads.
They take turns, so that other load of the machine affects both, and run in separate processes, so that they do not
share an allocator. Memory is measured in a new process for each case.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from script import add_machine, add_output, command_line, publish

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

from megatron_mux.gpus import set_allocator_options

HERE = Path(__file__).resolve().parent
QUICKSTART = HERE.parent / ".quickstart"


def build_parser() -> argparse.ArgumentParser:
    """The command line's flags."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--backbone", type=Path, help="Hugging Face directory (default on CPU: .quickstart/backbone)"
    )
    parser.add_argument(
        "--data", type=Path, help="directory of the mix's .jsonl files (default: .quickstart/data)"
    )
    parser.add_argument(
        "--backbone-shape",
        choices=("tiny", "llama3-8b"),
        help="use a random backbone of this shape and random records (default on a GPU: llama3-8b)",
    )
    parser.add_argument(
        "--scratch", type=Path, help="directory for the random backbone (default: a temporary directory)"
    )
    parser.add_argument("--layers", type=int, help="of the random backbone (default: those of its shape)")
    parser.add_argument("--sequences", type=int, help="in a step of each task (default: those of the mix)")
    add_machine(parser)
    parser.add_argument("--repeats", type=int, default=7, help="turns of each side")
    parser.add_argument("--steps", type=int, default=2, help="steps in a turn")
    parser.add_argument(
        "--warm-up", type=int, default=2, help="steps before the first turn, which are not timed"
    )
    parser.add_argument("--targets", nargs="+", default=["q_proj", "v_proj"])
    parser.add_argument(
        "--rival",
        choices=("padded", "packed", "all"),
        default="all",
        help="how PEFT trains: batches padded to their longest sequence, or packed without padding",
    )
    parser.add_argument(
        "--head",
        choices=("whole", "labelled", "fused"),
        help="PEFT's logits: of all tokens, of labelled ones, or in Liger's fused loss (default: fused, else whole)",
    )
    parser.add_argument(
        "--zero-padded",
        action="store_true",
        help="one more rival: our engine with the sequences of all tasks padded to the longest one of the step",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of the backbone on all sides (default: float32 on a CPU, bfloat16 on a GPU)",
    )
    parser.add_argument(
        "--profile", action="store_true", help="profile one more turn of each side, by kind of operator"
    )
    parser.add_argument(
        "--replicas",
        type=int,
        metavar="N",
        help="also measure the memory of N tasks together, the mix repeated, against N processes of PEFT",
    )
    parser.add_argument("--skip-memory", action="store_true")
    parser.add_argument("--skip-speed", action="store_true", help="measure memory only")
    add_output(parser)
    return parser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.backbone is not None and arguments.backbone_shape is not None:
        parser.error("give --backbone DIR or --backbone-shape NAME, not both")
    if arguments.backbone is None and arguments.backbone_shape is None:
        if arguments.device == "cuda":
            arguments.backbone_shape = "llama3-8b"
        else:
            arguments.backbone, arguments.data = (
                QUICKSTART / "backbone",
                arguments.data or QUICKSTART / "data",
            )
            if not (arguments.backbone / "config.json").exists():
                parser.error(
                    f"{arguments.backbone} does not exist: run `make prepare`, or give --backbone DIR"
                )
    if arguments.backbone is not None and arguments.layers is not None:
        parser.error("--layers needs a random backbone")
    arguments.dtype = arguments.dtype or ("bfloat16" if arguments.device == "cuda" else "float32")
    arguments.peft = ("padded", "packed") if arguments.rival == "all" else (arguments.rival,)
    arguments.rivals = (*arguments.peft, *(["zero-padded"] if arguments.zero_padded else []))
    if arguments.skip_memory and (arguments.skip_speed or arguments.replicas is not None):
        parser.error("--skip-memory leaves nothing to measure with --skip-speed, or for --replicas")
    if arguments.warm_up < 1 or arguments.repeats < 1 or arguments.steps < 1:
        parser.error("--warm-up, --repeats and --steps must be at least 1")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the tables, and write the result if --output is given."""
    arguments = parse(argv)
    set_allocator_options()  # before torch is imported, as `pretrain_mux.py` does
    os.environ.setdefault("OMP_NUM_THREADS", str(arguments.threads))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as temporary:
        if arguments.backbone is None:
            scratch = arguments.scratch or Path(temporary)
            words = (arguments.backbone_shape, arguments.layers, arguments.dtype)
            arguments.backbone = scratch / "-".join(str(word) for word in words if word is not None)
            _write_backbone(arguments)
        memory = {} if arguments.skip_memory else _memory(arguments)
        import vs_peft_measure
        from vs_peft_tables import markdown

        speed = {} if arguments.skip_speed else vs_peft_measure.measure_speed(arguments, Path(temporary))
        result: dict[str, Any] = {**vs_peft_measure.environment(arguments), **speed, "memory": memory}
    publish(result, markdown(result), arguments.output)
    return 0


def _write_backbone(arguments: argparse.Namespace) -> None:
    import torch
    from workload import write_random_backbone

    dtype = getattr(torch, arguments.dtype)
    write_random_backbone(arguments.backbone_shape, arguments.backbone, dtype, arguments.layers)


def _memory(arguments: argparse.Namespace) -> dict[str, dict[str, int]]:
    """Measure each case in a process of its own; for PEFT, one task per shape of batch."""
    from vs_peft_measure import measure_memory
    from vs_peft_sides import in_new_process
    from workload import mix_of, tasks_per_batch_shape

    counts = ("mix", "one", "eight", *([] if arguments.replicas is None else [str(arguments.replicas)]))
    cases = [f"mux:{count}" for count in counts]
    found = {case: in_new_process(measure_memory, arguments, case) for case in cases}
    kinds = tasks_per_batch_shape(mix_of(arguments.backbone_shape, arguments.device, arguments.sequences))
    for rival in arguments.peft:
        for i, count in kinds.items():
            one = in_new_process(measure_memory, arguments, f"{rival}:{i}")
            found[f"{rival}:{i}"] = {**one, "tasks_of_this_kind": count}
    return found


if __name__ == "__main__":
    sys.exit(main())
