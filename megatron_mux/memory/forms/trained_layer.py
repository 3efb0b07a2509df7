"""What a layer of `transformers` keeps and takes when all its parameters are trained, tensor by tensor.

Its RMS norms and many activation functions are put together from several operations, each of which keeps tensors.
Forms are per token (a row of the micro-batch), for one layer.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_mux.memory.forms.architecture import Architecture
from megatron_mux.memory.forms.saved import Pass, Saved, total
from megatron_mux.memory.sdpa import Asked, Kernel, backward_scratch, kernel

_SAVED_BY_ACTIVATION = {"relu": 0, "gelu_new": 4, "gelu_fast": 4, "quick_gelu": 2}
"""Tensors as wide as the MLP that `transformers` keeps for an activation function, its output left out: ReLU needs
nothing else; those put together from several operations keep what is in between. Others keep their input."""
_WITH_POWERS = ("gelu_new", "gelu_fast")
"""Activation functions with a power, which autocast takes in fp32: its input, the tanh, and one more than that."""


def kept(architecture: Architecture, run: Pass, selective: bool = False) -> list[Saved]:
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
    """The call of attention that a model of `transformers` makes. GPUs without bf16 compute half precision in fp16."""
    half = "bfloat16" if run.gpu.capability >= (8, 0) else "float16"
    dtype = half if run.size == 2 else "float32"
    return Asked(dtype, a.heads, a.kv_heads, run.length, run.length, a.head_dim, a.head_dim)


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


def workspace(architecture: Architecture, run: Pass) -> list[Saved]:
    """What lives for a moment while a layer goes backward: gradients of what it kept, of its widest half.

    An upper bound: gradients come and go one after the other. What the MLP kept is gone when attention's turn comes.
    """
    a = architecture
    hidden = Saved("gradients of hidden states", "rows", 2 * a.hidden, run.hidden)
    widths = a.inner + a.ffn
    if _SAVED_BY_ACTIVATION.get(a.activation, 1) > 1:
        widths += a.ffn  # gradients of what is in between
    mlp = [Saved("gradients inside the MLP", "columns", widths * a.experts_per_token, run.size)]
    attention = [Saved("gradients of attention", "columns", 3 * a.queries + 2 * a.keys, run.size)]
    if _keeps_scores(a, run):
        attention.append(Saved("gradients of scores", "columns", 2 * a.heads * run.length, 4))
    if run.device == "cuda" and run.attention != "eager":
        scratch = sum(one.size for one in backward_scratch(run.gpu, _asked(a, run), 1)) / run.length
        attention.append(Saved("attention's scratch", "columns", scratch, 1))
    attention += [one._replace(what=f"gone: {one.what}", width=-one.width) for one in _mlp(a, run)]
    return [hidden, *max(mlp, attention, key=total)]
