"""Streams of allocations as functions of batch, length and rank, exact, from a few traced ones.

Events do not depend on them, as long as the same kernels are chosen; sizes are polynomials: of degree 1 in the batch
and in an adapter's rank, of degree 2 in the length. They are interpolated in whole numbers, and compared with one more
trace. Where kernels take their scratch in whole blocks of tokens, lengths have to be equal modulo the block.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import lcm, prod

from megatron_mux.memory.stream.events import Stream, StreamError
from megatron_mux.memory.trace.case import Case
from megatron_mux.memory.untraced import MANY_TOKENS

DEGREES: Mapping[str, int] = {"batch": 1, "length": 2, "rank": 1}
"""What a case can be varied in, and the degree of sizes in it."""
BLOCK = 128
"""Tokens of the blocks in which flash attention takes its scratch."""
LARGE = 256
"""How far apart the traced numbers of sequences are, and lengths."""

Steps = Callable[[Sequence[Case]], Sequence[Stream]]
"""The streams of some cases, of any depth."""


class UnlikeError(StreamError):
    """Streams that are no functions of batch, length and rank: where they differ."""


@dataclass(frozen=True)
class Family:
    """A case for any batch, length or rank: those that were asked for.

    Attributes:
        case: One of them.
        points: For each quantity the values that were traced.
        streams: For each combination of values, the quantities in the order of `points`, its stream.
    """

    case: Case
    points: Mapping[str, tuple[int, ...]]
    streams: Mapping[tuple[int, ...], Stream]

    def at(self, **values: int) -> Stream:
        """The stream for these values; those of `case` are taken for quantities that are not named.

        Raises:
            UnlikeError: Some size comes out as no whole number, or as none that can be.
        """
        wanted = [values.get(name, _value(self.case, name)) for name in self.points]
        first = next(iter(self.streams.values()))
        weights = [
            _weights(points, value) for points, value in zip(self.points.values(), wanted, strict=True)
        ]
        shares = [prod(each, start=Fraction(1)) for each in itertools.product(*weights)]
        below = lcm(*(share.denominator for share in shares))
        factors = [int(share * below) for share in shares]
        columns = zip(*(stream.sizes for stream in self.streams.values()), strict=True)
        sizes, known = array("q"), dict[tuple[int, ...], int]()
        for sampled in columns:
            size = known.get(sampled)
            if size is None:
                total = sum(map(int.__mul__, factors, sampled))
                if total % below or total < 0:
                    raise UnlikeError(f"block {len(sizes)} would have {total} / {below} bytes at {wanted}")
                size = known[sampled] = total // below
            sizes.append(size)
        return replace(first, sizes=sizes)


def family(case: Case, names: Sequence[str], trace: Steps, least: int = 2) -> Family:
    """A case, varied.

    Args:
        case: Its batch is at least `least` for what is read from the family to be exact; its rank is of its adapter.
        names: What to vary it in: keys of `DEGREES`.
        trace: Traces cases.
        least: The smaller number of sequences that is traced. One sequence is a case of its own: a dimension of one
            element is contiguous with its neighbours, which saves copies.

    Raises:
        UnlikeError: The traced streams are not alike, or the one they are compared with is another one.
        WorkerError, StreamError: A trace failed.
    """
    points = {name: _points(case, name, least) for name in DEGREES if name in names}
    grid = list(itertools.product(*points.values()))
    middle = tuple(_between(name, values) for name, values in points.items())
    *streams, check = trace([_varied(case, points, values) for values in [*grid, middle]])
    for stream in (*streams, check):
        if not _alike(stream, streams[0]):
            raise UnlikeError("events depend on batch, length or rank")
    found = Family(case, points, dict(zip(grid, streams, strict=True)))
    told = found.at(**dict(zip(points, middle, strict=True)))
    if told.sizes != check.sizes:
        block = next(
            i for i, (one, other) in enumerate(zip(told.sizes, check.sizes, strict=True)) if one != other
        )
        raise UnlikeError(
            f"block {block} has {check.sizes[block]} bytes at {middle}, not {told.sizes[block]}"
        )
    return found


def _points(case: Case, name: str, least: int) -> tuple[int, ...]:
    if name == "batch":  # many more tokens bring further kernels, of a few MiB
        return least, max(least + 3, min(least + LARGE, MANY_TOKENS // case.length))
    value = _value(case, name)
    if name == "rank":
        return value, 2 * value
    start = value % BLOCK + BLOCK
    return tuple(start + LARGE * step for step in range(DEGREES[name] + 1))


def _between(name: str, values: tuple[int, ...]) -> int:
    """A value to compare at, at which no polynomial through the others is bound to be right."""
    if name == "length":
        return values[0] + BLOCK
    return values[0] + max(1, (values[1] - values[0]) // 3)


def _value(case: Case, name: str) -> int:
    if name == "rank":
        return int((case.adapter or {})["r"])
    return int(getattr(case, name))


def _varied(case: Case, names: Sequence[str] | Mapping[str, object], values: Sequence[int]) -> Case:
    for name, value in zip(names, values, strict=True):
        if name == "rank":
            case = replace(case, adapter={**(case.adapter or {}), "r": value})
        else:
            case = replace(case, **{name: value})  # type: ignore[arg-type]
    return case


def _alike(one: Stream, other: Stream) -> bool:
    """Whether two streams differ in sizes at most."""
    return one is other or replace(one, sizes=other.sizes) == other


def _weights(points: Sequence[int], value: int) -> list[Fraction]:
    """The share of each point in the polynomial through all of them (Lagrange's form)."""
    return [
        prod(
            (Fraction(value - other, point - other) for other in points if other != point), start=Fraction(1)
        )
        for point in points
    ]
