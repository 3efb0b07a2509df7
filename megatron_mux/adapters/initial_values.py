"""Initial values of LoRA that are computed rather than drawn: from the weights that it adapts, or several at once.

PiSSA (Meng et al., 2024) and OLoRA (Büyükakyüz, 2024) start from factors of the weight, whose product peft takes away
from the weight. Here the backbone is shared and stays as it is: the initial factors `A0` and `B0` are kept, fixed, and
their product is subtracted from the adapter's. Everything is computed from the module's full weight on each rank that
needs it, so the values do not depend on how the backbone is divided.

Shapes: K and N width of the module's input and output, R rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_mux.errors import UserError
from megatron_mux.kernels.dropout import key_of
from megatron_mux.shape import BackboneShape, Module

DOWN, UP, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
"""The tensors of a module, by the end of their key in peft's files."""
FIRST_DOWN, FIRST_UP = "lora_A0.weight", "lora_B0.weight"
"""Initial factors that are kept; files have them within A and B."""

_ITERATIONS = re.compile(r"pissa_niter_([1-9]\d{0,2})")


def is_known(method: Any) -> bool:
    """Whether a value of `init_lora_weights` is supported."""
    return isinstance(method, bool) or method in ("gaussian", "orthogonal") or takes_away(method)


def takes_away(method: bool | str) -> bool:
    """Whether the initial product is subtracted, so that training starts from the backbone's own output."""
    return method in ("pissa", "olora") or is_random(method)


def is_random(method: bool | str) -> bool:
    """Whether the initial product is an approximation that depends on random numbers."""
    return isinstance(method, str) and _ITERATIONS.fullmatch(method) is not None


def check_rank(method: bool | str, rank: int, module: Module, shape: BackboneShape) -> None:
    """Check that a module can start with these values at a rank.

    Raises:
        UserError: It cannot.
    """
    if method == "orthogonal" and rank % 2:
        raise UserError(
            f"init_lora_weights: orthogonal needs even ranks, as in peft; that of {module.path} is {rank}"
        )
    if not takes_away(method):
        return
    widest = min(module.in_features, module.out_features)
    if module.experts or rank > widest:
        what = (
            "routed experts" if module.experts else f"{module.path}, whose weight has rank {widest} at most"
        )
        raise UserError(f"init_lora_weights: {method} is not possible for {what}")
    if method == "olora" and shape.names.transposed:
        raise UserError(
            f"init_lora_weights: olora is not possible for the transposed weights of a {shape.family}, as in peft: "
            "choose pissa"
        )


def factors(
    method: bool | str, weight: Tensor, rank: int, scale: float, seed: int, path: str
) -> dict[str, Tensor]:
    """A and B of `pissa`, `pissa_niter_N` or `olora`, and the same again as the factors that are kept.

    Args:
        method: Value of `init_lora_weights`.
        weight: `[N, K]`.
        rank: R.
        scale: Factor of the product B A.
        seed: Of the task, for `pissa_niter_N`.
    """
    if method == "olora":
        q, r = torch.linalg.qr(weight)
        down, up = r[:rank], q[:, :rank]
    else:
        u, s, v = _singular(method, weight, rank, key_of(seed, "initial", path) >> 1)
        root = (s / scale).sqrt()
        down, up = root[:, None] * v, u * root
    down, up = down.contiguous(), up.contiguous()
    return {DOWN: down, UP: up, FIRST_DOWN: down, FIRST_UP: up}


def _singular(method: bool | str, weight: Tensor, rank: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """The largest singular values `[R]`, their left vectors `[N, R]` and their right ones `[R, K]`."""
    match = _ITERATIONS.fullmatch(str(method))
    if match is None:
        u, s, v = torch.linalg.svd(weight, full_matrices=False)
        return u[:, :rank], s[:rank], v[:rank]
    with torch.random.fork_rng(devices=[]):  # torch draws from its global generator here
        torch.manual_seed(seed)
        u, s, v = torch.svd_lowrank(weight, rank, niter=int(match[1]))
    return u, s, v.t()


def orthogonal(module: Module, rank: int, seed: int) -> dict[str, Tensor]:
    """A and B of random numbers, orthogonal to each other, so that their product is zero, as peft draws them."""
    generator = torch.Generator().manual_seed(key_of(seed, "initial", module.path) >> 1)
    q, _ = torch.linalg.qr(torch.randn(rank, rank, generator=generator))
    left = torch.randn(module.in_features, rank // 2, generator=generator)
    right = torch.randn(rank // 2, module.out_features, generator=generator)
    return {DOWN: (left @ q[0::2]).t() / 10, UP: right.t() @ q[1::2] / 10}


def magnitude(weight: Tensor, scale: float, tensors: Mapping[str, Tensor]) -> Tensor:
    """`[N]` norms of the weight's rows with the product of A and B.

    Args:
        weight: `[N, K]`.
        tensors: A and B; with kept initial factors, whose product goes away.
    """
    whole = weight
    if FIRST_DOWN not in tensors:  # else the two products cancel
        whole = weight + scale * tensors[UP].to(weight) @ tensors[DOWN].to(weight)
    norms: Tensor = torch.linalg.vector_norm(whole, dim=1)
    return norms


def joined(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A module's tensors as plain LoRA of twice the rank: peft's conversion, `[A; A0]` and `[B, -B0]`."""
    joined_tensors = dict(tensors)
    first_down, first_up = joined_tensors.pop(FIRST_DOWN), joined_tensors.pop(FIRST_UP)
    joined_tensors[DOWN] = torch.cat((tensors[DOWN], first_down))
    joined_tensors[UP] = torch.cat((tensors[UP], -first_up), dim=1)
    return joined_tensors


def parted(tensors: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """The inverse of `joined`; tensors that are not of twice the rank stay as they are."""
    down, up = tensors.get(DOWN), tensors.get(UP)
    if down is None or up is None or down.shape[0] != 2 * rank or up.shape[1] != 2 * rank:
        return tensors
    return {
        **tensors,
        DOWN: down[:rank],
        UP: up[:, :rank].contiguous(),
        FIRST_DOWN: down[rank:],
        FIRST_UP: -up[:, rank:].contiguous(),
    }
