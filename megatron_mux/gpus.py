"""GPUs by name: what of them decides which kernels run, and so what these allocate, and how fast they are."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

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


class GpuSpec(NamedTuple):
    """A GPU of the table.

    Attributes:
        gpu: Its kernels.
        half, single: Operations a second on dense bf16 (fp16 where there is no bf16) and on fp32 without TF32.
        bandwidth: Bytes a second of its memory.
        link: Bytes a second that it sends to the GPUs of its node, while it receives as many.
        network: The same, to GPUs of other nodes.
    """

    gpu: Gpu
    half: float
    single: float
    bandwidth: float
    link: float
    network: float = 25e9


_BLACKWELL, _HOPPER = Gpu((10, 0), True), Gpu((9, 0), True)
_ADA, _GA102, _GA100 = Gpu((8, 9), False), Gpu((8, 6), False), Gpu((8, 0), False)
_NVLINK = {2: 150e9, 3: 300e9, 4: 450e9, 5: 900e9}
"""Bytes a second each way of all of a GPU's links, by NVLink's generation; vendors name the sum of both ways."""
_EXPORTED = 200e9  # of NVLink where it is cut down
_PCIE = {3: 16e9, 4: 32e9}
"""The same of sixteen lanes, by PCIe's generation."""
_NDR = 50e9  # a 400 Gb/s network adapter for each GPU; 25e9 is one of 200 Gb/s

GPUS: Mapping[str, GpuSpec] = {
    # A part of the device's own name, of which a longer one counts first. Speeds are those of vendors' data sheets.
    "B200": GpuSpec(_BLACKWELL, 2250e12, 80e12, 8.0e12, _NVLINK[5], _NDR),
    "H200": GpuSpec(_HOPPER, 989e12, 67e12, 4.8e12, _NVLINK[4], _NDR),
    "H100": GpuSpec(_HOPPER, 989e12, 67e12, 3.35e12, _NVLINK[4], _NDR),
    "H800": GpuSpec(_HOPPER, 989e12, 67e12, 3.35e12, _EXPORTED, _NDR),
    "H20": GpuSpec(_HOPPER, 148e12, 44e12, 4.0e12, _NVLINK[4], _NDR),
    "A100": GpuSpec(_GA100, 312e12, 19.5e12, 2.0e12, _NVLINK[3]),
    "A800": GpuSpec(_GA100, 312e12, 19.5e12, 2.0e12, _EXPORTED),
    "L40S": GpuSpec(_ADA, 362e12, 91e12, 0.864e12, _PCIE[4]),
    "L40": GpuSpec(_ADA, 181e12, 90.5e12, 0.864e12, _PCIE[4]),
    "L4": GpuSpec(_ADA, 121e12, 30.3e12, 0.3e12, _PCIE[4]),
    "4090": GpuSpec(_ADA, 165e12, 82.6e12, 1.008e12, _PCIE[4]),
    "A6000": GpuSpec(_GA102, 155e12, 38.7e12, 0.768e12, _PCIE[4]),
    "A40": GpuSpec(_GA102, 150e12, 37e12, 0.696e12, _PCIE[4]),
    "A10": GpuSpec(_GA102, 125e12, 31.2e12, 0.6e12, _PCIE[4]),
    "3090": GpuSpec(_GA102, 71e12, 35.6e12, 0.936e12, _PCIE[4]),
    "V100": GpuSpec(Gpu((7, 0), False), 125e12, 15.7e12, 0.9e12, _NVLINK[2]),
    "T4": GpuSpec(Gpu((7, 5), False), 65e12, 8.1e12, 0.32e12, _PCIE[3]),
}
ASSUMED = "A100"
"""Stands for a GPU that is not in the table."""

TABLE_VARIABLE = "MEGATRON_MUX_GPUS"
"""Environment variable: the user's own table of GPUs, a TOML file (docs/planning.md)."""

_FIELDS = {
    "bf16_tflops": ("half", 1e12),
    "fp32_tflops": ("single", 1e12),
    "memory_gb_s": ("bandwidth", 1e9),
    "link_gb_s": ("link", 1e9),
    "network_gb_s": ("network", 1e9),
}
"""Keys of a user's table: the attribute of `GpuSpec`, and its unit."""
_EXAMPLE = 'such as ["My GPU"] with like = "L40" and link_gb_s = 64'


def table() -> Mapping[str, GpuSpec]:
    """All GPUs by parts of their names: ours and the user's, which replace ours of the same name.

    Raises:
        UserError: The user's file cannot be read.
    """
    file = os.environ.get(TABLE_VARIABLE, "")
    return {**GPUS, **_read(file)} if file else GPUS


@cache
def _read(file: str) -> Mapping[str, GpuSpec]:
    try:
        with open(file, "rb") as opened:
            read = tomllib.load(opened)
        return {name: _known_of(name, dict(fields)) for name, fields in read.items()}
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{TABLE_VARIABLE} {file}: is no table of GPUs ({error}): {_EXAMPLE}") from None


def _known_of(name: str, fields: dict[str, object]) -> GpuSpec:
    """A GPU of the user's table.

    Raises:
        ValueError: A field is wrong.
    """
    like = GPUS.get(str(fields.pop("like", "")))
    if like is None:
        raise ValueError(f"{name}: like: must be one of {', '.join(GPUS)}")
    changed: dict[str, Any] = {}
    for key, value in fields.items():
        if key not in _FIELDS:
            raise ValueError(f"{name}: {key}: unknown key: choose from like, {', '.join(_FIELDS)}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise ValueError(f"{name}: {key}: must be a number above 0, got {value!r}")
        attribute, unit = _FIELDS[key]
        changed[attribute] = value * unit
    return like._replace(**changed)


def find(name: str) -> GpuSpec | None:
    """A GPU of the table by its name; None if it is not there.

    Its part begins a word and ends before another digit (`A1000` is no A100). Letters may follow (`V100S`), and a `G`
    may come before it (`GH200`).
    """
    gpus = table()
    named = name.upper()
    found = [p for p in gpus if re.search(rf"(?<![A-Z0-9])G?{re.escape(p.upper())}(?![0-9])", named)]
    return gpus[max(found, key=len)] if found else None


def assumed(name: str) -> tuple[GpuSpec, str]:
    """A GPU by its own name, and what to call it: one that is not in the table is taken for an A100, and called so."""
    found = find(name)
    if found is not None:
        return found, name
    return GPUS[ASSUMED], f"{name} (not in the table of GPUs, taken for an {ASSUMED}: see {TABLE_VARIABLE})"


def known(name: str, *others: str) -> GpuSpec:
    """A GPU by what a user calls it.

    Args:
        name: What `--device` says.
        others: What the flag may say besides, for the message.

    Raises:
        UserError: It is not known.
    """
    found = find(name)
    if found is None:
        raise UserError(
            f"--device {name}: is not known: choose from {', '.join((*others, *table()))}, or describe it in a file "
            f"that {TABLE_VARIABLE} names"
        )
    return found
