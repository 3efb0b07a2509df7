"""Export a LoRA or VeRA adapter as a GGUF file, for llama.cpp.

    megatron-mux export --backbone DIR --adapter DIR --output adapter.gguf [--outtype f16]
    llama-cli --model backbone.gguf --lora adapter.gguf

llama.cpp adds it to the backbone converted to GGUF, quantised or not. Needs the package gguf.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from megatron_mux.arguments.flag import FILE
from megatron_mux.arguments.parser import adapter_parser
from megatron_mux.errors import exit_status, to_stderr

PROGRAM = "megatron-mux export"


def build_parser(program: str = PROGRAM) -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser, add = adapter_parser(program, __doc__.splitlines()[0])
    add("--output", **FILE, required=True, help="new GGUF file")
    add("--outtype", choices=("f32", "f16"), default="f32", help="how values are stored (f32)")
    return parser


def main(argv: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Export and print; returns 2 if the input is wrong."""
    return exit_status(lambda: run(build_parser(program).parse_args(argv)), program)


def run(arguments: argparse.Namespace) -> None:
    """Export and print, with a parsed command line."""
    from megatron_mux.console import print_result
    from megatron_mux.merging.gguf_adapter import export_gguf
    from megatron_mux.saved_files import find_adapter

    exported = export_gguf(
        arguments.backbone, find_adapter(arguments.adapter, to_stderr), arguments.output, arguments.outtype
    )
    if arguments.json:
        print(json.dumps({**asdict(exported), "output": str(arguments.output)}))
        return
    cells = {
        "weights": str(exported.modules),
        "alpha": f"{exported.alpha:g}",
        "MB": f"{exported.size / 1e6:.1f}",
        "seconds": f"{exported.seconds:.1f}",
    }
    title = f"adapter exported for {exported.architecture}"
    print_result(title, cells, f"GGUF adapter: {arguments.output}")
