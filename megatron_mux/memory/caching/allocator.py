"""PyTorch's caching allocator for CUDA devices, without a device.

The rules are those of torch 2.10 to 2.13, which are the same but for what `Settings` says:

- A request is rounded to a multiple of 512 bytes. Up to 1 MiB it is served from the small pool of its stream, else
  from the large one.
- A pool gives its smallest free block that is large enough; of equal ones, that at the lowest address. What is left
  over becomes a free block of its own: always in the small pool and in expandable segments, beyond 1 MiB in the large
  pool.
- With none large enough, the device is asked for a segment: 2 MiB for the small pool; 20 MiB for requests below
  10 MiB; else the request in multiples of 2 MiB.
- A block that is freed becomes one with its free neighbours in the segment.
- Where the device has no segment to give, segments that are free as a whole are returned to it, and it is asked again.
- Expandable segments: each pool has one that covers more addresses than there is memory, and grows page by page (2 MiB
  small, 20 MiB large). A free block at its end grows by what is missing. Pages that are free as a whole can be
  returned.

A block used on other streams (`record_stream`) is free once the host has seen their work done. That depends on time, of
which nothing is known here: it is free at once, unless the stream of events frees it later. Pools of CUDA graphs and of
`torch.cuda.MemPool` are not replayed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron_mux.memory.caching.blocks import FREE, UNMAPPED, USED, Block, Pool
from megatron_mux.memory.caching.settings import LARGE_STEP, SMALL_LIMIT, SMALL_SEGMENT, SMALLEST, Settings

_ADDRESSES = 1 << 44
"""Of an expandable segment if the device's memory is not known: they never run out."""
_NO_LIMIT = 1 << 62


class OutOfMemory(Exception):
    """The device has no memory for a request, with nothing left to return to it."""


@dataclass(frozen=True)
class Segment:
    """Memory from the device at successive addresses.

    Attributes:
        address: Where it begins.
        size: Bytes.
        stream: Which CUDA stream's.
        small: Whether it belongs to the small pool.
        blocks: Bytes of each block, and whether it is in use.
    """

    address: int
    size: int
    stream: int
    small: bool
    blocks: tuple[tuple[int, bool], ...]


