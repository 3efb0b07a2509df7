"""Export the layers of a backbone that a client of split fine-tuning needs, so that it never holds the others.

    python -m megatron_mux.split.export_client --backbone DIR --cut-front N --cut-back N --out DIR

`--backbone` of the client takes the directory that is made.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_mux.arguments.parser import BACKBONE, Parser
from megatron_mux.arguments.values import at_least, model, path
from megatron_mux.errors import UserError, exit_status

if TYPE_CHECKING:
    from megatron_mux.backbone.registry import BackboneInfo

PROGRAM = "megatron_mux.split.export_client"

_WEIGHTS = "model.safetensors"
_TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "spiece.model",
    "*.tiktoken",
    "chat_template*",
)
"""Patterns of the files that tokenizers consist of."""


def export_client(backbone: Path, cut_front: int, cut_back: int, out: Path) -> int:
    """Write config.json, the tokenizer, the client's weights and `split.json` to a new directory, all of it or nothing.

    Args:
        backbone: A whole backbone, or an export with at least these layers.
        out: The directory; it may exist if it is empty.

    Returns:
        Bytes of the weights.

    Raises:
        UserError: The backbone cannot be read or cut so, or `out` cannot be written.
    """
    from megatron_mux.files import new_directory
    from megatron_mux.split.client.files import read_client_info

    info = read_client_info(backbone, cut_front, cut_back)
    with new_directory("--out", out) as directory:
        return _fill(directory, info, cut_front, cut_back)


def _fill(directory: Path, info: BackboneInfo, cut_front: int, cut_back: int) -> int:
    """Write the files of an export; returns the bytes of its weights."""
    from megatron_mux.backbone.checkpoint import Checkpoint
    from megatron_mux.backbone.model_directory import open_checkpoint, read_config
    from megatron_mux.files import write
    from megatron_mux.split.client.files import EXPORT, ExportedLayers, client_tensors, digest_of
    from megatron_mux.tensor_file import write_tensors

    tokenizer = info.tokenizer
    copied = sorted({file for pattern in _TOKENIZER for file in tokenizer.glob(pattern) if file.is_file()})
    if not copied:
        raise UserError(
            f"{tokenizer}: holds no tokenizer (tokenizer.json): put the backbone's tokenizer beside it"
        )
    write(directory / "config.json", json.dumps(read_config(info.path), indent=2).encode())
    for file in copied:
        write(directory / file.name, file.read_bytes())
    names = [info.stored[name] for name in sorted(client_tensors(info.shape, cut_front, cut_back))]
    with open_checkpoint(info.path, info.shape) as checkpoint:
        tensors = {name: checkpoint.read(name, slice(None)) for name in names}
    write_tensors(directory / _WEIGHTS, tensors, {})
    with Checkpoint(directory) as checkpoint:
        digest = digest_of(directory, checkpoint)
    exported = ExportedLayers(
        fingerprint=info.fingerprint, cut_front=cut_front, cut_back=cut_back, digest=digest
    )
    write(directory / EXPORT, (exported.model_dump_json(indent=2) + "\n").encode())
    return sum(tensor.nbytes for tensor in tensors.values())


def build_parser(program: str = "python -m megatron_mux.split.export_client") -> argparse.ArgumentParser:
    """The command line."""
    parser = Parser(prog=program, description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--backbone", type=model, required=True, metavar="DIR", help=BACKBONE)
    add("--cut-front", type=at_least(0), default=1, metavar="N", help="first layers of the client (1)")
    add("--cut-back", type=at_least(0), default=1, metavar="N", help="last layers of the client (1)")
    add("--out", type=path, required=True, metavar="DIR", help="directory to make")
    return parser


def main(argv: Sequence[str] | None = None, program: str | None = None) -> int:
    """Parse the command line and export.

    Returns:
        Exit status: 0; 2 if the input is wrong.
    """

    def work() -> None:
        arguments = (build_parser(program) if program else build_parser()).parse_args(argv)
        size = export_client(arguments.backbone, arguments.cut_front, arguments.cut_back, arguments.out)
        from megatron_mux.memory.sizes import show_size

        print(f"{arguments.out}: {show_size(size)} of weights")

    return exit_status(work, program or PROGRAM)


if __name__ == "__main__":
    sys.exit(main())
