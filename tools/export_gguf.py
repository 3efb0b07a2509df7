"""Export a LoRA or VeRA adapter as a GGUF file, for llama.cpp.

    python tools/export_gguf.py --backbone DIR --adapter DIR --output adapter.gguf [--outtype f16]
    llama-cli --model backbone.gguf --lora adapter.gguf

llama.cpp adds it to the backbone converted to GGUF, quantised or not. Needs the package gguf.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

from megatron_mux.arguments.parser import adapter_parser
from megatron_mux.arguments.values import path
from megatron_mux.errors import exit_status


def build_parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser, add = adapter_parser(__doc__.splitlines()[0])
    add("--output", type=path, required=True, metavar="FILE", help="new GGUF file")
    add("--outtype", choices=("f32", "f16"), default="f32", help="how values are stored (f32)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Export and print; returns 2 if the input is wrong."""
    return exit_status(lambda: run(build_parser().parse_args(argv)), "export_gguf.py")


def run(arguments: argparse.Namespace) -> None:
    """Export and print, with a parsed command line."""
    from megatron_mux.console import print_result
    from megatron_mux.merging.gguf_adapter import export_gguf

    exported = export_gguf(arguments.backbone, arguments.adapter, arguments.output, arguments.outtype)
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


if __name__ == "__main__":
    sys.exit(main())
