"""Products of rows with the frozen matrix of their group: a matrix for each expert.

On a GPU they are one launch, and the host does not know how many rows a group has. On a CPU they are a loop.

Shapes: P rows, in order of their groups, E groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megatron_mux.kernels.experts.groups import ExpertGroups
from megatron_mux.kernels.experts.interface import PRODUCT_ROWS
from megatron_mux.kernels.triton_choice import has_triton, suits_triton

ProductName = Literal["loop", "grouped_mm", "triton"]

MOST_GROUPS = 1023
"""Groups that `torch.nn.functional.grouped_mm` computes at most on a GPU."""

LAUNCHES = 1
"""Device launches of a product on a GPU, besides those that lay out its tiles."""


def grouped_product(x: Tensor, weight: Tensor, groups: ExpertGroups) -> Tensor:
    """Multiply each row with the transposed matrix of its expert.

    Args:
        x: `[P, in]`.
        weight: `[E, out, in]`, frozen.

    Returns:
        `[P, out]`, differentiable with respect to `x`.
    """
    product: Tensor = _GroupedProduct.apply(x, weight, groups)  # type: ignore[no-untyped-call]
    return product


def multiply(x: Tensor, weight: Tensor, groups: ExpertGroups) -> Tensor:
    """`grouped_product` without a gradient."""
    if not len(x):
        return x.new_empty(0, weight.shape[1])
    return PRODUCTS[product_for(x, weight)](x, weight, groups)


def product_for(x: Tensor, weight: Tensor) -> ProductName:
    """How the products of rows with matrices are computed where they are.

    `grouped_mm` is one kernel for bf16 on GPUs of compute capability 9 and 10 only; elsewhere it reads offsets on the
    host and loops.
    """
    if not suits_triton(x.device, x.dtype):
        return "loop"
    if x.dtype == torch.bfloat16 and _has_grouped_kernel(x) and _is_aligned(x, weight):
        return "grouped_mm"
    return "triton" if has_triton() or isinstance(x, FakeTensor) else "loop"


def _has_grouped_kernel(x: Tensor) -> bool:
    """Whether the GPU has it; a dry run predicts one that does, which takes the same memory as others."""
    return isinstance(x, FakeTensor) or _capability(x.device) in (9, 10)


@cache
def _capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0] if hasattr(torch.nn.functional, "grouped_mm") else 0


def _is_aligned(x: Tensor, weight: Tensor) -> bool:
    widths = {x.stride(0), *weight.stride()} - {1}
    return len(weight) <= MOST_GROUPS and all(width * x.element_size() % 16 == 0 for width in widths)


def rows_of(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """The groups that have rows, and which."""
    for group, (start, stop) in enumerate(pairwise(accumulate(counts, initial=0))):
        if start < stop:
            yield group, slice(start, stop)


def _by_loop(x: Tensor, weight: Tensor, groups: ExpertGroups) -> Tensor:
    """A product for each expert. The host reads how many rows each has."""
    y = x.new_empty(x.shape[0], weight.shape[1])
    for group, rows in rows_of(groups.counts):
        torch.mm(x[rows], weight[group].t(), out=y[rows])
    return y


def _by_grouped_mm(x: Tensor, weight: Tensor, groups: ExpertGroups) -> Tensor:
    ends = groups.ends
    if isinstance(x, FakeTensor):
        return x.new_empty(x.shape[0], weight.shape[1])
    y: Tensor = torch.nn.functional.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    return y


def _by_triton(x: Tensor, weight: Tensor, groups: ExpertGroups) -> Tensor:
    tiles = groups.tiles(PRODUCT_ROWS)
    y = x.new_empty(x.shape[0], weight.shape[1])
    if not isinstance(x, FakeTensor):
        from megatron_mux.kernels.experts.triton import product_

        product_(y, x, weight, tiles)
    return y


PRODUCTS: dict[ProductName, Callable[[Tensor, Tensor, ExpertGroups], Tensor]] = {
    "loop": _by_loop,
    "grouped_mm": _by_grouped_mm,
    "triton": _by_triton,
}
"""`[P, out]` from `[P, in]`, `[E, out, in]` and the rows of each expert, in each of the ways."""


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, groups: ExpertGroups) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.groups = groups
        return multiply(x, weight, groups)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return multiply(dy.contiguous(), weight.transpose(1, 2), ctx.groups), None, None
