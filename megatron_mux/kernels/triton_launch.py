"""Launches Triton kernels in a fraction of the host's time that `kernel[grid](...)` takes.

Triton binds and specialises every argument of a launch again, to find what it compiled for arguments like them. Here
what it compiled is found by what of them it specialises on, and is launched as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
"""What Triton compiled, and the constants in the order of the kernel's parameters. This process uses one GPU."""


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: Sequence[Tensor | float | None],
    constants: Mapping[str, Any],
) -> None:
    """Launch a kernel on the current stream, as `kernel[grid](*arguments, **constants)` does.

    Args:
        kernel: A function that `triton.jit` returned, whose constants come after its arguments.
        grid: Programs in each of up to three dimensions.
        arguments: All that are no constants.
        constants: All constants, and options such as `num_warps`; those of one kernel always in one order.
    """
    key = [id(kernel), *constants.values()]  # kernels are there for good
    for argument in arguments:  # what Triton specialises on, or more
        if isinstance(argument, Tensor):
            key += argument.dtype, argument.data_ptr() & 15 == 0
        elif type(argument) is int:
            key.append(1 if argument == 1 else (argument & 15 == 0, argument >> 31 not in (0, -1)))
        else:
            key.append(argument.__class__)
    cached = _compiled.get(tuple(key))
    if cached is None:
        compiled = kernel[grid](*arguments, **constants)
        if compiled is not None:  # as it is in Triton's interpreter
            rest = tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
            _compiled[tuple(key)] = compiled, rest
        return
    compiled, rest = cached
    compiled[(*grid, 1, 1)[:3]](*arguments, *rest)


def cdiv(count: int, size: int) -> int:
    """Blocks of a size that hold so many: `triton.cdiv` takes the host ten times as long."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """The smallest power of two that is no less than `count`, a positive integer; as `cdiv`."""
    return 1 << (count - 1).bit_length()
