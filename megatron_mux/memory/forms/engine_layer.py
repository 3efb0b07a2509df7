"""What a layer of the engine keeps from its forward to its backward pass, tensor by tensor, as closed forms.

The backbone is frozen: its products keep no input unless an adapter needs it, and its norms, rotations and activations
keep as little as can be. Which tensors there are follows from the layer's structure (`Architecture`). Forms are per
token (a row of the micro-batch), for one layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from megatron_mux.base_ops import BaseOpName
from megatron_mux.kernels.loss_head import CHUNK_ELEMENTS
from megatron_mux.kernels.pointwise import gated
from megatron_mux.memory.forms.architecture import Architecture
from megatron_mux.memory.forms.saved import Pass, Saved
from megatron_mux.memory.kernel_scratch import flash
from megatron_mux.memory.sdpa import AttentionCall, backward_scratch

First = BaseOpName | Literal["core_attention"]
"""The first part of a layer that something is trained at."""
FIRSTS: tuple[First, ...] = ("linear_qkv", "core_attention", "linear_proj", "linear_fc1", "linear_fc2")


def layer_input(architecture: Architecture, size: int) -> Saved:
    """A layer's input: what full recomputation keeps of it."""
    return Saved("input", "rows", architecture.hidden, size)


def kept(
    architecture: Architecture,
    run: Pass,
    selective: bool = False,
    inputs: frozenset[BaseOpName] = frozenset(),
    first: First | None = None,
) -> list[Saved]:
    """What a layer with a gradient keeps, besides what adapters keep of their own.

    Args:
        architecture: The backbone.
        run: How it is computed.
        selective: Whether attention is computed again.
        inputs: BaseOps whose input is needed to train an adapter.
        first: Where gradients begin in this layer, at the first adapter: what is below keeps nothing. None: below it.
    """
    a, w = architecture, run.size
    begins = 0 if first is None else 1 + FIRSTS.index(first)
    saved: list[Saved] = []
    if begins == 0:
        saved += _norm(a, run, "the first norm")
    if begins <= 2:
        saved += _attention(a, run, selective, with_norms=begins <= 1)
    if begins <= 3:
        saved += _norm(a, run, "the second norm")
        saved += _norm(a, run, "the norm behind attention") if a.output_norms else []
    if begins <= 4:
        saved += _activation(a, run)
    saved += _norm(a, run, "the norm behind the MLP") if a.output_norms else []
    if "linear_qkv" in inputs:
        saved.append(Saved("output of the first norm", "all", a.hidden, w))
    if "linear_proj" in inputs and (selective or begins > 2):
        saved.append(Saved("output of attention", "columns", a.queries, w))
    if "linear_fc1" in inputs:
        saved.append(Saved("output of the second norm", "all", a.hidden, w))
    # ReLU goes backward by its output: an adapter behind it has that already.
    if "linear_fc2" in inputs and (a.gated or a.activation != "relu" or begins > 4):
        saved.append(Saved("output of the activation", "columns", a.ffn, w))
    return saved


def behind_attention(architecture: Architecture, run: Pass) -> list[Saved]:
    """Of `kept`, what lies above attention: the last layer has labelled rows only there."""
    return kept(architecture, run, first="linear_proj")


def _norm(a: Architecture, run: Pass, what: str) -> Iterator[Saved]:
    yield Saved(f"input of {what}", "rows", a.hidden, run.size)
    yield Saved(f"statistics of {what}", "rows", _statistics(a, run), 4)


def _statistics(a: Architecture, run: Pass) -> int:
    """Numbers that a norm keeps of a row: a CPU's RMS norm makes them again."""
    if not a.rms_norm:
        return 2
    return int(run.device == "cuda")


def copied_keys(architecture: Architecture, run: Pass) -> list[Saved]:
    """Keys that are put behind a prefix or earlier chunks, besides what `kept` has of keys and values anyway."""
    a = architecture
    changed = a.rotary or a.qk_norm
    return [Saved("copied keys", "columns", a.keys, run.size)] if _one_kernel(run) and not changed else []


