"""Solves a rehearsal's recordings for the terms of a stage's table.

What a storage takes is a product: some dimensions are the model's, at most one is of the micro-batch. So a few sizes
tell for each allocation which of the features it goes by; sums over allocations are the lines of what is held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import combinations

import numpy as np

from megatron_mux.estimate.windows import Events, Window, Windows
from megatron_mux.footprint.content import ATTENTION, COUNTS, Array, Contents
from megatron_mux.footprint.table import LOSS, OF_TASKS, PassTable, PersistentBytes, StageTable
from megatron_mux.kernels.attention.short import LONGEST, pairs_and_padding
from megatron_mux.memory.stream.events import Category

_FEWEST = 3
"""Micro-batches from which two features can be told from any other two."""
_EXACT = 0.5
"""Bytes to which a value is met."""
_ROUNDED = 3e-4
"""Share of a value that a row more or less makes, where tensor ranks or experts share rows out."""
_DRAWN = 400
"""Contents at which moments are compared, to drop those that are never the largest."""


class NotLinear(ValueError):
    """Passes at a few sizes do not tell how bytes follow from what a micro-batch contains; the message says which."""


@dataclass(frozen=True)
class _Lines:
    """Lines of a group's pass on one depth.

    Attributes:
        moments: `[M, F]` of what is held after each allocation.
        reach: `[M]` 1 where further layers hold what they keep.
        end: `[F]` of what is held at the end.
        deeper: `[F]` of what the second layer keeps.
        names: `[M]` see `PassTable`.
    """

    moments: Array
    reach: Array
    end: Array
    deeper: Array
    names: Sequence[str]


def stage_table(shallow: Windows, deep: Windows, layers: tuple[int, int], chunk: int) -> StageTable:
    """The table of the stage that both rehearsals ran with a different number of layers.

    Args:
        shallow, deep: Passes on the same kind of rank; the same where all layers were run. Of the shallow one only
            what lasts counts, so it needs no more than one size.
        layers: Of the stage in each.
        chunk: Rows whose logits are computed at once.

    Raises:
        NotLinear: What was run does not tell the lines.
    """
    same = layers[0] == layers[1]
    persistent = _persistent(deep)
    further = PersistentBytes(0.0, *(np.zeros_like(persistent.tasks) for _ in OF_TASKS))
    if not same:
        fewer, more = _persistent(shallow), layers[1] - layers[0]
        known = len(fewer.tasks)  # a shallow rehearsal has no signatures that only meet others
        for part, whole, less in (
            (getattr(bytes_, name) for bytes_ in (further, persistent, fewer)) for name in OF_TASKS
        ):
            part[:known] = (whole[:known] - less) / more
        further = replace(further, backbone=(persistent.backbone - fewer.backbone) / more)
    passes, copied = {}, (0.0, 0.0)
    cut = deep.rehearsal.cut
    for bucket, group in list(enumerate(deep.rehearsal.groups))[cut:]:
        forward = _lines(deep, "F", bucket, chunk)
        deeper = np.zeros_like(forward.end) if same else forward.deeper
        if cut and bucket == cut:  # the same signature as that of the bucket with chunks
            copied = _copied(deep, forward.end, deeper, chunk)
        at = COUNTS.index("copied")
        forward.end[at] = forward.moments[:, at] = copied[0]
        deeper[at] = 0.0 if same else copied[1]
        backward = _lines(deep, "B", bucket, chunk)
        passes[group] = _pass_table(forward, backward, deeper, chunk)
    return StageTable(layers[1], persistent, further, passes)


def _copied(windows: Windows, kept: Array, deeper: Array, chunk: int) -> tuple[float, float]:
    """Bytes kept of a row of keys and values that is copied, on all layers and on the second one: what chunks keep
    beyond what whole micro-batches would.
    """
    passes = windows.of("F", 0)
    contents = windows.contents(passes)
    computed = np.flatnonzero(contents.rows[:, 0])  # where pipelines keep step, some passes are empty
    features = contents.of(computed).features(chunk)
    copied = features[:, COUNTS.index("copied")]
    each = [passes[i] for i in computed]
    of_all = np.array([windows.delta(w)[-1] for w in each]) - features @ kept
    of_second = np.array([windows.kept_by_second(w) for w in each]) - features @ deeper
    whole, second = (
        max(0.0, float(beyond @ copied) / max(1.0, float(copied @ copied))) for beyond in (of_all, of_second)
    )
    return whole, second


def _lines(windows: Windows, kind: str, bucket: int, chunk: int) -> _Lines:
    """Lines of the passes of this kind of a bucket, at no size below what was run.

    Most meet sizes that were run to some dozens of bytes; but kernels take scratch in steps of rows, and the rows of an
    expert are whole numbers.
    """
    passes = windows.of(kind, bucket)
    contents = windows.contents(passes)
    # Pipelines share a batch out: a short one may leave this pipeline without rows of some task.
    present = np.flatnonzero((contents.rows > 0).all(axis=1))
    passes, features = [passes[i] for i in present], contents.of(present).features(chunk)
    on_cpu = windows.rehearsal.run.device == "cpu"
    if on_cpu:  # little goes by sequences, and all but one of these micro-batches have as many
        features[:, COUNTS.index("sequences")] = 0.0
    if len(passes) < _FEWEST:
        raise NotLinear(
            f"{kind} of group {windows.rehearsal.groups[bucket]}: {len(passes)} micro-batches are too few"
        )
    least, events, grown, held = _aligned(windows, passes)
    # Numbers of rows decide which kernels run, so some allocations are not made at all sizes: they count for the moment
    # before. On a CPU attention goes sequence by sequence.
    rest = _fitted if on_cpu else _terms
    terms = _terms(grown, features)
    lines, end = _summed(windows, least, events, terms)
    ends = np.array([[windows.delta(window)[-1]] for window in passes])
    end = end + rest(ends - features @ end[:, None], features)[0]
    second = _of_second(windows, least, events, lines - terms)
    seconds = np.array([[windows.kept_by_second(window)] for window in passes])
    second = second + rest(seconds - features @ second[:, None], features)[0]
    scratch = held - features @ lines.T
    lines += rest(scratch, features)
    beyond = held - features @ lines.T
    # What takes most at some size is not to be missed.
    if on_cpu:
        by_row = (beyond / _rows(features)[:, None]).max(axis=0)
        lines[:, len(COUNTS) : len(COUNTS) + contents.rows.shape[1]] += by_row[:, None]
    else:
        lines[:, 0] += beyond.max(axis=0)
    chosen = np.flatnonzero((grown.max(axis=0) > 0) | (scratch.max(axis=0) > _EXACT))
    if not len(chosen):
        chosen = np.arange(1)
    places = events[chosen]
    reach, names = _reach(windows, least, places, kind), _names(windows, least, places, kind)
    return _Lines(lines[chosen], reach, end, second, names)


def _aligned(windows: Windows, passes: Sequence[Window]) -> tuple[Window, Events, Array, Array]:
    """The window with the fewest events, those of its events that all have, `[N, M]` bytes by which each lets grow what
    is held, and the same of the most that is held until the next of them.
    """
    every = [windows.events(window) for window in passes]
    if windows.rehearsal.short:
        # A CPU's attention repeats its products as often as lengths need: which is which cannot be told.
        counts = [Counter(keys) for _, keys in every]
        known = {key for key in counts[0] if all(c[key] == counts[0][key] for c in counts)}
        every = [_only(known, *pair) for pair in every]
    fewest = min(range(len(passes)), key=lambda number: len(every[number][0]))
    least, (first, keys) = passes[fewest], every[fewest]
    places = []
    for _, others in every:
        blocks = SequenceMatcher(None, keys, others, autojunk=False).get_matching_blocks()
        places.append({a + i: b + i for a, b, size in blocks for i in range(size)})
    common = sorted(set.intersection(*(set(pairs) for pairs in places)))
    if not common:
        raise NotLinear(f"{least.action} allocates nothing that it does at all sizes")
    grown, held = (np.zeros((len(passes), len(common))) for _ in range(2))
    for number, window in enumerate(passes):
        bytes_ = windows.delta(window)
        starts = every[number][0][[places[number][at] for at in common]]
        grown[number] = np.diff(bytes_, prepend=0.0)[starts]
        held[number] = np.maximum.reduceat(bytes_, starts)
    return least, first[common] + least.start, grown, held


def _only(known: Collection[int], events: Events, keys: Sequence[int]) -> tuple[Events, list[int]]:
    """Events of these keys."""
    kept = [number for number, key in enumerate(keys) if key in known]
    return events[kept], [keys[number] for number in kept]


def _summed(windows: Windows, window: Window, events: Events, terms: Array) -> tuple[Array, Array]:
    """`[M, F]` lines of what is held after each event of a window, and `[F]` at its end.

    Args:
        terms: `[M, F]` by which each lets grow what is held.
    """
    places = {event: place for place, event in enumerate((events - window.start).tolist())}
    steps = terms.copy()
    end = np.zeros(terms.shape[1])
    after = np.searchsorted(events - window.start, np.arange(window.stop - window.start))
    for freed, born in windows.lifetimes(window):
        if born in places:
            if after[freed] < len(steps):  # gone by the next event
                steps[after[freed]] -= terms[places[born]]
            else:
                end -= terms[places[born]]
    lines = np.cumsum(steps, axis=0)
    return lines, lines[-1] + end


def _terms(values: Array, features: Array) -> Array:
    """`[M, F]` terms of `[N, M]` values, each by the fewest features that meet it, from `[N, F]` features.

    Where one or two features meet no value exactly, the two that come closest are taken.
    """
    distinct, which = np.unique(values, axis=1, return_inverse=True)
    terms = np.zeros((distinct.shape[1], features.shape[1]))
    most = np.abs(distinct).max(axis=0, initial=0.0)
    least, met = most.copy(), most <= _EXACT
    for chosen in _candidates(features):
        left = np.flatnonzero(~met)
        columns = features @ chosen.T
        scale = np.abs(columns).max(axis=0)
        solution, _, rank, _ = np.linalg.lstsq(columns / scale, distinct[:, left], rcond=1e-9)
        if rank < len(chosen):
            continue
        off = np.abs(distinct[:, left] - columns / scale @ solution).max(axis=0)
        better = off < least[left] - _EXACT
        at = left[better]
        least[at] = off[better]
        terms[at] = (solution[:, better] / scale[:, None]).T @ chosen
        met[at] = least[at] <= (np.maximum(_EXACT, _ROUNDED * most[at]) if len(chosen) == 1 else _EXACT)
    terms_of: Array = terms[which.reshape(-1)]
    return terms_of


def _fitted(values: Array, features: Array) -> Array:
    """`[M, F]` by least squares of what values are off for each row."""
    used = [i for i in range(features.shape[1]) if i == 0 or np.ptp(features[:, i]) > 0]
    rows = _rows(features)[:, None]
    scaled = features[:, used] / rows
    scale = np.abs(scaled).max(axis=0)
    coefficients = np.zeros((values.shape[1], features.shape[1]))
    coefficients[:, used] = (np.linalg.lstsq(scaled / scale, values / rows, rcond=1e-9)[0] / scale[:, None]).T
    return coefficients


def _rows(features: Array) -> Array:
    """`[N]` rows of micro-batches of these features."""
    first = len(COUNTS)
    rows: Array = features[:, first : (features.shape[1] + first) // 2].sum(axis=1)
    return rows


def _candidates(features: Array) -> Iterator[Array]:
    """`[1 or 2, F]` sums of features that a storage may go by, likely ones first."""
    width = features.shape[1]
    first, labels = len(COUNTS), (width + len(COUNTS)) // 2
    identity = np.eye(width)
    sums = [identity[0], identity[first:labels].sum(axis=0), identity[labels:].sum(axis=0)]
    if labels - first > 1:
        sums += list(identity[first:])
    sums += [identity[COUNTS.index(name)] for name in ("labels of a chunk", "sequences", *ATTENTION)]
    used = [s for s in sums if np.ptp(features @ s) > 0 or s[0]]
    yield from (s[None] for s in used)
    yield from (np.stack(pair) for pair in combinations(used, 2))


def _of_second(windows: Windows, window: Window, events: Events, before: Array) -> Array:
    """`[F]` what the second layer of a window lets grow, from `[M, F]` lines of what is held before each event."""
    second = windows.second_layer(window)
    if second is None:
        return np.zeros(before.shape[1])
    begin, end = np.minimum(np.searchsorted(events - window.start, second), len(events) - 1)
    grown: Array = before[end] - before[begin]
    return grown


def _reach(windows: Windows, window: Window, events: Events, kind: str) -> Array:
    """`[M]` 1 at those events of a window at which further layers, between the first and the second, hold what they
    keep.
    """
    local = windows.local_layers(window)
    if kind == "F":  # from the second layer on
        passed = np.maximum.accumulate(local) >= 1
    else:  # until the first
        below = np.flatnonzero(local == 0)
        passed = np.arange(len(local)) < (below[0] if len(below) else len(local))
    reach: Array = passed[events - window.start].astype(np.float64)
    return reach


def _names(windows: Windows, window: Window, events: Events, kind: str) -> list[str]:
    """In words, what is computed at events of a window: layers, or the loss behind the last of them."""
    local = windows.local_layers(window)
    within = np.flatnonzero(local >= 0)
    places = np.arange(len(local))
    behind = (
        places > within[-1]
        if kind == "F" and len(within)
        else places < (within[0] if len(within) else len(local))
    )
    is_loss = behind & windows.has_loss
    passes = {"F": "a layer's forward pass", "B": "a layer's backward pass"}[kind]
    return [LOSS if is_it else passes for is_it in is_loss[events - window.start].tolist()]


def _pass_table(forward: _Lines, backward: _Lines, deeper: Array, chunk: int) -> PassTable:
    moments = np.concatenate([forward.moments, backward.moments + forward.end])
    reach = np.concatenate([forward.reach, backward.reach])
    drawn = _contents(moments.shape[1], chunk)
    largest = set()
    for further in (0.0, 4.0, 76.0):
        held = drawn @ moments.T + further * (drawn @ deeper)[:, None] * reach
        largest |= set(held.argmax(axis=1).tolist())
    chosen = sorted(largest)
    names = [*forward.names, *backward.names]
    return PassTable(forward.end, deeper, moments[chosen], reach[chosen], tuple(names[i] for i in chosen))


def _contents(width: int, chunk: int) -> Array:
    generator = np.random.default_rng(0)
    rows = np.exp(generator.uniform(np.log(8), np.log(1 << 17), (_DRAWN, (width - len(COUNTS)) // 2)))
    rows *= generator.integers(0, 2, rows.shape) | (rows == rows.max(axis=1, keepdims=True))
    total, zeros = rows.sum(axis=1), np.zeros(_DRAWN)
    labels = rows * generator.uniform(0, 1, rows.shape)
    sequences = np.ceil(total * generator.uniform(0, 0.02, _DRAWN))
    return Contents(rows, labels, sequences, zeros, _attention(total, generator)).features(chunk)


def _attention(total: Array, generator: np.random.Generator) -> Array:
    """`[B, A]` of micro-batches of so many rows in sequences of one length each, one or several calls: on a CPU."""
    sums = []
    lengths = np.exp(generator.uniform(np.log(8), np.log(4 * LONGEST), len(total))).astype(int)
    for rows, length, joined in zip(
        total, lengths.tolist(), generator.integers(0, 2, len(total)), strict=True
    ):
        short = length <= LONGEST
        of_one = pairs_and_padding([length]) if short else (0, 0, 0)
        long = rows * (not short)
        masked = rows * length * joined
        sums.append([*(rows / length * np.array(of_one)), long, rows * joined, long * joined, masked])
    return np.array(sums)


def _persistent(windows: Windows) -> PersistentBytes:
    """What lasts: of the backbone, of a task of each signature; and the most that its update takes besides."""
    groups, cut = windows.rehearsal.groups, windows.rehearsal.cut
    alone = {group[0]: number for number, group in enumerate(groups) if number >= cut and len(group) == 1}
    joins = iter(windows.joins)
    events = [[next(joins) for _ in group] for group in groups]
    joined = [[windows.grown(*pair) for pair in each] for each in events]
    updated = [windows.updated(number) for number in range(len(groups))]
    of_first = alone[groups[0][0]]
    if not cut:  # what is allocated once for all tasks comes with the first one, and is none of its own
        categories = (Category.ADAPTERS, Category.GRADIENTS, Category.OPTIMIZER)
        joined[0] = [sum(windows.persistent(*events[0][0], category) for category in categories)]
        updated[0] = windows.updated(0, Category.OPTIMIZER)
    tasks, updating, gradients, optimizer = (np.zeros(1 + max(map(max, groups))) for _ in OF_TASKS)
    for signature, number in alone.items():
        tasks[signature] = joined[number][0] + updated[number]
        gradients[signature] = windows.persistent(*events[number][0], Category.GRADIENTS)
        # Some of it is made by the first update.
        optimizer[signature] = windows.persistent(*events[number][0], Category.OPTIMIZER) + updated[number]
        updating[signature] = max(
            (windows.delta(w).max(initial=0.0) for k in "NU" for w in windows.of(k, number)), default=0.0
        )
    masks = 0.0
    if windows.rehearsal.run.device == "cpu":
        # Its attention keeps the masks of some lengths for their next use.
        masks = sum(windows.persistent(w.start, w.stop) for w in windows.all if w.action.is_pass)
    # The first bucket has all that is allocated once beside what the task of its signature has.
    joined[0], updated[0] = joined[of_first], updated[of_first]
    everything = windows.persistent(0, len(windows.recording.stream))
    backbone = everything - masks - sum(map(sum, joined)) - sum(updated)
    return PersistentBytes(backbone, tasks, updating, gradients, optimizer)
