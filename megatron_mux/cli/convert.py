"""Convert a model between a Hugging Face directory and a Megatron checkpoint (torch_dist), values unchanged.

    megatron-mux convert --input DIR --output DIR [--tokenizer-model DIR]

The input's format is recognised, and the other one is written. One tensor is read and written after the other, so this
takes about the memory of the largest of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron_mux.arguments.flag import DIRECTORY, MODEL
from megatron_mux.arguments.parser import Parser, add_shard_size
from megatron_mux.errors import exit_status

PROGRAM = "megatron-mux convert"


def build_parser(program: str = PROGRAM) -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = Parser(prog=program, description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add(
        "--input",
        **MODEL,
        required=True,
        help="Hugging Face directory, org/name in the Hugging Face cache, or Megatron's --save",
    )
    add("--output", **DIRECTORY, required=True, help="new directory for the model in the other format")
    add(
        "--tokenizer-model",
        **DIRECTORY,
        help="Hugging Face directory of the tokenizer to copy (default: the input's)",
    )
    add_shard_size(add)
    return parser


def main(argv: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Convert and print what was written; returns 2 if the input is wrong."""
    return exit_status(lambda: run(build_parser(program).parse_args(argv)), program)


def run(arguments: argparse.Namespace) -> None:
    """Convert and print what was written, with a parsed command line."""
    from megatron_mux.console import print_result, progress_bar
    from megatron_mux.merging.convert import convert

    with progress_bar("converting", in_bytes=True) as progress:
        made = convert(
            arguments.input, arguments.output, arguments.tokenizer_model, arguments.max_shard_size, progress
        )
    cells = {"tensors": str(made.tensors), "GB": f"{made.size / 1e9:.3f}", "seconds": f"{made.seconds:.1f}"}
    print_result(f"converted to {made.to}", cells, f"model: {arguments.output}")
