"""The operations that `gpu_pointwise.py` times: our kernels, torch's operators and Liger-Kernel's functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Function = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """An operation.

    Attributes:
        name: Of it.
        widths: Of its inputs `[rows, 1, width]`, which all have gradients.
        ours, torch: The functions of the inputs; they return a tensor or several.
        liger: Liger-Kernel's, or None.
        forward, backward: Values a row that each direction reads and writes.
        blocks: Other settings to try: module, attribute and value, several of them at once.
    """

    name: str
    widths: tuple[int, ...]
    ours: Function
    torch: Function
    liger: Function | None
    forward: int
    backward: int
    blocks: Sequence[Sequence[tuple[Any, str, Any]]] = ()


class Inputs:
    """Sizes, and random tensors, of the operations.

    Args:
        device: Where they are; in fp32 on a CPU.
        shape: `hidden`, `ffn`, `size` of a head, `queries` of a group, `groups`.
    """

    def __init__(self, device: str, shape: dict[str, int]) -> None:
        self.hidden, self.ffn, self.size = shape["hidden"], shape["ffn"], shape["size"]
        self.queries, self.groups = shape["queries"], shape["groups"]
        self._device = device
        self._angles: dict[tuple[int, Any], Any] = {}
        self._frequencies = self.random(self.size // 2)

    def random(self, width: int) -> Any:
        """`[width]`."""
        import torch

        values = torch.randn(width, device=self._device)
        return values.to(torch.bfloat16 if self._device == "cuda" else torch.float32)

    def angles(self, x: Any) -> Any:
        """Cosine and sine of each row's angles, in its dtype; computed once."""
        import torch

        if (len(x), x.dtype) not in self._angles:
            turns = torch.arange(len(x), device=self._device).view(-1, 1, 1) * self._frequencies.float()
            both = turns.cos().to(self._frequencies.dtype), turns.sin().to(self._frequencies.dtype)
            self._angles[len(x), x.dtype] = both[0].to(x.dtype), both[1].to(x.dtype)
        return self._angles[len(x), x.dtype]


def as_in(x: Any, one: Any) -> Any:
    """A weight or bias in the dtype of `x`."""
    return None if one is None else one.to(x.dtype)


def cases(device: str, shape: dict[str, int]) -> list[Case]:
    """The operations of a layer."""
    from megatron_mux.kernels.pointwise.arguments import Norm

    inputs = Inputs(device, shape)
    norm = Norm(inputs.random(inputs.hidden), None, 1e-5, False)
    liger = liger_functions(norm, inputs.angles, (inputs.queries, inputs.groups, inputs.size))
    return [*activations(inputs, liger), *norms(inputs, norm, liger), *turns(inputs, liger)]


def activations(inputs: Inputs, liger: dict[str, Function]) -> list[Case]:
    """Between the products of an MLP."""
    import torch

    from megatron_mux.kernels.pointwise import functions as fused
    from megatron_mux.kernels.pointwise import reference as pointwise
    from megatron_mux.kernels.pointwise import triton as triton_pointwise

    ffn, bias, swiglu = inputs.ffn, inputs.random(inputs.ffn), pointwise.gated("silu")
    assert swiglu is not None
    blocks = [
        [(triton_pointwise, "BLOCK", block), (triton_pointwise, "ACTIVATION_WARPS", count)]
        for block, count in ((1024, 4), (2048, 8), (4096, 4), (4096, 8))
    ]
    return [
        Case(
            "swiglu", (2 * ffn,), lambda x: fused.activate(x, name="silu", gate=True), swiglu,
            liger.get("swiglu"), 3 * ffn, 5 * ffn, blocks,
        ),
        Case(
            "gelu with bias", (ffn,), lambda x: fused.activate(x, as_in(x, bias), name="gelu", gate=False),
            lambda x: torch.nn.functional.gelu(x + as_in(x, bias)), None, 2 * ffn, 3 * ffn,
        ),
    ]  # fmt: skip


