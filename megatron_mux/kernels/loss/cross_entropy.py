"""Softmax statistics of logits and the gradient of their cross entropy, with Triton kernels where they can run.

torch's operators take some eight passes over logits in fp32; the kernels take two over logits in their own dtype.

Shapes: n rows, V vocabulary (this rank's part of it).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megatron_mux.kernels.triton_choice import has_triton, suits_triton


class Vocabulary(NamedTuple):
    """A rank's part of a vocabulary that may be divided among tensor ranks.

    Attributes:
        valid: How many of this rank's columns are tokens; those beyond are padding.
        size: Tokens of the whole vocabulary.
        group: The ranks; None for one.
    """

    valid: int
    size: int
    group: dist.ProcessGroup | None


class Statistics(NamedTuple):
    """Of rows of logits over the whole vocabulary, `[n]` each, fp32 (fp64 for fp64).

    Attributes:
        top: The largest logit.
        total: Sum of the exponentials of logits less `top`.
        nll: Negative log-likelihood of the label, smoothed where asked.
    """

    top: Tensor
    total: Tensor
    nll: Tensor


@cache
def is_fused(kind: type[Tensor], device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton kernels compute logits of a class, a device and a dtype; on a fake GPU, whether they would."""
    return suits_triton(device, dtype) and (issubclass(kind, FakeTensor) or has_triton())


def statistics(
    logits: Tensor, columns: Tensor, vocabulary: Vocabulary, smoothing: Tensor | None = None
) -> Statistics:
    """Softmax statistics by Triton kernels; a collective where the vocabulary is divided.

    Args:
        logits: `[n, V]`, left as they are.
        columns: `[n]` int64 column of each row's label; -1: another rank has it.
        vocabulary: This rank's part.
        smoothing: `[n]` share of each label that is spread evenly over the vocabulary; None: zero for all.
    """
    rows = torch.empty(
        3 + (smoothing is not None), logits.shape[0], dtype=torch.float32, device=logits.device
    )
    top, total, target, *sums = rows
    if len(logits) and not isinstance(logits, FakeTensor):
        from megatron_mux.kernels.loss import triton as triton_cross_entropy

        smoothed = sums[0] if sums else None
        triton_cross_entropy.statistics(logits, columns, (top, total, target), smoothed, vocabulary.valid)
    if vocabulary.group is not None:
        label_scores = top.clone()
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=vocabulary.group)
        # A rank with padding alone has no logit: its sum is zero, not zero times infinity.
        total.copy_(torch.where(total == 0, total, total * (label_scores - top).exp()))
        dist.all_reduce(rows[1:], group=vocabulary.group)
    if smoothing is not None:
        # Selected, so that rows without smoothing are what they were.
        smoothed = target * (1 - smoothing) + sums[0] / vocabulary.size * smoothing
        target = torch.where(smoothing > 0, smoothed, target)
    return Statistics(top, total, total.log() - (target - top))


def gradient_(
    logits: Tensor,
    columns: Tensor,
    stats: Statistics,
    vocabulary: Vocabulary,
    smoothing: Tensor | None = None,
) -> Tensor:
    """Overwrite logits with the gradient of each row's negative log-likelihood, zero for padding, and return them.

    Arguments are those of `statistics`, and what it returned.
    """
    if len(logits) and not isinstance(logits, FakeTensor):
        from megatron_mux.kernels.loss import triton as triton_cross_entropy

        triton_cross_entropy.gradient_(
            logits, columns, stats.top, stats.total, smoothing, vocabulary.valid, vocabulary.size
        )
    return logits
