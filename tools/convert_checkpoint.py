"""`megatron-mux convert` as a script of a checkout."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

from megatron_mux.cli import convert

main = partial(convert.main, program="convert_checkpoint.py")

if __name__ == "__main__":
    sys.exit(main())