def norms(inputs: Inputs, norm: Any, liger: dict[str, Function]) -> list[Case]:
    """Norms of the hidden states, with and without a sum before."""
    import torch

    from megatron_mux.kernels.pointwise import functions as fused
    from megatron_mux.kernels.pointwise import triton as triton_pointwise
    from megatron_mux.kernels.pointwise.arguments import Norm

    hidden, bias = inputs.hidden, inputs.random(inputs.hidden)
    layer_norm = Norm(inputs.random(hidden), inputs.random(hidden), 1e-5, True)

    def cast(norm: Norm, x: Any) -> Norm:
        return Norm(as_in(x, norm.weight), as_in(x, norm.bias), norm.eps, norm.centred)

    def plain(x: Any, own: Norm) -> Any:
        own = cast(own, x)
        if own.centred:
            return torch.nn.functional.layer_norm(x, (hidden,), own.weight, own.bias, own.eps)
        return torch.nn.functional.rms_norm(x, (hidden,), own.weight, own.eps)

    def plain_sum(x: Any, bias: Any, residual: Any, own: Norm) -> Any:
        total = residual + (x if bias is None else x + as_in(x, bias))
        return total, plain(total, own)

    warps = [[(triton_pointwise, "norm_warps", lambda width, count=count: count)] for count in (4, 8, 16)]
    return [
        Case(
            "norm of the hidden states", (hidden,), lambda x: fused.fork(x, cast(norm, x)),
            lambda x: (x.view_as(x), plain(x, norm)), liger.get("norm"), 2 * hidden, 4 * hidden, warps,
        ),
        Case(
            "residual sum and norm", (hidden, hidden),
            lambda x, y: fused.join(x, None, y, None, cast(norm, x)),
            lambda x, y: plain_sum(x, None, y, norm), liger.get("sum"), 4 * hidden, 4 * hidden, warps,
        ),
        Case(
            "sum with bias and LayerNorm", (hidden, hidden),
            lambda x, y: fused.join(x, as_in(x, bias), y, None, cast(layer_norm, x)),
            lambda x, y: plain_sum(x, bias, y, layer_norm), None, 4 * hidden, 4 * hidden,
        ),
        Case(
            "norm before and after the sum", (hidden, hidden),
            lambda x, y: fused.join(x, None, y, cast(norm, x), cast(norm, x)),
            lambda x, y: plain_sum(plain(x, norm), None, y, norm), None, 4 * hidden, 6 * hidden,
        ),
    ]  # fmt: skip


def turns(inputs: Inputs, liger: dict[str, Function]) -> list[Case]:
    """Queries, keys and values of linear_qkv's output."""
    import torch

    from megatron_mux.kernels.pointwise import functions as fused
    from megatron_mux.kernels.pointwise import reference as pointwise
    from megatron_mux.kernels.pointwise import triton_rotary
    from megatron_mux.kernels.pointwise.arguments import Heads

    size, queries, groups, angles = inputs.size, inputs.queries, inputs.groups, inputs.angles
    mixed, heads = (queries + 2) * groups * size, Heads(size, queries)
    normed = Heads(size, queries, weights=(inputs.random(size), inputs.random(size)), eps=1e-5)

    def plain(x: Any, own: Heads) -> Any:
        query, key, value = fused.split_heads(x, own)
        if own.weights[0] is not None:
            query, key = (
                torch.nn.functional.rms_norm(part, (size,), as_in(x, weight), own.eps)
                for part, weight in zip((query, key), own.weights, strict=True)
            )
        return pointwise.rotate(query, *angles(x)), pointwise.rotate(key, *angles(x)), value.contiguous()

    def ours(x: Any, own: Heads) -> Any:
        weights = tuple(as_in(x, weight) for weight in own.weights)
        return fused.turn(x, angles(x), Heads(size, queries, weights=weights, eps=own.eps))

    blocks = [
        [(triton_rotary, "ELEMENTS", block), (triton_rotary, "WARPS", count)]
        for block, count in ((2048, 4), (2048, 8), (4096, 8), (8192, 8))
    ]
    return [
        Case(
            "queries, keys, values", (mixed,), lambda x: ours(x, heads), lambda x: plain(x, heads),
            liger.get("turn"), 2 * mixed, 2 * mixed, blocks,
        ),
        Case(
            "the same, normalised", (mixed,), lambda x: ours(x, normed), lambda x: plain(x, normed),
            None, 2 * mixed, 2 * mixed + (queries + 1) * groups * size, blocks[:2],
        ),
    ]  # fmt: skip


def liger_functions(norm: Any, angles: Function, heads: tuple[int, int, int]) -> dict[str, Function]:
    """Liger-Kernel's functions, those that are importable."""
    found: dict[str, Function] = {}
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
        from liger_kernel.ops.rope import LigerRopeFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    except ImportError:
        return found
    queries, groups, size = heads

    def turn(x: Any) -> Any:
        query, key, value = x.reshape(len(x), groups, -1).split([queries * size, size, size], dim=-1)
        query = query.reshape(1, len(x), -1, size).transpose(1, 2)
        key = key.reshape(1, len(x), -1, size).transpose(1, 2)
        cos, sin = (one.squeeze(1).repeat(1, 2).unsqueeze(0) for one in angles(x))
        query, key = LigerRopeFunction.apply(query, key, cos, sin)
        return query, key, value.contiguous()

    found["swiglu"] = lambda x: LigerSiLUMulFunction.apply(*x.chunk(2, dim=-1))
    found["norm"] = lambda x: (
        x.view_as(x), LigerRMSNormFunction.apply(x, norm.weight, norm.eps, 0.0, "llama", False)
    )  # fmt: skip
    found["turn"] = turn
    try:
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    except ImportError:
        return found
    found["sum"] = lambda x, y: LigerFusedAddRMSNormFunction.apply(
        x, y, norm.weight, norm.eps, 0.0, "llama", False
    )[::-1]
    return found
