"""The loss of labelled rows under a frozen output layer, whose vocabulary may be divided among tensor ranks.

Gradients with respect to the hidden states are computed in the forward, chunk by chunk, so no chunk's logits are kept
or computed twice: 4 V H multiplications a token against 6 V H for recomputation. Every quantity belongs to one row: a
row that is not finite leaves the others as they are.
Shapes: N labelled rows, H hidden, V vocabulary (this rank's part of it where said).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.kernels.loss.cross_entropy import Vocabulary, gradient_, is_fused, statistics
from megatron_mux.kernels.loss.own_output import back_propagate, write_logits
from megatron_mux.kernels.own_rows import OwnRows

CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 27}
"""Logits to hold at once, by kind of device: 64 and 512 MiB in fp32. With fewer, products get too thin."""

_TILE_ROWS = 128
"""Rows of a chunk come in multiples of a product's tile, where a chunk has more."""

_CPU_COLUMNS = 3072
"""Vocabulary rows per product on a CPU, where BLAS is slower on all of a vocabulary at once."""


@dataclass(frozen=True)
class OutputLayer:
    """This rank's part of the output layer.

    Attributes:
        weight: `[V part, H]`, frozen.
        start: Vocabulary index of its first row.
        vocab: Size of the whole vocabulary; rows beyond it are padding and no token.
        group: Tensor ranks among which the vocabulary is divided; None for one rank.
        reduce_gradient: Sum gradients over `group` here; False where what comes before sums them anyway
            (sequence parallelism: reduce-scatter).
        own: Labelled rows of tasks that train rows of the output layer, in order; others use the frozen ones.
        trained: The rows that the task of all labelled rows trains, in a layer that `chunks` yields.
    """

    weight: Tensor
    start: int
    vocab: int
    group: dist.ProcessGroup | None
    reduce_gradient: bool = True
    own: tuple[tuple[slice, OwnRows], ...] = ()
    trained: OwnRows | None = None

    @property
    def valid(self) -> int:
        """How many of this rank's rows are tokens."""
        return max(0, min(self.weight.shape[0], self.vocab - self.start))

    def chunks(self, hidden: Tensor) -> Iterator[tuple[slice, OutputLayer, Tensor]]:
        """Rows, their layer and their `logits`, some at a time; each chunk's logits overwrite those of the last."""
        # As many rows on each tensor rank, whatever it has of a task's own layer: ranks sum over them.
        size = chunk_rows(self.weight.device.type, self.weight.shape[0])
        place = hidden.new_empty(min(size, hidden.shape[0]) * self.weight.shape[0])
        for run, layer in self._runs(hidden.shape[0]):
            for start in range(run.start, run.stop, size):
                part = slice(start, min(start + size, run.stop))
                shape = part.stop - part.start, layer.weight.shape[0]
                yield part, layer, layer.logits(hidden[part], place[: shape[0] * shape[1]].view(shape))

    def _runs(self, rows: int) -> Iterator[tuple[slice, OutputLayer]]:
        """Runs of rows with the layer that they use."""
        end = 0
        for run, rows_of in (*self.own, (slice(rows, rows), None)):
            if end < run.start:
                yield slice(end, run.start), self
            if rows_of is not None and rows_of.values.shape[0]:
                weight = self.weight if rows_of.tokens is not None else rows_of.values
                yield run, replace(self, weight=weight, own=(), trained=rows_of)
            elif rows_of is not None:  # this rank has padding only
                yield run, self
            end = run.stop

    def logits(self, hidden: Tensor, place: Tensor) -> Tensor:
        """`[n, V part]` in the dtype of `hidden`, padding columns unspecified: they are written to `place`."""
        step = _CPU_COLUMNS if hidden.device.type == "cpu" else self.weight.shape[0]
        for start in range(0, self.weight.shape[0], step):
            part = slice(start, start + step)
            torch.mm(hidden, self.weight[part].t(), out=place[:, part])
        if self.trained is not None:
            write_logits(self.trained, self.start, hidden, place)
        return place

    def scores(self, logits: Tensor) -> Tensor:
        """Logits in fp32 (fp64 for fp64), in place if they are, with padding columns at minus infinity."""
        scores = logits.float() if logits.dtype.itemsize < 4 else logits
        if self.valid < scores.shape[1]:
            scores[:, self.valid :] = float("-inf")
        return scores

    def columns(self, labels: Tensor) -> Tensor:
        """This rank's column of each label; -1: another rank has it."""
        columns = labels - self.start
        return columns.masked_fill_((columns < 0) | (columns >= self.valid), -1)


