"""`python -m megatron_mux.cli` is `megatron-mux`, for torchrun and for environments without the script."""

import sys

from megatron_mux.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
