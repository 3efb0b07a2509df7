"""What a layer keeps of a micro-batch from its forward pass to its backward pass, tensor by tensor, as closed forms.

Two programs are told apart. `engine`: ours, whose backbone is frozen, so that its products keep no input unless an
adapter's low-rank term needs it, and whose norms, rotations and activations keep as little as can be. `trained`: every
parameter trained by the code of `transformers`, whose RMS norms are put together from several operations.

Shapes: T tokens in the micro-batch, H hidden; forms are per token (a row of the micro-batch), for one layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_mux.gpus import Gpu
from megatron_mux.kernels.loss_head import CHUNK_ELEMENTS
from megatron_mux.memory.forms.architecture import Architecture
from megatron_mux.memory.invisible import flash_packed
from megatron_mux.memory.sdpa import Asked, Kernel, backward_scratch, kernel

Attention = Literal["flash", "eager"]
Recompute = Literal["none", "selective", "full"]
Where = Literal["rows", "all", "columns"]
"""What of a tensor a tensor rank has: all columns of its own rows (with sequence parallelism; else of all rows), the
whole of it, or its own columns of all rows."""

_SAVED_BY_ACTIVATION = {"relu": 0, "gelu_new": 4, "gelu_fast": 4, "quick_gelu": 2}
"""Tensors as wide as the MLP that `transformers` keeps for an activation function, its output left out: ReLU needs
nothing else; those put together from several operations keep what is in between. Others keep their input."""
_WITH_POWERS = ("gelu_new", "gelu_fast")
"""Activation functions with a power, which autocast takes in fp32: its input, the tanh, and one more than that."""


class Saved(NamedTuple):
    """A tensor that is kept."""

    what: str
    where: Where
    width: float
    """Values of a row."""
    size: int
    """Bytes of a value."""

    def bytes(self, tensor: int, sequence_parallel: bool) -> float:
        """Bytes of a row on one of so many tensor ranks."""
        divided = self.where == "columns" or (self.where == "rows" and sequence_parallel)
        return self.width * self.size / (tensor if divided else 1)


@dataclass(frozen=True)
class Pass:
    """How a layer is computed.

    Attributes:
        size: Bytes of a value of what products take and give.
        length: Tokens of a sequence.
        attention: `flash`: no kernel keeps scores where that can be; `eager`: scores are kept.
        device: `cuda` or `cpu`, whose kernels keep different things.
        gpu: Which one.
        autocast: Whether weights and hidden states are in fp32, and products alone take half precision.
    """

    size: int
    length: int
    attention: Attention = "flash"
    device: str = "cuda"
    gpu: Gpu = Gpu()  # noqa: RUF009  (frozen)
    autocast: bool = False

    @property
    def hidden(self) -> int:
        """Bytes of a value of hidden states between a layer's parts."""
        return 4 if self.autocast else self.size


def total(saved: Sequence[Saved], tensor: int, sequence_parallel: bool) -> float:
    """Bytes of a row on one of so many tensor ranks."""
    return sum(one.bytes(tensor, sequence_parallel) for one in saved)


def entry(architecture: Architecture, size: int) -> Saved:
    """A layer's input: what full recomputation keeps of it."""
    return Saved("input", "rows", architecture.hidden, size)