def chunk_rows(device: str, vocabulary: int) -> int:
    """Rows whose logits are held at once, by kind of device, for a tensor rank's part of a vocabulary."""
    size = max(1, CHUNK_ELEMENTS[device] // vocabulary)
    return size - size % _TILE_ROWS if device == "cuda" and size > _TILE_ROWS else size


@dataclass
class _Statistics:
    """Of one chunk: exponentials `[n, V part]`, their sum and the negative log-likelihood, both `[n]`."""

    exponentials: Tensor
    total: Tensor
    nll: Tensor
    rows: Tensor
    columns: Tensor
    mine: Tensor


def _statistics(
    scores: Tensor, labels: Tensor, layer: OutputLayer, smoothing: Tensor | None = None
) -> _Statistics:
    """Softmax statistics over the whole vocabulary; `scores` is overwritten. With `smoothing`, `nll` is smoothed."""
    top = scores.amax(dim=1)
    if layer.group is not None:
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=layer.group)
    scores.sub_(top.unsqueeze(1))
    columns = labels - layer.start
    mine = (columns >= 0) & (columns < layer.valid)
    columns = columns.clamp(0, scores.shape[1] - 1)
    rows = torch.arange(scores.shape[0], device=scores.device)
    target = scores[rows, columns].masked_fill_(~mine, 0.0)
    if smoothing is not None:
        # Selected, so that rows without smoothing are what they were; padding columns are no tokens.
        mean = scores[:, : layer.valid].sum(dim=1) / layer.vocab
        smoothed = target * (1 - smoothing) + mean * smoothing
        target = torch.where(smoothing > 0, smoothed, target)
    scores.exp_()
    total = scores.sum(dim=1)
    if layer.group is not None:
        both = torch.stack((total, target))
        dist.all_reduce(both, group=layer.group)
        total, target = both[0], both[1]
    return _Statistics(scores, total, total.log() - target, rows, columns, mine)


class _WeightedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        labels: Tensor,
        weights: Tensor,
        layer: OutputLayer,
        smoothing: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        wanted = ctx.needs_input_grad[0]
        gradient = torch.empty_like(hidden) if wanted else None
        nlls = []
        compute = _fused if is_fused(type(hidden), hidden.device, hidden.dtype) else _by_operators
        for part, used, logits in layer.chunks(hidden.detach()):
            soft = None if smoothing is None else smoothing[part].to(_statistics_dtype(hidden))
            rows = hidden.detach()[part] if wanted else None
            nll, grad = compute(logits, labels[part], weights[part], used, rows, soft)
            nlls.append(nll)
            if gradient is not None and grad is not None:
                gradient[part] = grad
        nll = torch.cat(nlls) if nlls else hidden.new_zeros(0, dtype=_statistics_dtype(hidden))
        if gradient is not None:
            if layer.group is not None and layer.reduce_gradient:
                dist.all_reduce(gradient, group=layer.group)
            ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(nll)
        return (nll * weights.to(nll.dtype)).sum(), nll

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return scaled_rows(gradient, grad.view(1, 1)), None, None, None, None


def scaled_rows(rows: Tensor, factors: Tensor) -> Tensor:
    """Multiply `[N, H]` by factors that are not rounded to its dtype: that would scale a task's gradient."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    return torch.mul(rows, factors.to(wide), out=torch.empty_like(rows))


def _statistics_dtype(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


def _by_operators(
    logits: Tensor,
    labels: Tensor,
    weights: Tensor,
    layer: OutputLayer,
    hidden: Tensor | None,
    smoothing: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Losses of a chunk and, given its hidden states, their gradient, by torch's operators."""
    stats = _statistics(layer.scores(logits), labels, layer, smoothing)
    return stats.nll, None if hidden is None else _hidden_gradient(stats, weights, layer, hidden, smoothing)


