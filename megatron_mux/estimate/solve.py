"""Solves a rehearsal's recordings for the terms of a stage's table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

import numpy as np
import numpy.typing as npt

from megatron_mux.estimate.windows import Window, Windows
from megatron_mux.footprint.content import COUNTS, Array, Contents
from megatron_mux.footprint.table import Lasting, PassTable, StageTable

Events = npt.NDArray[np.int64]

TOLERANCE = 0.02
"""Of the largest bytes of a pass: what a moment's line may be off at sizes that were run. Most lines meet them to some
dozens of bytes; but kernels take scratch in steps of rows, and the rows of an expert are whole numbers."""
_DRAWN = 400
"""Contents at which moments are compared, to drop those that are never the largest."""


class NotLinear(ValueError):
    """Bytes of a pass are not linear in what a micro-batch contains; the message says which."""


@dataclass(frozen=True)
class _Solved:
    """Lines of a group's passes on one depth."""

    kept: Array
    forward: Array
    backward: Array
    reaches_forward: Array
    reaches_backward: Array


def stage_table(shallow: Windows, deep: Windows, layers: tuple[int, int], chunk: int) -> StageTable:
    """The table of the stage that both rehearsals ran with a different number of layers.

    Args:
        shallow, deep: Passes on the same kind of rank; the same where all layers were run.
        layers: Of the stage in each.
        chunk: Rows whose logits are computed at once.

    Raises:
        NotLinear: Lines do not meet what was run.
    """
    same = layers[0] == layers[1]
    lasting = _lasting(deep)
    further = Lasting(0.0, np.zeros_like(lasting.tasks), np.zeros_like(lasting.tasks))
    if not same:
        fewer, more = _lasting(shallow), layers[1] - layers[0]
        further = Lasting(
            (lasting.backbone - fewer.backbone) / more,
            (lasting.tasks - fewer.tasks) / more,
            (lasting.updating - fewer.updating) / more,
        )
    passes, copied, copied_by_few = {}, _copied(deep, chunk), _copied(shallow, chunk)
    for bucket, group in list(enumerate(deep.rehearsal.groups))[1:]:
        own = _solved(deep, bucket, chunk, copied)
        deeper = np.zeros_like(own.kept)
        if not same:
            few = _solved(shallow, bucket, chunk, copied_by_few)
            deeper = (own.kept - few.kept) / (layers[1] - layers[0])
        passes[group] = _pass_table(own, deeper, chunk)
    return StageTable(layers[1], lasting, further, passes)


def _solved(windows: Windows, bucket: int, chunk: int, copied: float) -> _Solved:
    forward, reaches_forward, kept = _lines(windows, "F", bucket, chunk)
    backward, reaches_backward, _ = _lines(windows, "B", bucket, chunk)
    at = COUNTS.index("copied")
    kept[at] = forward[:, at] = copied
    return _Solved(kept, forward, backward + kept, reaches_forward, reaches_backward)


def _copied(windows: Windows, chunk: int) -> float:
    """Bytes kept of a row of keys and values that is copied, from the bucket with chunks."""
    own = windows.of("F", 0)
    contents = windows.contents(own)
    computed = np.flatnonzero(contents.rows[:, 0])  # where pipelines keep step, some passes are empty
    kept = np.array([[windows.delta(own[i])[-1]] for i in computed])
    found = _line(contents.of(computed).features(chunk), kept)
    return max(0.0, float(found[0, COUNTS.index("copied")]))


def _line(features: Array, values: Array) -> Array:
    """`[M, F]` by least squares from `[N, F]` features and `[N, M]` values; features that do not vary get nothing.

    Raises:
        NotLinear: The features do not tell themselves apart.
    """
    used = _used(features)
    scale = np.abs(features).max(axis=0)[used]
    if np.linalg.matrix_rank(features[:, used] / scale) < len(used):
        raise NotLinear(f"{len(features)} micro-batches are too few to tell {len(used)} terms apart")
    found = np.zeros((values.shape[1], features.shape[1]))
    found[:, used] = (np.linalg.lstsq(features[:, used] / scale, values, rcond=None)[0] / scale[:, None]).T
    return found


def _lines(windows: Windows, kind: str, bucket: int, chunk: int) -> tuple[Array, Array, Array]:
    """`[M, F]` lines of a pass's moments, `[M]` whether further layers hold what they keep then, `[F]` of its end."""
    own = windows.of(kind, bucket)
    contents = windows.contents(own)
    # Pipelines share a batch out: a short one may leave this pipeline without rows of some task.
    present = np.flatnonzero((contents.rows > 0).all(axis=1))
    own, features = [own[i] for i in present], contents.of(present).features(chunk)
    least, events, held = _aligned(windows, own)
    ends = np.array([windows.delta(w)[-1] for w in own])
    values = np.column_stack([held, ends])
    found = _line(features, values)
    beyond = values - features @ found.T
    off = np.abs(beyond).max(axis=0)
    most = np.abs(values).max()
    if off.max() > TOLERANCE * most + 4096:
        at = int(off.argmax())
        moment = windows.recording.stream.moment(events[min(at, len(events) - 1)])
        group = windows.rehearsal.groups[bucket]
        raise NotLinear(f"{kind} of group {group}: {off[at]:.0f} of {most:.0f} at {moment}")
    found[:-1, 0] += beyond.max(axis=0)[:-1]  # what takes most at some size is not to be missed
    return found[:-1], _reach(windows, least, events, kind), found[-1]


