"""Inserts untraced blocks into a stream: workspaces that cuBLAS keeps, and gradient buckets of DDP."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron_mux.memory import untraced
from megatron_mux.memory.sizes import MIB
from megatron_mux.memory.stream.events import CATEGORIES, Category, Moment, Stream

_PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "addbmm"))
_FIRST_BUCKET, _BUCKET = MIB, 25 * MIB
"""Bytes at which `DistributedDataParallel` closes its first gradient bucket, and any other."""


class InsertedBlock(NamedTuple):
    """A block that is allocated before an event of a stream and never freed."""

    before: int
    size: int
    category: Category
    moment: Moment


def workspaces(stream: Stream, size: int) -> list[InsertedBlock]:
    """The workspaces of cuBLAS, one for each thread's handle: autograd runs the backward pass in a second thread.

    Args:
        stream: A step whose matrix products run on one CUDA stream.
    """
    found: dict[bool, InsertedBlock] = {}
    products = {place for place, moment in enumerate(stream.moment_names) if moment.operator in _PRODUCTS}
    for index, (code, at) in enumerate(zip(stream.codes, stream.moments, strict=True)):
        if code >= 0 and at in products:
            phase = stream.moment_names[at].phase
            # The result of the product is allocated first.
            moment = Moment(phase, None, untraced.CUBLAS)
            found.setdefault(phase == "backward", InsertedBlock(index + 1, size, Category.WORKSPACE, moment))
    return list(found.values())


def buckets(stream: Stream) -> list[InsertedBlock]:
    """The gradient buckets of `DistributedDataParallel`, which hold a copy of every gradient.

    They are allocated before the first step, in the order in which gradients are computed, which must have one type.
    (torch first allocates them in reverse order of the parameters, and replaces them after the first step by buckets of
    the same number of bytes.)
    """
    moment = Moment("load", None, "gradient bucket")
    begin = next((i for i, at in enumerate(stream.moments) if stream.moment_names[at].phase != "load"), 0)
    return [
        InsertedBlock(begin, size, Category.COMMUNICATION, moment)
        for size in bucket_sizes(_gradients(stream))
    ]


def bucket_sizes(gradients: Sequence[int]) -> Iterator[int]:
    """Bytes of each bucket, from bytes of each gradient: a bucket is closed when it reaches its limit."""
    size, limit = 0, _FIRST_BUCKET
    for gradient in gradients:
        size += gradient
        if size >= limit:
            yield size
            size, limit = 0, _BUCKET
    if size:
        yield size


def inserted(stream: Stream, blocks: Sequence[InsertedBlock]) -> Stream:
    """The stream with further blocks, all numbered in the order of allocation."""
    blocks = sorted(blocks, key=lambda block: block.before)
    names = dict.fromkeys((*stream.moment_names, *(block.moment for block in blocks)))
    place = {moment: at for at, moment in enumerate(names)}
    ends = [block.before for block in blocks]
    codes, moments, numbers = array("i"), array("I"), array("i")
    sizes, categories = array("q"), array("B")
    for begin, end, new in zip((0, *ends), (*ends, len(stream)), (*blocks, None), strict=True):
        for code in stream.codes[begin:end]:
            if code < 0:
                codes.append(~numbers[~code])
                continue
            numbers.append(len(sizes))
            codes.append(len(sizes))
            sizes.append(stream.sizes[code])
            categories.append(stream.categories[code])
        moments += stream.moments[begin:end]
        if new is not None:
            codes.append(len(sizes))
            moments.append(place[new.moment])
            sizes.append(new.size)
            categories.append(CATEGORIES.index(new.category))
    order = {at: place for place, at in enumerate(dict.fromkeys(moments))}  # of first use
    listed = tuple(names)
    named = tuple(listed[at] for at in order)
    return Stream(codes, array("I", map(order.__getitem__, moments)), sizes, categories, named)


def scaled(stream: Stream, most: bool) -> Stream:
    """The stream with the lower or the upper bounds of untraced sizes."""
    shares = {
        at: entry.most if most else entry.least
        for at, moment in enumerate(stream.moment_names)
        if (entry := untraced.TABLE.get(moment.operator)) is not None
    }
    sizes = stream.sizes[:]
    for code, at in zip(stream.codes, stream.moments, strict=True):
        if code >= 0 and at in shares:
            sizes[code] = round(sizes[code] * shares[at])
    return replace(stream, sizes=sizes)


def _gradients(stream: Stream) -> list[int]:
    """Bytes of each gradient of the first step, in the order in which they are computed."""
    category, found = CATEGORIES.index(Category.GRADIENTS), list[int]()
    ends = [at for at, moment in enumerate(stream.moment_names) if moment.phase in ("optimizer", "clear")]
    for code, at in zip(stream.codes, stream.moments, strict=True):
        if found and at in ends:
            break
        if code >= 0 and stream.categories[code] == category:
            found.append(stream.sizes[code])
    return found