def engine(
    architecture: Architecture, run: Pass, inputs: frozenset[str], selective: bool, first: str | None = None
) -> list[Saved]:
    """What a layer with a gradient keeps in our engine, besides what adapters keep of their own.

    Args:
        architecture: The backbone.
        run: How it is computed.
        inputs: BaseOps whose input is needed to train an adapter.
        selective: Whether attention is computed again.
        first: Where gradients begin, if it is in this layer: at the first BaseOp that has an adapter; what is below
            keeps nothing.
    """
    a, w = architecture, run.size
    begins = _BEGINS[first]
    saved: list[Saved] = []
    statistics = 1 if a.rms_norm else 2
    if run.device != "cuda" and a.rms_norm:
        statistics = 0
    for place, what in ((0, "first"), (2, "second")):
        if begins <= place:
            saved.append(Saved(f"input of the {what} norm", "rows", a.hidden, w))
            saved.append(Saved(f"statistics of the {what} norm", "rows", statistics, 4))
    if begins <= 3:
        saved.append(Saved("input of the activation", "columns", a.inner, w))
    keeps_output = False
    if begins <= 1 and selective:
        # Values as they lie, in the product's output; queries and keys beside it where they have been rotated.
        rotated = a.queries + a.keys if a.rotary else 0
        saved.append(Saved("queries, keys, values", "columns", rotated + a.queries + 2 * a.keys, w))
    elif begins <= 1:
        saved += _attention(a, run)
        keeps_output = True
    if "linear_qkv" in inputs:
        saved.append(Saved("output of the first norm", "all", a.hidden, w))
    if "linear_proj" in inputs and not keeps_output:
        saved.append(Saved("output of attention", "columns", a.queries, w))
    if "linear_fc1" in inputs:
        saved.append(Saved("output of the second norm", "all", a.hidden, w))
    if "linear_fc2" in inputs:
        saved.append(Saved("output of the activation", "columns", a.ffn, w))
    return saved


_BEGINS = {None: 0, "linear_qkv": 1, "linear_proj": 2, "linear_fc1": 3, "linear_fc2": 4}
"""Which part of a layer is the first to have a gradient: the first norm, attention, the second norm, the activation."""


def _attention(a: Architecture, run: Pass) -> Iterator[Saved]:
    """Core attention's own: rotated queries and keys, values, output, and each query's log-sum-exp."""
    # The CPU's kernel keeps values as they lie, in the product's output beside queries and keys that nobody needs.
    values = a.keys if run.device == "cuda" or not a.rotary else a.queries + 2 * a.keys
    yield Saved("queries and keys", "columns", a.queries + a.keys, run.size)
    yield Saved("values", "columns", values, run.size)
    yield Saved("output of attention", "columns", a.queries, run.size)
    yield Saved("log-sum-exp", "columns", a.heads, 4)


def engine_mlp(architecture: Architecture, run: Pass) -> list[Saved]:
    """Of `engine`, what a layer keeps for its MLP whatever the adapters, statistics left out."""
    a, w = architecture, run.size
    return [
        Saved("input of the second norm", "rows", a.hidden, w),
        Saved("input of the activation", "columns", a.inner, w),
    ]