def _aligned(windows: Windows, own: Sequence[Window]) -> tuple[Window, Events, Array]:
    """The window with the fewest events, those of its allocations that all have, and `[N, M]` bytes of all until the
    next of these.

    Kernels are chosen by the number of rows: some take scratch that others do not, which counts for what comes before.
    """
    least = min(own, key=lambda w: w.stop - w.start)
    keys, first = windows.allocations(least)
    places = {}
    for number, window in enumerate(own):
        others, events = windows.allocations(window)
        if others == keys:
            pairs = dict(zip(range(len(keys)), events, strict=True))
        else:
            blocks = SequenceMatcher(None, keys, others, autojunk=False).get_matching_blocks()
            pairs = {a + i: events[b + i] for a, b, size in blocks for i in range(size)}
        places[number] = pairs
    common = sorted(set.intersection(*(set(pairs) for pairs in places.values())))
    if not common:
        raise NotLinear(f"{least.action} allocates nothing that it does at all sizes")
    held = np.zeros((len(own), len(common)))
    for number, window in enumerate(own):
        bytes_ = windows.delta(window)
        starts = [places[number][at] - window.start for at in common]
        for column, (start, stop) in enumerate(zip(starts, [*starts[1:], len(bytes_)], strict=True)):
            held[number, column] = bytes_[start:stop].max()
    return least, np.array([first[at] for at in common]), held


def _used(features: Array) -> list[int]:
    """Features that differ between micro-batches, each for itself."""
    of_chunk, labels = COUNTS.index("labels of a chunk"), (features.shape[1] + len(COUNTS)) // 2
    # Where none fills a chunk, labels of a chunk are all labels.
    same = np.array_equal(features[:, of_chunk], features[:, labels:].sum(axis=1))
    return [
        i
        for i in range(features.shape[1])
        if i == 0 or (np.ptp(features[:, i]) > 0 and not (same and i == of_chunk))
    ]


def _reach(windows: Windows, window: Window, events: Events, kind: str) -> Array:
    """`[M]` 1 at those events of a window at which the middle layers hold what they keep."""
    layers = windows.layers(window)
    first = min((n for n in layers.tolist() if n >= 0), default=0)
    local = np.where(layers < 0, -1, layers - first)
    if kind == "F":  # from the third layer on
        passed = np.maximum.accumulate(local) >= 2
    else:  # until the second
        below = np.flatnonzero((local >= 0) & (local <= 1))
        passed = np.arange(len(local)) < (below[0] if len(below) else len(local))
    found: Array = passed[events - window.start].astype(np.float64)
    return found


def _pass_table(own: _Solved, deeper: Array, chunk: int) -> PassTable:
    moments = np.concatenate([own.forward, own.backward])
    reach = np.concatenate([own.reaches_forward, own.reaches_backward])
    drawn = _contents(moments.shape[1], chunk)
    largest = set()
    for further in (0.0, 4.0, 76.0):
        held = drawn @ moments.T + further * (drawn @ deeper)[:, None] * reach
        largest |= set(held.argmax(axis=1).tolist())
    chosen = sorted(largest)
    return PassTable(own.kept, deeper, moments[chosen], reach[chosen])


def _contents(width: int, chunk: int) -> Array:
    generator = np.random.default_rng(0)
    rows = np.exp(generator.uniform(np.log(8), np.log(1 << 17), (_DRAWN, (width - len(COUNTS)) // 2)))
    rows *= generator.integers(0, 2, rows.shape) | (rows == rows.max(axis=1, keepdims=True))
    total, zeros = rows.sum(axis=1), np.zeros(_DRAWN)
    labels = rows * generator.uniform(0, 1, rows.shape)
    sequences = np.ceil(total * generator.uniform(0, 0.02, _DRAWN))
    return Contents(rows, labels, sequences, zeros, zeros).features(chunk)


def _lasting(windows: Windows) -> Lasting:
    """What lasts: of the backbone, of a task of each signature; and the most that its update takes besides."""
    groups = windows.rehearsal.groups
    alone = {group[0]: number for number, group in enumerate(groups) if number and len(group) == 1}
    joins = iter(windows.joins)
    joined = [[next(joins) for _ in group] for group in groups]
    tasks, updating = (np.zeros(1 + max(alone)) for _ in range(2))
    for signature, number in alone.items():
        ((start, stop),) = joined[number]
        tasks[signature] = windows.grown(start, stop) + windows.updated(number)
        updating[signature] = max(
            (windows.delta(w).max(initial=0.0) for k in "NU" for w in windows.of(k, number)), default=0.0
        )
    every = sum(tasks[signature] for group in groups for signature in group)
    everything = windows.lasting(0, len(windows.recording.stream))
    return Lasting(everything - every, tasks, updating)
