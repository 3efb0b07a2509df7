"""Blocks of segments, and pools of free blocks in the order in which they are chosen."""

from __future__ import annotations

from bisect import bisect_left

USED, FREE, UNMAPPED = 0, 1, 2
"""States of a block. Unmapped addresses of an expandable segment are a block as well."""
ADDRESS_BITS = 56


class Block:
    """A piece of a segment.

    Attributes:
        size: Bytes, a multiple of 512.
        before, after: Its neighbours in the segment.
    """

    __slots__ = ("address", "after", "before", "pool", "size", "state")

    def __init__(
        self, address: int, size: int, state: int, pool: Pool, before: Block | None, after: Block | None
    ) -> None:
        self.address = address
        self.size = size
        self.state = state
        self.pool = pool
        self.before = before
        self.after = after

    @property
    def is_whole(self) -> bool:
        """Whether it fills its segment."""
        return self.before is None and self.after is None

    @property
    def size_to_be(self) -> int:
        """Bytes that it can grow to."""
        after = self.after
        return self.size + (after.size if after is not None and after.state == UNMAPPED else 0)

    def cut(self, size: int, state: int) -> Block:
        """Shrink to `size` bytes and return the rest as a new block, which is in no list of the pool yet."""
        after = self.after
        rest = Block(self.address + size, self.size - size, state, self.pool, self, after)
        if after is not None:
            after.before = rest
        self.after = rest
        self.size = size
        return rest

    def absorb(self, other: Block) -> None:
        """Merge with a neighbour, which must have been removed from the lists of the pool."""
        if other is self.before:
            self.address = other.address
            self.before = other.before
            if other.before is not None:
                other.before.after = self
        else:
            self.after = other.after
            if other.after is not None:
                other.after.before = self
        self.size += other.size


class Pool:
    """The free blocks of one stream, small or large, ordered by size and address.

    Attributes:
        small: Whether it is the stream's small pool.
        keep: Rests of up to this many bytes are not split off.
        page: Bytes by which expandable segments grow.
        keys: Size and address of each free block in one number, ascending.
        blocks: The free blocks in this order.
        unmapped: Unmapped blocks by address.
    """

    __slots__ = ("blocks", "keep", "keys", "page", "small", "stream", "unmapped")

    def __init__(self, stream: int, small: bool, keep: int, page: int) -> None:
        self.stream = stream
        self.small = small
        self.keep = keep
        self.page = page
        self.keys: list[int] = []
        self.blocks: list[Block] = []
        self.unmapped: list[Block] = []

    def at_least(self, size: int) -> int:
        """Index of the first free block of at least `size` bytes; `len(blocks)` if there is none."""
        return bisect_left(self.keys, size << ADDRESS_BITS)

    def add(self, block: Block) -> None:
        """Add a free block."""
        key = block.size << ADDRESS_BITS | block.address
        at = bisect_left(self.keys, key)
        self.keys.insert(at, key)
        self.blocks.insert(at, block)

    def remove(self, block: Block) -> None:
        """Remove a free block."""
        at = bisect_left(self.keys, block.size << ADDRESS_BITS | block.address)
        del self.keys[at], self.blocks[at]

    def pop(self, at: int) -> Block:
        """Remove and return the free block at an index."""
        del self.keys[at]
        return self.blocks.pop(at)

    def add_unmapped(self, block: Block) -> None:
        """Add an unmapped block."""
        self.unmapped.append(block)
        self.unmapped.sort(key=lambda block: block.address)
