"""GPUs by name: what of them decides which kernels run, and so what these allocate, and how fast they are."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import NamedTuple

from megatron_mux.errors import UserError

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables that may hold the options of torch's allocator; the second name is the older one."""
ALLOCATOR_OPTIONS = "expandable_segments:True"
"""Options of a run whose user has set none: lengths vary from step to step, which fragments segments of fixed size."""


def set_allocator_options(environment: MutableMapping[str, str] = os.environ) -> None:
    """Have torch's allocator on GPUs use our options, unless the user has set some.

    Args:
        environment: Of a process that has not imported torch yet.
    """
    if not any(name in environment for name in ALLOCATOR_VARIABLES):
        environment[ALLOCATOR_VARIABLES[0]] = ALLOCATOR_OPTIONS


@dataclass(frozen=True)
class Gpu:
    """What of a GPU decides which kernels run.

    Attributes:
        capability: Compute capability, major and minor.
        prefers_cudnn: Whether attention tries cuDNN before flash attention: torch does so on compute capability 9.0
            and 10.0 where it finds cuDNN 9.15.1 or newer (wheels for CUDA 13 bring one).
    """

    capability: tuple[int, int] = (9, 0)
    prefers_cudnn: bool = True


class Known(NamedTuple):
    """A GPU of the table.

    Attributes:
        gpu: Its kernels.
        half, single: Operations a second on dense bf16 (fp16 where there is no bf16) and on fp32 without TF32.
        bandwidth: Bytes a second of its memory.
    """

    gpu: Gpu
    half: float
    single: float
    bandwidth: float


_BLACKWELL, _HOPPER = Gpu((10, 0), True), Gpu((9, 0), True)
_ADA, _GA102, _GA100 = Gpu((8, 9), False), Gpu((8, 6), False), Gpu((8, 0), False)

GPUS: Mapping[str, Known] = {
    # A part of the device's own name, of which a longer one counts first. Speeds are those of vendors' data sheets.
    "B200": Known(_BLACKWELL, 2250e12, 80e12, 8.0e12),
    "H200": Known(_HOPPER, 989e12, 67e12, 4.8e12),
    "H100": Known(_HOPPER, 989e12, 67e12, 3.35e12),
    "H800": Known(_HOPPER, 989e12, 67e12, 3.35e12),
    "H20": Known(_HOPPER, 148e12, 44e12, 4.0e12),
    "A100": Known(_GA100, 312e12, 19.5e12, 2.0e12),
    "A800": Known(_GA100, 312e12, 19.5e12, 2.0e12),
    "L40S": Known(_ADA, 362e12, 91e12, 0.864e12),
    "L40": Known(_ADA, 181e12, 90.5e12, 0.864e12),
    "L4": Known(_ADA, 121e12, 30.3e12, 0.3e12),
    "4090": Known(_ADA, 165e12, 82.6e12, 1.008e12),
    "A6000": Known(_GA102, 155e12, 38.7e12, 0.768e12),
    "A40": Known(_GA102, 150e12, 37e12, 0.696e12),
    "A10": Known(_GA102, 125e12, 31.2e12, 0.6e12),
    "3090": Known(_GA102, 71e12, 35.6e12, 0.936e12),
    "V100": Known(Gpu((7, 0), False), 125e12, 15.7e12, 0.9e12),
    "T4": Known(Gpu((7, 5), False), 65e12, 8.1e12, 0.32e12),
}


def find(name: str) -> Known | None:
    """A GPU by its name; None if it is not known.

    Its part begins a word and ends before another digit (`A1000` is no A100). Letters may follow (`V100S`), and a `G`
    may come before it (`GH200`).
    """
    found = [part for part in GPUS if re.search(rf"(?<![A-Z0-9])G?{part}(?![0-9])", name.upper())]
    return GPUS[max(found, key=len)] if found else None


def known(name: str, *others: str) -> Known:
    """A GPU by what a user calls it.

    Args:
        name: What `--device` says.
        others: What the flag may say besides, for the message.

    Raises:
        UserError: It is not known.
    """
    found = find(name)
    if found is None:
        raise UserError(f"--device {name}: is not known: choose from {', '.join((*others, *GPUS))}")
    return found
