"""Blocks of a segment, and the free ones of a pool in the order in which they are chosen."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

USED, FREE, UNMAPPED = 0, 1, 2
"""What a block is. Addresses of an expandable segment that have no memory are a block, too."""
ADDRESS_BITS = 56


class Block:
    """A piece of a segment.

    Attributes:
        address: Where it begins.
        size: Bytes, a multiple of 512.
        state: `USED`, `FREE` or `UNMAPPED`.
        pool: Whose it is.
        before, after: Its neighbours in the segment.
        since: How many large requests there had been when it became free.
    """

    __slots__ = ("address", "after", "before", "pool", "since", "size", "state")

    def __init__(
        self, address: int, size: int, state: int, pool: Pool, before: Block | None, after: Block | None
    ) -> None:
        self.address = address
        self.size = size
        self.state = state
        self.pool = pool
        self.before = before
        self.after = after
        self.since = 0

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its segment."""
        return self.before is None and self.after is None

    def mapped(self) -> Iterator[Block]:
        """It and the blocks after it, as far as there is memory."""
        block: Block | None = self
        while block is not None and block.state != UNMAPPED:
            yield block
            block = block.after

    @property
    def size_to_be(self) -> int:
        """Bytes that it can grow to."""
        after = self.after
        return self.size + (after.size if after is not None and after.state == UNMAPPED else 0)

    def cut(self, size: int, state: int) -> Block:
        """Keep so many bytes; what comes after them is a block of its own, in neither list of the pool yet."""
        after = self.after
        rest = Block(self.address + size, self.size - size, state, self.pool, self, after)
        if after is not None:
            after.before = rest
        self.after = rest
        self.size = size
        return rest

    def absorb(self, other: Block) -> None:
        """Become one with a neighbour, which has been taken out of the pool's lists."""
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
    """The free blocks of one stream, small or large: by size, equal ones by address.

    Attributes:
        stream: The CUDA stream.
        small: Which of its two pools.
        keep: A block keeps what is left over of it up to this many bytes.
        page: Bytes by which expandable segments grow.
        keys: Of each free block its size and address in one number, ascending.
        blocks: The free blocks in this order.
        unmapped: Addresses without memory, ascending.
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
        """The place of the first free block of so many bytes; the number of blocks if there is none."""
        return bisect_left(self.keys, size << ADDRESS_BITS)

    def add(self, block: Block) -> None:
        """Keep a free block."""
        key = block.size << ADDRESS_BITS | block.address
        at = bisect_left(self.keys, key)
        self.keys.insert(at, key)
        self.blocks.insert(at, block)

    def remove(self, block: Block) -> None:
        """Let go of a free block."""
        at = bisect_left(self.keys, block.size << ADDRESS_BITS | block.address)
        del self.keys[at], self.blocks[at]

    def pop(self, at: int) -> Block:
        """Let go of the free block at a place."""
        del self.keys[at]
        return self.blocks.pop(at)

    def add_unmapped(self, block: Block) -> None:
        """Keep addresses without memory."""
        self.unmapped.append(block)
        self.unmapped.sort(key=lambda block: block.address)