def _fused(
    logits: Tensor,
    labels: Tensor,
    weights: Tensor,
    layer: OutputLayer,
    hidden: Tensor | None,
    smoothing: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """The same by two Triton kernels around the products."""
    vocabulary, columns = Vocabulary(layer.valid, layer.vocab, layer.group), layer.columns(labels)
    stats = statistics(logits, columns, vocabulary, smoothing)
    if hidden is None:
        return stats.nll, None
    scores = gradient_(logits, columns, stats, vocabulary, smoothing)
    return stats.nll, _propagate(scores, layer, hidden, weights.to(stats.nll.dtype))


def _hidden_gradient(
    stats: _Statistics, weights: Tensor, layer: OutputLayer, hidden: Tensor, smoothing: Tensor | None
) -> Tensor:
    """`[n, H]`: weight x (softmax - labels, smoothed or not) x output layer, this rank's columns only.

    The gradient of rows that a task trains is added here, too: the engine back-propagates the loss as it is, so
    nothing multiplies it later, and no tensor as large as an output layer waits for the backward pass.
    """
    scores, total, dtype = stats.exponentials, stats.total, hidden.dtype
    label = total if smoothing is None else total * (1 - smoothing)
    scores[stats.rows, stats.columns] -= label.masked_fill(~stats.mine, 0.0)
    if smoothing is not None:
        scores[:, : layer.valid] -= (total * smoothing / layer.vocab).unsqueeze(1)
    factor = weights.to(total.dtype)
    if dtype == scores.dtype:
        # Dividing the small product instead of the wide scores saves a pass over them.
        factor = factor / total
    else:
        scores = scores.div_(total.unsqueeze(1)).to(dtype)
    return _propagate(scores, layer, hidden, factor)


def _propagate(scores: Tensor, layer: OutputLayer, hidden: Tensor, factor: Tensor) -> Tensor:
    """The hidden states' gradient from that of the logits, which `factor` `[n]` multiplies; `scores` is overwritten."""
    factor = factor.unsqueeze(1)  # fp32 at least: rounded weights would change a task's gradient
    if layer.trained is not None:
        return back_propagate(layer.trained, layer.start, layer.weight, scores, hidden, factor)
    return torch.mm(scores, layer.weight).mul_(factor)


def weighted_loss(
    hidden: Tensor,
    labels: Tensor,
    weights: Tensor,
    layer: OutputLayer,
    smoothing: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Weighted sum of the labels' negative log-likelihoods.

    Args:
        hidden: `[N, H]` of the labelled rows, the same on every tensor rank.
        labels: `[N]` int64.
        weights: `[N]`, of each label in the sum.
        smoothing: `[N]` share of each label that is spread evenly over the vocabulary, as `transformers`' LabelSmoother
            does; None: zero for all.

    Returns:
        The sum as a scalar, differentiable with respect to `hidden` (the gradient of `layer.own` is added at once), and
        the `[N]` negative log-likelihoods, smoothed where asked, detached; fp32, or fp64 for fp64 hidden states.
    """
    scalar, nll = _WeightedLoss.apply(hidden, labels, weights, layer, smoothing)  # type: ignore[no-untyped-call]
    return scalar, nll


@torch.no_grad()
def predict(hidden: Tensor, labels: Tensor, layer: OutputLayer) -> tuple[Tensor, Tensor]:
    """The labels' negative log-likelihoods and the likeliest tokens, without gradients.

    Args:
        hidden: `[N, H]` of the labelled rows, the same on every tensor rank.
        labels: `[N]` int64.

    Returns:
        `[N]` negative log-likelihoods and `[N]` int64 tokens (the lowest index among equals).
    """
    nlls, tokens = [], []
    for part, used, logits in layer.chunks(hidden):
        scores = used.scores(logits)
        best, token = scores.max(dim=1)
        token = token + layer.start
        if layer.group is not None:
            best, token = _best_of_ranks(best, token, layer.group)
        tokens.append(token)
        nlls.append(_statistics(scores, labels[part], used).nll)
    if not nlls:
        return hidden.new_zeros(0, dtype=_statistics_dtype(hidden)), labels.new_zeros(0)
    return torch.cat(nlls), torch.cat(tokens)


@torch.no_grad()
def whole_scores(hidden: Tensor, layer: OutputLayer) -> Tensor:
    """The logits of every token, without gradients.

    Args:
        hidden: `[N, H]` of the labelled rows, the same on every tensor rank; few, since all logits are held at once.

    Returns:
        `[N, V]` fp32 or fp64, minus infinity where there is no token.
    """
    # A task's own layer has no padding: where ranks divide it, the last one has fewer columns of it.
    shape = hidden.shape[0], layer.weight.shape[0]
    own = hidden.new_full(shape, float("-inf"), dtype=_statistics_dtype(hidden))
    for part, used, logits in layer.chunks(hidden):
        scores = used.scores(logits)
        own[part, : scores.shape[1]] = scores
    if layer.group is None:
        return own
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(layer.group))]
    dist.all_gather(gathered, own, group=layer.group)
    return torch.cat(gathered, dim=1)


def _best_of_ranks(best: Tensor, token: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    size = dist.get_world_size(group)
    bests = [torch.empty_like(best) for _ in range(size)]
    tokens = [torch.empty_like(token) for _ in range(size)]
    dist.all_gather(bests, best, group=group)
    dist.all_gather(tokens, token, group=group)
    winner = torch.stack(bests).argmax(dim=0, keepdim=True)
    return torch.stack(bests).amax(dim=0), torch.stack(tokens).gather(0, winner).squeeze(0)
