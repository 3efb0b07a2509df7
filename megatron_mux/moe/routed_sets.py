"""Sets of experts that tokens select together, from which the number of workers that a token visits follows.

A token whose experts share a worker is sent there once. So what moves depends on which experts are selected together,
not only on how often each is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import sparse

from megatron_mux.moe.access_profile import AccessProfile
from megatron_mux.moe.entries import Floats, Ints

SAMPLE = 2048
"""Sets that are drawn for a layer whose profile does not count them."""

_RAKING = 200
"""Rounds in which the weights of drawn sets are fitted to the access probabilities."""


@dataclass(frozen=True)
class RoutedSets:
    """The sets that tokens of a layer select, with their probabilities. J: sets, K: experts of a token.

    Attributes:
        members: [J][K] experts.
        weights: [J] probabilities, which sum to 1.
    """

    members: Ints
    weights: Floats

    def weighted(self, experts: int) -> sparse.csr_matrix:
        """[E][J] the weight of a set where it has the expert."""
        count, top_k = self.members.shape
        values, columns = np.repeat(self.weights, top_k), np.repeat(np.arange(count), top_k)
        return sparse.csr_matrix((values, (self.members.ravel(), columns)), shape=(experts, count))

    def marginals(self, experts: int) -> Floats:
        """[E] probability that a token selects the expert."""
        shares = np.repeat(self.weights, self.members.shape[1])
        return np.asarray(np.bincount(self.members.ravel(), shares, minlength=experts), dtype=np.float64)

    def visits(self, owners: Ints, workers: int) -> Floats:
        """[N] probability that a token is sent to each worker; the sum is the expected number of distinct workers.

        Args:
            owners: [E] worker of each expert.
        """
        reached = np.zeros((len(self.weights), workers), dtype=bool)
        np.put_along_axis(reached, owners[self.members], True, axis=1)
        return np.asarray(self.weights @ reached)


def sets_of(profile: AccessProfile, seed: int = 0) -> tuple[RoutedSets, ...]:
    """Return the sets of each layer.

    They are those that the profile counted. Without them, pairs of a top-2 model are exact from its co-activation
    counts. Otherwise sets are drawn: experts one after the other, in proportion to the odds of their access times how
    much more often than by chance they were selected with those drawn before (by the co-activation counts, if there are
    any), and then weighted so that each expert has its access probability.
    """
    return tuple(_sets_of_layer(profile, layer, seed) for layer in range(profile.model.layers))


def _sets_of_layer(profile: AccessProfile, layer: int, seed: int) -> RoutedSets:
    counted = None if profile.routed_sets is None else profile.routed_sets[layer]
    if counted is not None:
        counts = np.array([s.count for s in counted], dtype=np.float64)
        return RoutedSets(np.array([s.experts for s in counted], dtype=np.int64), counts / counts.sum())
    access = profile.access[layer]
    if profile.top_k == 1:
        return RoutedSets(np.arange(len(access))[:, None], access / access.sum())
    pairs = None if profile.coactivation is None else profile.coactivation[layer]
    if pairs is not None and profile.top_k == 2:
        first, second = np.nonzero(np.triu(pairs, 1))
        if len(first):
            counts = pairs[first, second]
            return RoutedSets(np.stack([first, second], axis=1), counts / counts.sum())
    return _drawn(access, pairs, profile.top_k, np.random.default_rng([seed, layer]))


def _drawn(access: Floats, pairs: Floats | None, top_k: int, rng: np.random.Generator) -> RoutedSets:
    """Draw sets one expert after the other, and weight them by the access probabilities."""
    experts = len(access)
    odds = np.maximum(access, 1e-12) / np.maximum(
        1.0 - access, 1e-9
    )  # an expert that every token selects comes first
    logits = np.tile(np.log(odds), (SAMPLE, 1))
    lift = None if pairs is None else np.log(_lift(pairs))
    members = np.empty((SAMPLE, top_k), dtype=np.int64)
    rows = np.arange(SAMPLE)
    for i in range(
        top_k
    ):  # the largest of logits with Gumbel noise is a draw in proportion to their exponentials
        members[:, i] = (logits + rng.gumbel(size=(SAMPLE, experts))).argmax(axis=1)
        if lift is not None:
            logits = logits + lift[members[:, i]]
        logits[rows[:, None], members[:, : i + 1]] = -np.inf
    return RoutedSets(members, _rake(members, access))


def _lift(pairs: Floats) -> Floats:
    """[E][E] how much more often than by chance two experts are selected together, smoothed by one token."""
    singles = pairs.sum(axis=1) - np.diag(pairs)
    expected = np.outer(singles, singles) / max(singles.sum(), 1.0)
    return np.asarray((pairs + 1.0) / (expected + 1.0))


def _rake(members: Ints, access: Floats) -> Floats:
    """[J] weights of sets with which experts have their access probabilities, as far as the sets allow."""
    experts, top_k = len(access), members.shape[1]
    weights = np.full(len(members), 1.0 / len(members))
    for _ in range(_RAKING):
        counts = np.bincount(members.ravel(), np.repeat(weights, top_k), minlength=experts)
        factor = (np.maximum(access, 1e-300) / np.maximum(counts, 1e-300)) ** (1.0 / top_k)
        weights = weights * factor[members].prod(axis=1)
        weights /= weights.sum()
        if np.abs(counts - access).max() < 1e-4:
            break
    return weights
