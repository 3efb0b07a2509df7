"""Losses of preferences from sequences' summed log-probabilities, as TRL 1.16 computes them.

Every function is element-wise over records: a record that is not finite leaves the others as they are.
Shapes: R records of a task's step, S sequences (2 R for pairs: chosen and rejected in turns, else R).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_mux.kernels.loss.head import scaled_rows

FIGURES = 8
"""Sums that `PreferenceLoss.figures` gives."""


class SequenceSums(NamedTuple):
    """What is known of the sequences of a step.

    Attributes:
        completion: `[S]` summed log-probability of each completion.
        prompt: `[S]` of what is learned of each prompt (ORPO).
        reference: `[S]` summed log-probability of each completion under the reference.
        tokens: `[S]` tokens of each completion.
        weights: `[S]` weight of each record's loss (KTO); `1 / learned tokens of the step` for ORPO.
        signs: `[S]` 1 for a desirable sequence, -1 for an undesirable one.
        kl: Scalar, KTO's KL term.
    """

    completion: Tensor
    prompt: Tensor
    reference: Tensor
    tokens: Tensor
    weights: Tensor
    signs: Tensor
    kl: Tensor


class Ratios(NamedTuple):
    """`[R]` log-ratios of policy and reference, and tokens, of both sequences of a pair."""

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor


@dataclass(frozen=True)
class PreferenceLoss:
    """What a task minimises; the fields are those of `tasks.preference`."""

    loss: str
    variant: str
    beta: float
    label_smoothing: float = 0.0
    discopop_tau: float = 0.05

    def per_record(self, sums: SequenceSums) -> Tensor:
        """`[R]` losses, whose mean is the loss of the step."""
        if self.loss == "orpo":
            return self._orpo(sums)
        ratio = sums.completion - sums.reference
        if self.loss == "kto":
            kl = sums.kl if self.variant == "kto" else torch.zeros_like(sums.kl)
            losses: Tensor = sums.weights * (1 - torch.sigmoid(self.beta * sums.signs * (ratio - kl)))
            return losses
        tokens = sums.tokens.clamp(min=1)
        return _PAIRS[self.variant](self, Ratios(ratio[0::2], ratio[1::2], tokens[0::2], tokens[1::2]))

    def _orpo(self, sums: SequenceSums) -> Tensor:
        records = sums.completion.shape[0] // 2
        nll = -(sums.completion + sums.prompt)[0::2] * sums.weights[0::2] * records
        return nll - self.beta * F.logsigmoid(self._log_odds(sums))

    @staticmethod
    def _log_odds(sums: SequenceSums) -> Tensor:
        mean = sums.completion / sums.tokens
        chosen, rejected = mean[0::2], mean[1::2]
        return (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))

    def figures(self, sums: SequenceSums) -> Tensor:
        """`[FIGURES]` sums: rewards of chosen (desirable) and of rejected sequences, pairs in the right order,
        log-probabilities of chosen and of rejected sequences; KTO's KL term, or ORPO's negative log-likelihood; for
        ORPO log odds ratios and log odds.
        """
        logps = sums.completion
        more = [torch.zeros_like(sums.kl)] * 2
        if self.loss == "orpo":
            logps = logps / sums.tokens  # of a token, as its trainer reports it
            rewards, extra = self.beta * logps, (-(sums.completion + sums.prompt) * sums.weights)[0::2].sum()
            odds = self._log_odds(sums)
            more = [F.logsigmoid(odds).sum(), odds.sum()]
        else:
            rewards, extra = self.beta * (logps - sums.reference), sums.kl
        good = sums.signs > 0
        right = torch.zeros_like(extra)
        if self.loss != "kto":
            right = (rewards[0::2] > rewards[1::2]).sum().to(extra.dtype)

        def both(values: Tensor) -> list[Tensor]:
            return [torch.where(good, values, 0.0).sum(), torch.where(good, 0.0, values).sum()]

        return torch.stack([*both(rewards), right, *both(logps), extra, *more])


def _log1mexp(x: Tensor) -> Tensor:
    """`log(1 - exp(x))` for x below 0, exact at both ends; its gradient is finite wherever it is."""
    near = x > -0.6931471805599453
    close = torch.log(-torch.expm1(torch.where(near, x, -1.0)))
    far = torch.log1p(-torch.exp(torch.where(near, -1.0, x)))
    return torch.where(near, close, far)


Pair = Callable[[PreferenceLoss, Ratios], Tensor]
_PAIRS: dict[str, Pair] = {}


def _pair(name: str) -> Callable[[Pair], Pair]:
    def register(function: Pair) -> Pair:
        _PAIRS[name] = function
        return function

    return register


def _margin(loss: PreferenceLoss, of: Ratios) -> Tensor:
    return loss.beta * (of.chosen - of.rejected)


def _per_token(of: Ratios) -> Tensor:
    return of.chosen / of.chosen_tokens - of.rejected / of.rejected_tokens


@_pair("sigmoid")
def _sigmoid(loss: PreferenceLoss, of: Ratios) -> Tensor:
    return -F.logsigmoid(_margin(loss, of))


@_pair("hinge")
def _hinge(loss: PreferenceLoss, of: Ratios) -> Tensor:
    return torch.relu(1 - _margin(loss, of))


@_pair("ipo")
def _ipo(loss: PreferenceLoss, of: Ratios) -> Tensor:
    return (_per_token(of) - 1 / (2 * loss.beta)) ** 2


@_pair("sigmoid_norm")
def _sigmoid_norm(loss: PreferenceLoss, of: Ratios) -> Tensor:
    return -F.logsigmoid(loss.beta * _per_token(of))


@_pair("exo_pair")
def _exo_pair(loss: PreferenceLoss, of: Ratios) -> Tensor:
    margin, wrong = _margin(loss, of), loss.label_smoothing
    better = torch.sigmoid(margin) * (F.logsigmoid(margin) - math.log1p(-wrong))
    return better + torch.sigmoid(-margin) * (F.logsigmoid(-margin) - math.log(wrong))


@_pair("nca_pair")
def _nca_pair(loss: PreferenceLoss, of: Ratios) -> Tensor:
    good, bad = loss.beta * of.chosen, loss.beta * of.rejected
    return -F.logsigmoid(good) - 0.5 * F.logsigmoid(-good) - 0.5 * F.logsigmoid(-bad)


@_pair("robust")
def _robust(loss: PreferenceLoss, of: Ratios) -> Tensor:
    margin, wrong = _margin(loss, of), loss.label_smoothing
    return (wrong * F.logsigmoid(-margin) - (1 - wrong) * F.logsigmoid(margin)) / (1 - 2 * wrong)


@_pair("bco_pair")
def _bco_pair(loss: PreferenceLoss, of: Ratios) -> Tensor:
    return -F.logsigmoid(loss.beta * of.chosen) - F.logsigmoid(-loss.beta * of.rejected)


@_pair("sppo_hard")
def _sppo_hard(loss: PreferenceLoss, of: Ratios) -> Tensor:
    half = 0.5 / loss.beta
    return (of.chosen - half) ** 2 + (of.rejected + half) ** 2


@_pair("apo_zero")
def _apo_zero(loss: PreferenceLoss, of: Ratios) -> Tensor:
    return 1 - torch.sigmoid(loss.beta * of.chosen) + torch.sigmoid(loss.beta * of.rejected)


@_pair("apo_down")
def _apo_down(loss: PreferenceLoss, of: Ratios) -> Tensor:
    return torch.sigmoid(loss.beta * of.chosen) + 1 - torch.sigmoid(_margin(loss, of))


@_pair("discopop")
def _discopop(loss: PreferenceLoss, of: Ratios) -> Tensor:
    margin = _margin(loss, of)
    share = torch.sigmoid(margin / loss.discopop_tau)
    return -F.logsigmoid(margin) * (1 - share) + torch.exp(-margin) * share


@dataclass
class RowScale:
    """Factors of the gradients of labelled rows, known once the rows' sequences have been computed whole.

    Attributes:
        factors: `[N]`; set before the backward pass.
    """

    factors: Tensor | None = None


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, scale: RowScale) -> Tensor:
        ctx.scale = scale
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        factors = ctx.scale.factors
        assert factors is not None, "the factors of a chunk's rows are set before its backward pass"
        return scaled_rows(gradient, factors.unsqueeze(1)), None


def scale_gradient(rows: Tensor, scale: RowScale) -> Tensor:
    """The same rows `[N, H]`; in the backward pass the gradient of each is multiplied by its factor."""
    scaled: Tensor = _ScaledGradient.apply(rows, scale)  # type: ignore[no-untyped-call]
    return scaled