class Allocator:
    """The allocator of one device in one process.

    Attributes:
        allocated: Bytes of blocks in use, rounded as they are.
        reserved: Bytes from the device.
        retries: How often the device had no segment to give until free ones were returned.

    Args:
        settings: What users can set.
        addresses: Where `cudaMalloc` puts the segments, if it is known: of several equal blocks the lowest is chosen.
            By default, and after these, each segment is above all earlier ones.
    """

    def __init__(self, settings: Settings | None = None, addresses: Iterable[int] = ()) -> None:
        self.settings = settings or Settings()
        self.allocated = 0
        self.reserved = 0
        self.retries = 0
        self._addresses = iter(addresses)
        self._next = LARGE_STEP
        self._large: dict[int, Pool] = {}
        self._small: dict[int, Pool] = {}
        most, expandable = self.settings.max_split_size, self.settings.expandable_segments
        # Blocks of expandable segments are split whatever their size.
        self._split_below = _NO_LIMIT if most is None or expandable else most
        self._plain_rounding = self.settings.roundup_power2_divisions == 1
        self._plain_choice = most is None and not expandable
        self._collects = self.settings.limit is not None and self.settings.garbage_collection_threshold > 0
        self._requests = 0  # large ones: the clock of garbage collection

    def allocate(self, size: int, stream: int = 0) -> Block:
        """Serve a request.

        Args:
            size: Bytes, at least 1: a tensor without elements asks for nothing.
            stream: For which CUDA stream.

        Raises:
            OutOfMemory: There is no memory for it.
        """
        rounded = (size + SMALLEST - 1) & -SMALLEST if self._plain_rounding else self.settings.rounded(size)
        pools = self._small if rounded <= SMALL_LIMIT else self._large
        pool = pools.get(stream) or self._new_pool(stream, pools is self._small)
        if not pool.small:
            self._requests += 1
        at = pool.at_least(rounded)
        if not self._plain_choice:
            at = self._choice(pool, at, rounded)
        block = pool.pop(at) if at < len(pool.blocks) else self._missed(pool, rounded)
        if block.size - rounded > pool.keep and rounded < self._split_below:
            rest = block.cut(rounded, FREE)
            rest.since = self._requests
            pool.add(rest)
        block.state = USED
        self.allocated += block.size
        return block

    def free(self, block: Block) -> None:
        """Take a block back. It must be in use; it is not to be used any more."""
        self.allocated -= block.size
        block.since = self._requests
        self._keep(block)

    def empty_cache(self) -> None:
        """Return to the device all segments, and all pages of expandable ones, that are free as a whole."""
        for pool in self._pools():
            for block in list(pool.blocks):
                if self.settings.expandable_segments:
                    self._unmap(block)
                elif block.is_whole:
                    self._release(block)

    def segments(self, used: Iterable[Block]) -> list[Segment]:
        """All memory from the device, by address.

        Args:
            used: The blocks in use: the allocator itself knows only those that are free.
        """
        free = (block for pool in self._pools() for block in pool.blocks)
        found = []
        for block in sorted((*used, *free), key=lambda block: block.address):
            if block.before is None or block.before.state == UNMAPPED:
                pieces = tuple((piece.size, piece.state == USED) for piece in block.mapped())
                size = sum(size for size, _ in pieces)
                found.append(Segment(block.address, size, block.pool.stream, block.pool.small, pieces))
        return found

    def _pools(self) -> Iterator[Pool]:
        yield from self._large.values()
        yield from self._small.values()

    def _new_pool(self, stream: int, small: bool) -> Pool:
        # All sizes are multiples of 512: what is more than nothing is at least that.
        keep = 0 if small or self.settings.expandable_segments else SMALL_LIMIT
        pool = Pool(stream, small, keep, SMALL_SEGMENT if small else self.settings.large_segment)
        (self._small if small else self._large)[stream] = pool
        return pool

    def _keep(self, block: Block) -> None:
        """Make a block free, as one with its free neighbours."""
        pool, before, after = block.pool, block.before, block.after
        if before is not None and before.state == FREE:
            pool.remove(before)
            block.absorb(before)
        if after is not None and after.state == FREE:
            pool.remove(after)
            block.absorb(after)
        block.state = FREE
        pool.add(block)

    def _choice(self, pool: Pool, at: int, rounded: int) -> int:
        """Which free block serves a request, given the first that is large enough; the number of blocks for none."""
        blocks, count = pool.blocks, len(pool.blocks)
        if at == count:
            return count
        if self.settings.expandable_segments:
            # A block that can grow counts as large as it can become: another one is taken first.
            while at + 1 < count and blocks[at + 1].size_to_be < blocks[at].size_to_be:
                at += 1
        most, size = self.settings.max_split_size, blocks[at].size
        if most is None:
            return at
        slack = self.settings.max_non_split_rounding
        slack = self.settings.large_segment if slack is None else slack
        least_too_large = most if rounded < most else rounded + slack
        return at if size < least_too_large else count

    def _missed(self, pool: Pool, rounded: int) -> Block:
        """Memory from the device, for a request that no free block serves.

        Raises:
            OutOfMemory: The device has none, even after all that is free has been returned to it.
        """
        if self._collects:
            self._collect()
        block = self._obtained(pool, rounded)
        if block is None and self._released_oversize(pool, rounded):
            block = self._obtained(pool, rounded)
        if block is None:
            self.retries += 1
            self.empty_cache()
            block = self._obtained(pool, rounded)
        if block is None:
            raise OutOfMemory(
                f"no memory for {rounded} bytes, with {self.reserved} reserved and {self.allocated} in use"
            )
        return block

    def _obtained(self, pool: Pool, rounded: int) -> Block | None:
        """A new segment, or a block of an expandable one; None if there is no memory for it."""
        size, limit = self.settings.segment(rounded), self.settings.limit
        # The limit is held against the size of a segment, even where an expandable one would grow by less or more.
        if limit is not None and self.reserved + size > limit:
            return None
        if self.settings.expandable_segments:
            return self._grown(pool, rounded)
        if not self._take(size):
            return None
        address = next(self._addresses, self._next)
        self._next = max(self._next, address + size)
        return Block(address, size, FREE, pool, None, None)

    def _take(self, size: int) -> bool:
        """Reserve so many bytes of the device's; False if it does not have them."""
        if self.settings.capacity is not None and self.reserved + size > self.settings.capacity:
            return False
        self.reserved += size
        return True

    def _release(self, block: Block) -> None:
        """Return a segment that is free as a whole."""
        block.pool.remove(block)
        self.reserved -= block.size

    def _collect(self) -> None:
        """Return large segments that are free as a whole: those free for longest, until enough are gone."""
        limit = self.settings.limit or 0
        wanted = self.reserved - int(self.settings.garbage_collection_threshold * limit)
        if wanted <= 0 or self.settings.expandable_segments:
            return
        left = [block for pool in self._large.values() for block in pool.blocks if block.is_whole]
        while left and wanted > 0:
            mean = sum(self._requests - block.since for block in left) / len(left)
            for block in left:
                if self._requests - block.since >= mean:
                    wanted -= block.size
                    self._release(block)
            left = [block for block in left if self._requests - block.since < mean]

    def _released_oversize(self, pool: Pool, rounded: int) -> bool:
        """Return blocks that are too large to be split, if they make room for a request; whether they do."""
        most = self.settings.max_split_size
        if most is None or self.settings.expandable_segments:
            return False
        wanted = max(rounded, most)
        at = pool.at_least(wanted)
        if at < len(pool.blocks):
            self._release(pool.blocks[at])
            return True
        while wanted > 0 and pool.blocks and pool.blocks[-1].size >= most:
            wanted -= pool.blocks[-1].size
            self._release(pool.blocks[-1])
        return wanted <= 0

    def _grown(self, pool: Pool, rounded: int) -> Block | None:
        """A block of an expandable segment, given memory as far as a request needs it; None if there is none."""
        block: Block | None = self._growable(pool, rounded)
        while block is not None and (block.state == UNMAPPED or block.size < rounded):
            if block.state == FREE:
                missing, block = rounded - block.size, block.after
            else:
                missing = rounded
            if block is None or not self._map(block, min(missing, block.size)):
                return None
        if block is not None:
            pool.remove(block)
        return block

    def _growable(self, pool: Pool, rounded: int) -> Block:
        """The lowest free or unmapped block from which on there are addresses enough, of a new segment if need be."""
        for block in pool.unmapped:
            if block.before is not None and block.before.state == FREE:
                block = block.before
            addresses = 0
            at: Block | None = block
            while at is not None and at.state != USED and addresses < rounded:
                addresses += at.size
                at = at.after
            if addresses >= rounded:
                return block
        page, capacity = pool.page, self.settings.capacity
        # As torch does: an eighth more than the device has, for holes that are left behind.
        addresses = _ADDRESSES if capacity is None else capacity * 9 // 8
        address = -(-self._next // page) * page
        block = Block(address, -(-addresses // page) * page, UNMAPPED, pool, None, None)
        self._next = address + block.size
        pool.add_unmapped(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Give memory to the beginning of an unmapped block, in whole pages, and make it free; False without memory."""
        pool = block.pool
        size = -(-size // pool.page) * pool.page  # not beyond its end: unmapped blocks are whole pages
        if not self._take(size):
            return False
        pool.unmapped.remove(block)
        if size < block.size:
            pool.add_unmapped(block.cut(size, UNMAPPED))
        self._keep(block)
        return True

    def _unmap(self, block: Block) -> None:
        """Return the whole pages of a free block of an expandable segment."""
        pool, page = block.pool, block.pool.page
        begin = -(-block.address // page) * page
        end = (block.address + block.size) // page * page
        if begin >= end:
            return
        pool.remove(block)
        if begin > block.address:
            rest = block.cut(begin - block.address, FREE)
            pool.add(block)
            block = rest
        if end < block.address + block.size:
            pool.add(block.cut(end - begin, FREE))
        self.reserved -= block.size
        block.state = UNMAPPED
        for other in (block.before, block.after):
            if other is not None and other.state == UNMAPPED:
                pool.unmapped.remove(other)
                block.absorb(other)
        if not block.is_whole:  # else the segment is gone
            pool.add_unmapped(block)
