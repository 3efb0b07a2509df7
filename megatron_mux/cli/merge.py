"""Merge an adapter into its backbone: a Hugging Face directory that needs no adapter.

    megatron-mux merge --backbone DIR --adapter DIR --output DIR [--dtype bfloat16]

Weights are read, changed and written one by one, so this takes about the memory of the largest of them. LoRA (also
DoRA, and on routed experts), VeRA, LoHa, IA3 and diff pruning can be merged, modules_to_save and
trainable_token_indices too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_mux.arguments.parser import adapter_parser, add_shard_size
from megatron_mux.arguments.values import path
from megatron_mux.errors import exit_status, to_stderr

if TYPE_CHECKING:
    from megatron_mux.merging.merge import Merged

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
    add("--output", type=path, required=True, metavar="DIR", help="new directory for the merged model")
    add("--dtype", choices=_DTYPES, help="dtype of the merged weights (as the backbone stores them)")
    add_shard_size(add)
    return parser


def main(argv: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Merge and print; returns 2 if the input is wrong."""
    return exit_status(lambda: run(build_parser(program).parse_args(argv), program), program)


def run(arguments: argparse.Namespace, program: str) -> None:
    """Merge and print, with a parsed command line."""
    import torch

    from megatron_mux.merging.merge import merge
    from megatron_mux.saved_files import find_adapter

    adapter = find_adapter(arguments.adapter, to_stderr)
    dtype = None if arguments.dtype is None else getattr(torch, arguments.dtype)
    with _ProgressBar() as progress:
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
    else:
        _print(merged, arguments.output)


class _ProgressBar:
    """A progress bar on standard error."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("merging"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[name]}"),
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
            transient=True,
        )

    def __enter__(self) -> _ProgressBar:
        self._bar.start()
        self._task = self._bar.add_task("merging", total=None, name="")
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, name: str, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total, name=name)


def _print(merged: Merged, output: Path) -> None:
    """Print what was done."""
    from megatron_mux.console import print_result

    cells = {
        "tensors": str(merged.tensors),
        "changed": str(merged.changed),
        "GB": f"{merged.size / 1e9:.3f}",
        "files": str(merged.files),
        "seconds": f"{merged.seconds:.1f}",
    }
    untied = ["The output layer was the embedding; now each has weights of its own."] if merged.untied else []
    print_result(f"{merged.kind} adapter merged", cells, *untied, f"merged model: {output}")
