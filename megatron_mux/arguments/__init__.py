"""The flags of `pretrain_mux.py`: Megatron's spelling for what Megatron has, one `--mux-*` group for ours.

Unsupported flags are refused by name, with what to do instead; none is ignored.
"""

from megatron_mux.arguments.model import MuxArguments
from megatron_mux.arguments.parser import add_mux_args, build_parser, parse_args

__all__ = ["MuxArguments", "add_mux_args", "build_parser", "parse_args"]