def _attention(a: Architecture, run: Pass, selective: bool, with_norms: bool) -> Iterator[Saved]:
    """Queries, keys and values as core attention takes them, and what it keeps itself.

    The product of linear_qkv holds all three. It is kept whole where one of them is a view of it that something needs:
    queries and keys that nothing has rotated or normalised, or the inputs of their norms; values, unless one kernel
    takes all sequences, for which they are copied. Queries of heads that share keys are copied out of it at once.
    """
    grouped = a.heads != a.kv_heads
    changed = a.rotary or a.qk_norm
    values_copied = _one_kernel(run) and not selective
    if changed or grouped:
        yield Saved("queries", "columns", a.queries, run.size)
    if changed:
        yield Saved("keys", "columns", a.keys, run.size)
    if values_copied:
        yield Saved("values", "columns", a.keys, run.size)
    normed = a.qk_norm and with_norms  # else nothing trained lies below them
    if normed or not (changed and values_copied):
        yield Saved("product of linear_qkv", "columns", a.queries + 2 * a.keys, run.size)
    if normed:
        if grouped:
            yield Saved("queries before their norm", "columns", a.queries, run.size)
        statistics = _statistics(a, run) * (a.heads + a.kv_heads)
        yield Saved("statistics of the norms of queries and keys", "columns", statistics, 4)
    if not selective:
        yield Saved("output of attention", "columns", a.queries, run.size)
        yield Saved("log-sum-exp", "columns", a.heads, 4)


def _one_kernel(run: Pass) -> bool:
    """Whether one kernel computes attention of all packed sequences."""
    return run.device == "cuda" and run.size == 2


def _activation(a: Architecture, run: Pass) -> Iterator[Saved]:
    """Inside the MLP: most gated ones are one function of both halves, else autograd keeps what the first makes."""
    yield Saved("input of the activation, or its output", "columns", a.inner, run.size)
    if a.gated and not _is_fused(a):
        yield Saved("activated half", "columns", a.ffn, run.size)
    if a.activation == "quick_gelu":
        yield Saved("sigmoid", "columns", a.ffn, run.size)


def _is_fused(a: Architecture) -> bool:
    """Whether one function computes both halves of a gated MLP."""
    return a.gated and gated(a.activation) is not None


def logits(architecture: Architecture, run: Pass, tensor: int) -> tuple[int, int]:
    """Of the loss under a frozen output layer: bytes of a row of logits and what is made of it; rows of a chunk."""
    vocabulary = -(-architecture.vocabulary // tensor)
    # Logits, in fp32 (fp64 for fp64), and rounded again for the product.
    size = run.size if run.size >= 4 else 4 + 2 * run.size
    return vocabulary * size, max(1, CHUNK_ELEMENTS[run.device] // vocabulary)


def mlp_backward(architecture: Architecture, run: Pass) -> list[Saved]:
    """What lives for a moment while the activation goes backward: its output's gradient, its input's, and in between.

    The function for both halves of a gated MLP makes the activated one again.
    """
    a = architecture
    again = a.ffn if _is_fused(a) else 0
    return [
        Saved("gradient of hidden states", "rows", a.hidden, run.size),
        Saved("inside the MLP", "columns", a.inner + a.ffn + again, run.size),
    ]


def linear_fc2_backward(architecture: Architecture, run: Pass) -> list[Saved]:
    """What lives for a moment before that, while the input of linear_fc2 is still there if an adapter needs it."""
    return [
        Saved("gradient of hidden states", "rows", architecture.hidden, run.size),
        Saved("gradient of the activation's output", "columns", architecture.ffn, run.size),
    ]


def attention_backward(architecture: Architecture, run: Pass) -> list[Saved]:
    """What lives for a moment while attention goes backward. What the MLP kept is gone by then.

    An upper bound: gradients come and go one after the other.
    """
    a = architecture
    found = [
        Saved("gradients of hidden states", "rows", 2 * a.hidden, run.size),
        Saved("gradients of attention", "columns", 3 * a.queries + 2 * a.keys, run.size),
    ]
    if run.device == "cuda":
        found.append(Saved("attention's scratch", "columns", _scratch(a, run), 1))
    return [*found, *mlp_gone(a, run)]


def mlp_gone(architecture: Architecture, run: Pass) -> list[Saved]:
    """What the MLP kept, as less than nothing: when attention's turn comes it is gone."""
    return [
        one._replace(what=f"gone: {one.what}", width=-one.width) for one in _activation(architecture, run)
    ]


def _scratch(a: Architecture, run: Pass) -> float:
    """Bytes of a row that attention's backward kernel takes for itself."""
    length = run.length
    if _one_kernel(run):
        sizes = flash(length + 128, length, a.heads, a.kv_heads, a.head_dim, run.size)
    else:
        asked = AttentionCall("float32", a.heads, a.kv_heads, length, length, a.head_dim, a.head_dim)
        sizes = backward_scratch(run.gpu, asked, 1)
    return sum(one.size for one in sizes) / length
