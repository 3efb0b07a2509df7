"""The replayed allocator against a slow one that keeps nothing but lists, on random requests."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megatron_mux.memory.caching.allocator import Allocator, OutOfMemory
from megatron_mux.memory.caching.blocks import Block
from megatron_mux.memory.caching.settings import Settings
from megatron_mux.memory.sizes import MIB
from tests.unit.memory.caching.segments import segments

SIZES = st.one_of(
    st.integers(1, MIB),
    st.integers(1, 30).map(lambda count: count * MIB // 2),
    st.integers(MIB, 50 * MIB),
)


@dataclass
class Cell:
    """A piece of a segment: `used` (by whom), `free`, or `none`: addresses without memory."""

    size: int
    state: str
    owner: int = -1


@dataclass
class Range:
    """A segment."""

    stream: int
    small: bool
    cells: list[Cell]

    def merge(self) -> None:
        found: list[Cell] = []
        for cell in self.cells:
            if found and cell.state == found[-1].state != "used":
                found[-1].size += cell.size
            else:
                found.append(cell)
        self.cells = found

    def offset(self, index: int) -> int:
        return sum(cell.size for cell in self.cells[:index])


class Lists:
    """The rules once more, looking at everything each time."""

    def __init__(self, expandable: bool, capacity: int | None) -> None:
        self.expandable = expandable
        self.capacity = capacity
        self.ranges: list[Range] = []
        self.owners = 0

    @property
    def reserved(self) -> int:
        return sum(cell.size for found in self.ranges for cell in found.cells if cell.state != "none")

    def allocate(self, size: int, stream: int) -> int | None:
        size = -(-size // 512) * 512
        small = size <= MIB
        for attempt in ("find", "ask", "empty"):
            if attempt == "empty":
                self.empty()
            found = self.find(size, stream, small) if attempt == "find" else self.ask(size, stream, small)
            if found is not None:
                return self.use(*found, size)
        return None

    def find(self, size: int, stream: int, small: bool) -> tuple[Range, int] | None:
        fits = []
        for number, found in enumerate(self.ranges):
            for index, cell in enumerate(found.cells):
                if (found.stream, found.small, cell.state) == (stream, small, "free") and cell.size >= size:
                    grown = cell.size
                    if index + 1 < len(found.cells) and found.cells[index + 1].state == "none":
                        grown += found.cells[index + 1].size
                    fits.append((cell.size, number, found.offset(index), grown, index))
        fits.sort()
        while len(fits) > 1 and fits[1][3] < fits[0][3]:
            fits.pop(0)
        return (self.ranges[fits[0][1]], fits[0][4]) if fits else None

    def has_room(self, size: int) -> bool:
        return self.capacity is None or self.reserved + size <= self.capacity

    def ask(self, size: int, stream: int, small: bool) -> tuple[Range, int] | None:
        if not self.expandable:
            segment = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            if not self.has_room(segment):
                return None
            self.ranges.append(Range(stream, small, [Cell(segment, "free")]))
            return self.ranges[-1], 0
        page = 2 * MIB if small else 20 * MIB
        mine = [found for found in self.ranges if (found.stream, found.small) == (stream, small)]
        if not mine:
            mine = [Range(stream, small, [Cell(1 << 44, "none")])]
            self.ranges += mine
        cells = mine[0].cells
        for start in range(len(cells)):
            room, end = 0, start
            while end < len(cells) and cells[end].state != "used" and room < size:
                room += cells[end].size
                end += 1
            if room >= size:
                return self.give_memory(mine[0], start, size, page)
        raise AssertionError

    def give_memory(self, found: Range, start: int, size: int, page: int) -> tuple[Range, int] | None:
        """As far as a request needs it, from a cell on; what has been given stays if there is no more."""
        cells, got, index = found.cells, 0, start
        offset = found.offset(start)
        while got < size:
            if cells[index].state == "none":
                pages = -(-min(size - got, cells[index].size) // page) * page
                if not self.has_room(pages):
                    offset = -1
                    break
                rest = cells[index].size - pages
                cells[index : index + 1] = [Cell(pages, "free"), Cell(rest, "none")][: 2 if rest else 1]
            got += cells[index].size
            index += 1
        found.merge()
        return next(((found, i) for i in range(len(found.cells)) if found.offset(i) == offset), None)

    def use(self, found: Range, index: int, size: int) -> int:
        cell = found.cells[index]
        rest = cell.size - size
        if rest >= 512 if found.small or self.expandable else rest > MIB:
            found.cells.insert(index + 1, Cell(rest, "free"))
            cell.size = size
        cell.state, cell.owner = "used", self.owners
        self.owners += 1
        return cell.owner

    def free(self, owner: int) -> None:
        for found in self.ranges:
            for cell in found.cells:
                if cell.owner == owner and cell.state == "used":
                    cell.state = "free"
                    found.merge()
                    return

    def empty(self) -> None:
        for found in self.ranges:
            page, cells = 2 * MIB if found.small else 20 * MIB, []
            for index, cell in enumerate(found.cells):
                begin = found.offset(index)
                first, last = -(-begin // page) * page, (begin + cell.size) // page * page
                if self.expandable and cell.state == "free" and first < last:
                    cells += [Cell(first - begin, "free"), Cell(last - first, "none")]
                    cells += [Cell(begin + cell.size - last, "free")]
                else:
                    cells.append(cell)
            found.cells = [cell for cell in cells if cell.size]
            found.merge()
        gone = "none" if self.expandable else "free"
        self.ranges = [found for found in self.ranges if [cell.state for cell in found.cells] != [gone]]

    def segments(self) -> list[tuple[int, bool, tuple[tuple[int, bool], ...]]]:
        found = []
        for one in self.ranges:
            pieces: list[tuple[int, bool]] = []
            for cell in [*one.cells, Cell(0, "none")]:
                if cell.state != "none":
                    pieces.append((cell.size, cell.state == "used"))
                elif pieces:
                    found.append((one.stream, one.small, tuple(pieces)))
                    pieces = []
        return found


class AgainstLists(RuleBasedStateMachine):
    @initialize(expandable=st.booleans(), capacity=st.sampled_from([None, 60 * MIB, 150 * MIB]))
    def begin(self, expandable: bool, capacity: int | None) -> None:
        self.allocator = Allocator(Settings(expandable_segments=expandable, capacity=capacity))
        self.lists = Lists(expandable, capacity)
        self.used: dict[int, Block] = {}

    @rule(size=SIZES, stream=st.integers(0, 1))
    def allocate(self, size: int, stream: int) -> None:
        owner = self.lists.allocate(size, stream)
        if owner is None:
            with pytest.raises(OutOfMemory):
                self.allocator.allocate(size, stream)
        else:
            self.used[owner] = self.allocator.allocate(size, stream)

    @precondition(lambda self: self.used)
    @rule(which=st.integers(0, 1000))
    def free(self, which: int) -> None:
        owner = sorted(self.used)[which % len(self.used)]
        self.lists.free(owner)
        self.allocator.free(self.used.pop(owner))

    @rule()
    def empty_cache(self) -> None:
        self.lists.empty()
        self.allocator.empty_cache()

    @invariant()
    def both_have_the_same(self) -> None:
        """Pool by pool: the slow one forgets addresses that never had memory, so its pools may be in another order."""
        reserved = segments(self.allocator, self.used.values())
        found = sorted(((s.stream, s.small, s.blocks) for s in reserved), key=pool_of)
        assert found == sorted(self.lists.segments(), key=pool_of)
        assert self.allocator.reserved == self.lists.reserved
        for one in self.lists.ranges:
            owners = [cell.owner for cell in one.cells if cell.state == "used"]
            assert sorted(owners, key=lambda owner: self.used[owner].address) == owners
            pools = {(self.used[owner].pool.stream, self.used[owner].pool.small) for owner in owners}
            assert pools <= {(one.stream, one.small)}


def pool_of(segment: tuple[int, bool, object]) -> tuple[int, bool]:
    return segment[:2]


TestAgainstLists = AgainstLists.TestCase
TestAgainstLists.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
