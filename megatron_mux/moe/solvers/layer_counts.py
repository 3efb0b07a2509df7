"""How many experts of each layer go to the fast workers, where there are two kinds of workers or one.

With the paper's objective, a layer's seconds depend on which experts share a worker. Workers of the same bandwidth are
interchangeable, and layers meet only in the number of slots that they take. So a layer is described by its least
seconds for each number k of experts on the fast workers, and the layers' numbers are chosen by dynamic programming. The
seconds are exact for few experts (every set of experts is tried), a lower bound for more. Capacities are added up over
the workers of a kind, so that the sum is a lower bound in any case.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_mux.moe.entries import Floats, Ints

MOST_TRIED = 12
"""Experts of a layer up to which every set of them is tried."""

_HALVINGS = 45
"""Halvings of the interval that a lower bound is searched in."""


@dataclass(frozen=True)
class Kinds:
    """The two kinds of workers; with one kind, all are fast.

    Attributes:
        fast_seconds, slow_seconds: Of a layer whose tokens all select one expert on such a worker.
    """

    fast: int
    slow: int
    fast_seconds: float
    slow_seconds: float


def choose_counts(seconds: Floats, fast_room: int, slow_room: int) -> tuple[Ints, float]:
    """Choose the number of experts on fast workers in each layer with the least sum of seconds.

    Args:
        seconds: [L][E + 1] seconds of a layer by the number of experts on fast workers; infinite if not possible.
        fast_room, slow_room: Experts that the fast and the slow workers can hold over all layers.

    Returns:
        [L] numbers, and the sum of seconds.
    """
    layers, experts = seconds.shape[0], seconds.shape[1] - 1
    width = min(fast_room, layers * experts) + 1
    total = np.full(width, np.inf)
    total[0] = 0.0
    chosen = np.zeros((layers, width), dtype=np.int64)
    for layer in range(layers):
        new = np.full(width, np.inf)
        for count in range(min(experts, width - 1) + 1):
            if np.isfinite(seconds[layer, count]):
                candidate = total[: width - count] + seconds[layer, count]
                better = candidate < new[count:]
                new[count:][better] = candidate[better]
                chosen[layer, count:][better] = count
        total = new
    least = max(0, layers * experts - slow_room)  # what the slow workers have no room for
    at = least + int(total[least:].argmin())
    value = float(total[at])
    counts = np.zeros(layers, dtype=np.int64)
    for layer in reversed(range(layers)):
        counts[layer] = chosen[layer, at]
        at -= int(counts[layer])
    return counts, value


class SetTable:
    """Least seconds of every set of a layer's experts on the workers of each kind. For few experts."""

    def __init__(self, access: Floats, kinds: Kinds) -> None:
        self.kinds = kinds
        experts = access.shape[1]
        self.sizes = np.array([s.bit_count() for s in range(1 << experts)])
        members = (np.arange(1 << experts)[:, None] >> np.arange(experts)) & 1
        self.loads = access @ members.T  # [L][sets]
        # Largest load of a worker if a set is divided among 0, 1, 2, ... workers of a kind.
        nothing = np.where(self.sizes == 0, 0.0, np.inf)[None].repeat(len(access), axis=0)
        self._largest = [nothing, self.loads]
        while len(self._largest) <= max(kinds.fast, kinds.slow):
            self._largest.append(self._with_another(self._largest[-1]))

    def _with_another(self, before: Floats) -> Floats:
        """Let one more worker take a part of each set that has its lowest expert."""
        after = np.empty_like(before)
        after[:, 0] = 0.0
        for whole in range(1, before.shape[1]):
            parts = _parts_with_lowest(whole)
            after[:, whole] = np.maximum(self.loads[:, parts], before[:, whole ^ parts]).min(axis=1)
        return after

    def seconds(self) -> Floats:
        """[L][E + 1] least seconds by the number of experts on fast workers."""
        layers, experts = len(self.loads), int(self.sizes[-1])
        by_set = self._by_set()
        seconds = np.full((layers, experts + 1), np.inf)
        for count in range(experts + 1):
            seconds[:, count] = by_set[:, self.sizes == count].min(axis=1)
        return seconds

    def _by_set(self) -> Floats:
        """[L][sets] least seconds with just this set on the fast workers."""
        fast = self.kinds.fast_seconds * self._largest[self.kinds.fast]
        slow = (
            self.kinds.slow_seconds * self._largest[self.kinds.slow][:, ::-1]
        )  # the complement of s is last - s
        return np.asarray(np.maximum(fast, slow))

    def divide(self, layer: int, count: int) -> tuple[list[list[int]], list[list[int]]]:
        """Return the experts of each fast and of each slow worker that take the least seconds."""
        by_set = np.where(self.sizes == count, self._by_set()[layer], np.inf)
        best = int(by_set.argmin())
        limit = by_set[best] * (1 + 1e-12)
        rest = len(self.sizes) - 1 - best
        return (
            self._parts(layer, best, self.kinds.fast, limit / self.kinds.fast_seconds),
            self._parts(layer, rest, self.kinds.slow, limit / self.kinds.slow_seconds),
        )

    def _parts(self, layer: int, whole: int, workers: int, limit: float) -> list[list[int]]:
        """Divide a set among workers so that none has more load than the limit; parts as even in number as possible."""
        groups = []
        while whole and workers:
            parts = _parts_with_lowest(whole)
            rest = self._largest[workers - 1][layer, whole ^ parts]
            fits = (self.loads[layer, parts] <= limit) & (rest <= limit)
            even = np.abs(self.sizes[parts] - self.sizes[whole] / workers)
            part = int(parts[np.where(fits, even, np.inf).argmin()])
            groups.append([e for e in range(part.bit_length()) if part >> e & 1])
            whole ^= part
            workers -= 1
        return groups + [[] for _ in range(workers)]


