"""Merge an adapter into its backbone: a Hugging Face directory that needs no adapter.

    megatron-mux merge --backbone DIR --adapter DIR --output DIR [--dtype bfloat16]

Weights are read, changed and written one by one, so this takes about the memory of the largest of them. LoRA (also
DoRA, and on routed experts), VeRA, LoHa, IA3 and diff pruning can be merged, modules_to_save and
trainable_token_indices too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from megatron_mux.arguments.flag import DIRECTORY
from megatron_mux.arguments.parser import adapter_parser, add_shard_size
from megatron_mux.errors import exit_status, to_stderr

_DTYPES = ("float32", "bfloat16", "float16")

PROGRAM = "megatron-mux merge"


def build_parser(program: str = PROGRAM) -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser, add = adapter_parser(program, __doc__.splitlines()[0])
    add(
        "--backbone-dtype",
        choices=("nf4", "fp8", "int8"),
        help="how the run that trained the adapter quantised the backbone on load (--mux-backbone-dtype)",
    )
    add("--output", **DIRECTORY, required=True, help="new directory for the merged model")
    add("--dtype", choices=_DTYPES, help="dtype of the merged weights (as the backbone stores them)")
    add_shard_size(add)
    return parser


def main(argv: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Merge and print; returns 2 if the input is wrong."""
    return exit_status(lambda: run(build_parser(program).parse_args(argv), program), program)


def run(arguments: argparse.Namespace, program: str) -> None:
    """Merge and print, with a parsed command line."""
    import torch

    from megatron_mux.console import print_result, progress_bar
    from megatron_mux.merging.merge import merge
    from megatron_mux.saved_files import find_adapter

    adapter = find_adapter(arguments.adapter, to_stderr)
    dtype = None if arguments.dtype is None else getattr(torch, arguments.dtype)
    with progress_bar("merging", in_bytes=True) as progress:
        merged = merge(
            arguments.backbone,
            adapter,
            arguments.output,
            dtype,
            arguments.max_shard_size,
            progress,
            arguments.backbone_dtype,
            lambda text: to_stderr(f"{program}: warning: {text}"),
        )
    if arguments.json:
        print(json.dumps({**asdict(merged), "output": str(arguments.output)}))
        return
    cells = {
        "tensors": str(merged.tensors),
        "changed": str(merged.changed),
        "GB": f"{merged.size / 1e9:.3f}",
        "files": str(merged.files),
        "seconds": f"{merged.seconds:.1f}",
    }
    untied = ["The output layer was the embedding; now each has weights of its own."] if merged.untied else []
    print_result(f"{merged.kind} adapter merged", cells, *untied, f"merged model: {arguments.output}")