def logits(architecture: Architecture, run: Pass, tensor: int) -> tuple[int, int]:
    """Of the loss under a frozen output layer: bytes of a row of logits and what is made of it; rows of a chunk."""
    vocabulary = -(-architecture.vocabulary // tensor)
    # Logits, in fp32 (fp64 for fp64), and rounded again for the product.
    size = run.size if run.size >= 4 else 4 + 2 * run.size
    return vocabulary * size, max(1, CHUNK_ELEMENTS[run.device] // vocabulary)


def trained(architecture: Architecture, run: Pass, selective: bool = False) -> list[Saved]:
    """What a layer keeps when all its parameters are trained.

    Args:
        architecture: The model.
        run: How it is computed.
        selective: Whether core attention is computed again.
    """
    return [*_norms(architecture, run), *_core(architecture, run, selective), *_mlp(architecture, run)]


def _norms(a: Architecture, run: Pass) -> Iterator[Saved]:
    """Of both norms, with their outputs, which products keep."""
    # With autocast each product has a copy of its own.
    yield Saved("outputs of norms", "rows", (a.readers if run.autocast else 2) * a.hidden, run.size)
    if not a.rms_norm:
        yield Saved("inputs of norms", "rows", 2 * a.hidden, run.hidden)
        yield Saved("statistics of norms", "rows", 4, 4)
        return
    yield Saved("inputs of norms in fp32", "rows", 2 * a.hidden, 4)
    yield Saved("normalised inputs", "rows", 2 * a.hidden, run.hidden)
    yield Saved("statistics of norms", "rows", 2, 4)


def _keeps_scores(a: Architecture, run: Pass) -> bool:
    """Whether full training keeps them: as asked, or since no kernel does without (heads that share keys, in fp32)."""
    return run.attention == "eager" or kernel(run.gpu, _asked(a, run)) is Kernel.MATH


def _asked(a: Architecture, run: Pass) -> Asked:
    """What a model of `transformers` asks of attention. GPUs without bf16 compute half precision in fp16."""
    half = "bfloat16" if run.gpu.capability >= (8, 0) else "float16"
    dtype = half if run.size == 2 else "float32"
    return Asked(dtype, a.heads, a.kv_heads, run.length, run.length, a.head_dim, a.head_dim)


def _scratch(a: Architecture, run: Pass, frozen: bool) -> list[Saved]:
    """What attention's backward kernel takes for itself: with a frozen backbone, that of our engine."""
    if run.device != "cuda" or (run.attention == "eager" and not frozen):
        return []
    if frozen and run.size == 2:  # all sequences in one call
        sizes = flash_packed(1, a.heads, a.kv_heads, run.length, run.length, a.head_dim, run.size)
    else:
        sizes = backward_scratch(run.gpu, _asked(a, run), 1)
    return [Saved("attention's scratch", "columns", sum(one.size for one in sizes) / run.length, 1)]


def _core(a: Architecture, run: Pass, selective: bool) -> Iterator[Saved]:
    """Of attention. Kernels that share keys among heads and keep no scores want half precision."""
    scores = _keeps_scores(a, run)
    expanded = scores and a.kv_heads < a.heads and not selective
    keys = a.queries if expanded else a.keys
    yield Saved("queries, keys, values", "columns", a.queries + 2 * keys, run.size)
    yield Saved("output of attention", "columns", a.queries, run.size)
    if a.dropout:
        yield Saved("dropout masks", "rows", 2 * a.hidden, 1)
    if selective:
        return
    if not scores:
        yield Saved("log-sum-exp", "columns", a.heads, 4)
        return
    yield Saved("probabilities", "columns", a.heads * run.length, 4)
    if run.size < 4:
        yield Saved("rounded probabilities", "columns", a.heads * run.length, run.size)


def _mlp(a: Architecture, run: Pass) -> Iterator[Saved]:
    """Of the MLP: once for each expert that computes the token."""
    inner = a.ffn * a.experts_per_token
    if a.gated:  # both halves, the activated one, their product
        widths = 4 * inner
    else:
        widths = (1 + _SAVED_BY_ACTIVATION.get(a.activation, 1)) * inner
    if run.autocast and a.activation in _WITH_POWERS and not a.gated:
        widths -= 3 * inner
        yield Saved("inside the activation, in fp32", "columns", 3 * inner, 4)
    yield Saved("inside the MLP", "columns", widths, run.size)
    if a.experts > 1:
        yield Saved("routed rows", "rows", 2 * a.hidden * a.experts_per_token, run.size)


def workspace(architecture: Architecture, run: Pass, frozen: bool) -> list[Saved]:
    """What lives for a moment while a layer goes backward: gradients of what it kept, of its widest half.

    An upper bound: gradients come and go one after the other. What the MLP kept is gone when attention's turn comes.
    """
    a, w = architecture, run.size
    hidden = Saved("gradients of hidden states", "rows", 2 * a.hidden, run.hidden)
    widths = a.inner + a.ffn
    if not frozen and _SAVED_BY_ACTIVATION.get(a.activation, 1) > 1:
        widths += a.ffn  # gradients of what is in between
    mlp = [Saved("gradients inside the MLP", "columns", widths * a.experts_per_token, w)]
    attention = [Saved("gradients of attention", "columns", 3 * a.queries + 2 * a.keys, w)]
    if _keeps_scores(a, run) and not frozen:
        attention.append(Saved("gradients of scores", "columns", 2 * a.heads * run.length, 4))
    attention += _scratch(a, run, frozen)
    inside = engine_mlp(a, run)[1:] if frozen else _mlp(a, run)
    attention += [one._replace(what=f"gone: {one.what}", width=-one.width) for one in inside]
    return [hidden, *max(mlp, attention, key=lambda saved: total(saved, 1, False))]