def _parts_with_lowest(whole: int) -> Ints:
    """All subsets of a set that contain its lowest member; sets are bits of a number."""
    lowest = whole & -whole
    parts, rest = np.array([lowest]), whole ^ lowest
    while rest:
        bit = rest & -rest
        parts = np.concatenate([parts, parts | bit])
        rest ^= bit
    return parts


def least_seconds(access: Floats, kinds: Kinds) -> Floats:
    """[L][E + 1] lower bounds of a layer's seconds by the number of experts on fast workers.

    A number of seconds is possible only if the experts that are too large for a slow worker fit on fast ones, if no
    more than one expert above half a worker's load is on each worker, and if neither the hottest experts that fast
    workers can take leave too much to the slow ones, nor those that they must take are too much for them.
    """
    layers, experts = access.shape
    hot = -np.sort(-access, axis=1)
    sums = np.concatenate([np.zeros((layers, 1)), np.cumsum(hot, axis=1)], axis=1)
    counts = np.arange(experts + 1)
    if not kinds.slow:
        counts = counts[-1:]
    low = np.zeros((layers, len(counts)))
    high = np.full_like(low, access.sum(axis=1).max() * max(kinds.fast_seconds, kinds.slow_seconds))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        possible = np.stack(
            [_possible(hot[layer], sums[layer], counts, middle[layer], kinds) for layer in range(layers)]
        )
        low, high = np.where(possible, low, middle), np.where(possible, middle, high)
    if not kinds.slow:
        return np.concatenate([np.full((layers, experts), np.inf), low], axis=1)
    return low


def _possible(hot: Floats, sums: Floats, counts: Ints, seconds: Floats, kinds: Kinds) -> np.ndarray:
    """[k] whether a layer may take these seconds with k experts on fast workers.

    Args:
        hot: [E] probabilities, falling.
        sums: [E + 1] their sums.
    """
    experts = len(hot)
    total = sums[-1]
    fast_load, slow_load = seconds / kinds.fast_seconds, seconds / kinds.slow_seconds
    if not kinds.slow:
        slow_load = np.zeros_like(seconds)
    rising = -hot

    def larger(load: Floats) -> Ints:  # number of experts with more than this load
        return np.searchsorted(rising, -load, side="left")

    forced = larger(slow_load)  # too large for a slow worker
    halves = larger(slow_load / 2) - forced if kinds.slow else np.zeros_like(forced)
    further = np.maximum(0, halves - kinds.slow)  # two of these do not fit on one slow worker
    rest = counts - forced - further
    smallest = sums[forced + halves] - sums[forced + halves - further]
    coldest = total - sums[experts - np.clip(rest, 0, experts)]
    all_coldest = (
        total - sums[experts - np.clip(counts - forced, 0, experts)]
    )  # these have `further` of the halves
    least = sums[forced] + np.where(rest >= experts - forced - halves, all_coldest, smallest + coldest)
    most = sums[counts]
    fits = (rest >= 0) & (least <= kinds.fast * fast_load) & (most >= total - kinds.slow * slow_load)
    fits &= total <= kinds.fast * fast_load + kinds.slow * slow_load
    fits &= (forced == 0) | (hot[0] <= fast_load)
    fits &= np.minimum(larger(fast_load / 2), forced) <= kinds.fast
    return np.asarray(fits)
