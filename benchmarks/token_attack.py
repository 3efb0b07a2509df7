"""What an honest-but-curious server reads from what clients send: their tokens, and their labels.

The server knows the public backbone with all its weights, and the scale of the noise, but neither the client's data nor
its adapter.

Tokens: the hidden states at a cut depend on the tokens up to theirs, so they are recovered one after the other. A
linear map from hidden states to embeddings, fitted on public text, gives a shortlist; the front layers, run on the
tokens recovered so far and each candidate, give the hidden states that it would have, and the nearest to what was sent
wins. Under noise, the backbone's own prediction of the next token counts as well, as a prior.

Labels: of a backbone whose last layer is on the server, the client computes final norm and output layer. The gradient
that it returns for a row is the norm's Jacobian times the output layer's times (p - y), of which only the label y is
unknown: the candidate whose gradient is nearest, but for a factor, wins.

The model is a causal language model of `transformers`, whose decoder has `embed_tokens`, `layers` and `norm`. Shapes:
T tokens of a record, H hidden, V vocabulary, K candidates.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

_SINGLE_TOKENS = 2048
"""Tokens that the map of first rows is fitted on: attention makes their hidden states unlike all others."""
_RANDOM_TEXTS, _RANDOM_LENGTH = 96, 64
"""Texts of random tokens that the map of later rows is fitted on, besides public ones: they cover the vocabulary."""
_RIDGE = 1e-5
"""Least penalty of the fit, relative to the mean square of a feature."""


class Front:
    """The layers before the cut, as the server can run them itself.

    Args:
        model: The public backbone.
        cut: Layers before the cut.
    """

    def __init__(self, model: nn.Module, cut: int) -> None:
        decoder: Any = model.get_decoder()  # type: ignore[operator]
        self._layers = copy.copy(decoder)  # shares the weights
        self._layers._modules = {**decoder._modules, "layers": decoder.layers[:cut], "norm": nn.Identity()}

    @torch.no_grad()
    def hidden(self, tokens: Tensor) -> Tensor:
        """`[B, T]` tokens to `[B, T, H]` hidden states at the cut."""
        states: Tensor = self._layers(input_ids=tokens, use_cache=False).last_hidden_state
        return states

    @torch.no_grad()
    def candidates(self, before: Tensor, candidates: Tensor) -> Tensor:
        """The hidden states that each of `[K]` candidates would have behind the tokens `[T]`: `[K, H]`.

        One pass: all candidates have the same position, and none sees another.
        """
        seen, count = len(before), len(before) + len(candidates)
        visible = torch.ones(count, count, dtype=torch.bool).tril()
        visible[seen:, seen:] = torch.eye(len(candidates), dtype=torch.bool)
        mask = torch.zeros(count, count).masked_fill(~visible, torch.finfo(torch.float32).min)
        states: Tensor = self._layers(
            input_ids=torch.cat([before, candidates])[None],
            attention_mask=mask[None, None],
            position_ids=torch.arange(count).clamp(max=seen)[None],
            use_cache=False,
        ).last_hidden_state
        return states[0, seen:]


class TokenAttack:
    """Recovers records' tokens from their hidden states at a cut.

    Args:
        model: The public backbone, in fp32.
        cut: Layers before the cut.
        public: `[T]` tokens of public texts.
        shortlist: Candidates of each position; under noise as many more.
    """

    def __init__(self, model: nn.Module, cut: int, public: Sequence[Tensor], shortlist: int = 64) -> None:
        self._model: Any = model
        self._front = Front(model, cut)
        embeddings: Tensor = model.get_input_embeddings().weight.detach()  # type: ignore[operator]
        self._directions = nn.functional.normalize(embeddings, dim=1)
        vocabulary = len(embeddings)
        self._shortlist = min(shortlist, vocabulary)
        single = torch.arange(0, vocabulary, -(-vocabulary // _SINGLE_TOKENS))
        self._first = _LinearMap(self._front.hidden(single[:, None])[:, 0], embeddings[single])
        generator = torch.Generator().manual_seed(0)
        texts = [*public, *torch.randint(vocabulary, (_RANDOM_TEXTS, _RANDOM_LENGTH), generator=generator)]
        later = torch.cat([self._front.hidden(text[None])[0, 1:] for text in texts])
        self._later = _LinearMap(later, embeddings[torch.cat([text[1:] for text in texts])])

    def recover(self, observed: Tensor, noise: float = 0.0) -> Tensor:
        """The tokens that explain a record's hidden states best.

        Args:
            observed: `[T, H]`, clipped and noisy.
            noise: Standard deviation of the noise on each coordinate.

        Returns:
            `[T]` tokens.
        """
        found = torch.empty(0, dtype=torch.long)
        scale, prior = _Scale(), _NextToken(self._model)
        first, later = self._first.weight(noise), self._later.weight(noise)
        for row in observed:
            mean, weight = (self._later.mean, later) if len(found) else (self._first.mean, first)
            ranks = self._directions @ ((row - scale.factor * mean) @ weight)
            tokens = ranks.topk(self._shortlist).indices
            likely = torch.zeros_like(ranks)
            if noise and len(found):
                likely = prior.log_probabilities(found)
                tokens = torch.cat([tokens, likely.topk(self._shortlist).indices]).unique()
            states = self._front.candidates(found, tokens)
            residuals = scale.residuals(row, states)
            best = int((residuals - 2 * noise**2 * likely[tokens]).argmin())
            scale.add(row, states[best])
            found = torch.cat([found, tokens[best : best + 1]])
        return found


class _LinearMap:
    """Ridge regression from hidden states `[n, H]` to embeddings `[n, H]`, both less their means."""

    def __init__(self, hidden: Tensor, embeddings: Tensor) -> None:
        self.mean = hidden.mean(dim=0)
        centred = (hidden - self.mean).double()
        self._gram = centred.T @ centred / len(centred)
        self._product = centred.T @ (embeddings - embeddings.mean(dim=0)).double() / len(centred)

    def weight(self, noise: float) -> Tensor:
        """The map `[H, H]` for hidden states with noise of this standard deviation."""
        penalty = noise**2 + _RIDGE * float(self._gram.diagonal().mean())
        identity = torch.eye(len(self._gram), dtype=torch.float64)
        weight: Tensor = torch.linalg.solve(self._gram + penalty * identity, self._product)
        return weight.float()


class _Scale:
    """The factor, at most 1, by which clipping scaled a record, estimated along with its tokens."""

    def __init__(self) -> None:
        self._product = self._square = 0.0

    @property
    def factor(self) -> float:
        """The estimate from all rows so far."""
        return min(1.0, max(0.0, self._product / self._square)) if self._square else 1.0

    def residuals(self, row: Tensor, states: Tensor) -> Tensor:
        """Squared distances `[K]` of a record up to this row, but for a constant, for each candidate's `[K, H]`."""
        row, states = row.double(), states.double()
        product, square = self._product + states @ row, self._square + states.square().sum(dim=1)
        factor = (product / square).clamp(0, 1)
        return factor.square() * square - 2 * factor * product

    def add(self, row: Tensor, state: Tensor) -> None:
        """Count a row whose token is recovered."""
        self._product += float(state.double() @ row.double())
        self._square += float(state.double().square().sum())


class _NextToken:
    """The backbone's own prediction, computed token after token."""

    def __init__(self, model: Any) -> None:
        self._model, self._cache = model, None

    @torch.no_grad()
    def log_probabilities(self, found: Tensor) -> Tensor:
        """`[V]` of the token behind `found`, which has one more token than at the last call."""
        output = self._model(input_ids=found[None, -1:], past_key_values=self._cache, use_cache=True)
        self._cache = output.past_key_values
        return torch.log_softmax(output.logits[0, -1], dim=0)


def recover_labels(
    model: nn.Module,
    hidden: Tensor,
    gradients: Tensor,
    noise: float = 0.0,
    candidates: Tensor | None = None,
    shortlist: int = 64,
) -> Tensor:
    """The labels that explain gradients best.

    Args:
        model: The public backbone.
        hidden: `[T, H]` outputs of the last layer, which the server computed, at rows with a label.
        gradients: `[T, H]` what the client returned for them.
        noise: Standard deviation of the noise on each coordinate of the gradients.
        candidates: `[K]` tokens that a label can be; None: all.
        shortlist: Candidates whose gradients are computed, of each row.

    Returns:
        `[T]` labels: the token behind each row.
    """
    decoder: Any = model.get_decoder()  # type: ignore[operator]
    weight: Tensor = model.get_output_embeddings().weight.detach()  # type: ignore[operator]
    if candidates is None:
        candidates = torch.arange(len(weight))
    labels = []
    for row, gradient in zip(hidden, gradients, strict=True):
        logits = decoder.norm(row) @ weight.T
        log_probabilities = torch.log_softmax(logits.detach(), dim=0)
        mean = log_probabilities.exp() @ weight
        # <gradient, J (mean - w)>, J the norm's Jacobian, by <J^T gradient, mean - w>
        _, pushed = torch.autograd.functional.jvp(decoder.norm, row, gradient)
        nearest = (weight[candidates] @ pushed).topk(min(shortlist, len(candidates)), largest=False).indices
        tokens = candidates[nearest]
        rows = row.expand(len(tokens), -1).clone().requires_grad_()
        (expected,) = torch.autograd.grad(decoder.norm(rows), rows, mean - weight[tokens])
        product = (expected @ gradient).clamp(min=0)
        explained = product.square() / expected.square().sum(dim=1)
        score = explained / (2 * noise**2) + log_probabilities[tokens] if noise else explained
        labels.append(tokens[score.argmax()])
    return torch.stack(labels)
