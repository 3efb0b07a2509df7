"""A model of PyTorch's caching allocator for CUDA devices.

It follows torch 2.10 to 2.13, which differ only in what `Settings` notes:

- A request is rounded to a multiple of 512 bytes. Up to 1 MiB it is served from the small pool of its stream, else
  from the large one.
- A pool serves a request with its smallest free block that is large enough; among equal ones, the one at the lowest
  address. The rest is split off as a free block: always in the small pool and in expandable segments, in the large pool
  if it exceeds 1 MiB.
- If no block is large enough, a segment is reserved: 2 MiB for the small pool; 20 MiB for requests below 10 MiB; else
  the request rounded up to 2 MiB.
- A freed block is merged with its free neighbours in the segment.
- If the device is out of memory, segments that are entirely free are released, and the request is tried again.
- Expandable segments: each pool has one segment, whose address range exceeds the memory and which grows page by page
  (2 MiB small, 20 MiB large). A free block at its end grows by the missing bytes. Pages that are entirely free can be
  released.

A block used on other streams (`record_stream`) becomes free when the host sees their work completed. That depends on
timing, which is unknown here: blocks are free at once, unless the stream of events frees them later. Pools of CUDA
graphs and of `torch.cuda.MemPool` are not modelled. Neither is `garbage_collection_threshold`, which has no effect
unless `torch.cuda.set_per_process_memory_fraction` is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megatron_mux.memory.caching.blocks import FREE, UNMAPPED, USED, Block, Pool
from megatron_mux.memory.caching.settings import LARGE_STEP, SMALL_LIMIT, SMALL_SEGMENT, SMALLEST, Settings

_ADDRESSES = 1 << 44
"""Address range of an expandable segment if the capacity is unknown."""
_NO_LIMIT = 1 << 62


class OutOfMemory(Exception):
    """A request does not fit, even after all cached memory has been released."""


class Allocator:
    """The allocator of one device in one process.

    Attributes:
        allocated: Rounded bytes of blocks in use.
        reserved: Bytes reserved from the device.

    Args:
        settings: The allocator's options and capacity.
        addresses: Addresses that `cudaMalloc` returned, if known; they decide between equal blocks. By default, and
            after these, each segment lies above all earlier ones.
    """

    def __init__(self, settings: Settings | None = None, addresses: Iterable[int] = ()) -> None:
        self.settings = settings or Settings()
        self.allocated = 0
        self.reserved = 0
        self._addresses = iter(addresses)
        self._next = LARGE_STEP
        self._large: dict[int, Pool] = {}
        self._small: dict[int, Pool] = {}
        most, expandable = self.settings.max_split_size, self.settings.expandable_segments
        # Blocks of expandable segments are split whatever their size.
        self._split_below = _NO_LIMIT if most is None or expandable else most
        self._plain_rounding = self.settings.roundup_power2_divisions == 1
        self._plain_choice = most is None and not expandable

    def allocate(self, size: int, stream: int = 0) -> Block:
        """Serve a request.

        Args:
            size: Bytes, at least 1: tensors without elements do not reach the allocator.

        Raises:
            OutOfMemory: It does not fit.
        """
        rounded = (size + SMALLEST - 1) & -SMALLEST if self._plain_rounding else self.settings.rounded(size)
        pools = self._small if rounded <= SMALL_LIMIT else self._large
        pool = pools.get(stream) or self._new_pool(stream, pools is self._small)
        at = pool.at_least(rounded)
        if not self._plain_choice:
            at = self._choice(pool, at, rounded)
        block = pool.pop(at) if at < len(pool.blocks) else self._missed(pool, rounded)
        if block.size - rounded > pool.keep and rounded < self._split_below:
            pool.add(block.cut(rounded, FREE))
        block.state = USED
        self.allocated += block.size
        return block

    def free(self, block: Block) -> None:
        """Take a block back; it must be in use and must not be used afterwards."""
        self.allocated -= block.size
        self._keep(block)

    def empty_cache(self) -> None:
        """Release all segments, and all pages of expandable segments, that are entirely free."""
        for pool in self._pools():
            for block in list(pool.blocks):
                if self.settings.expandable_segments:
                    self._unmap(block)
                elif block.is_whole:
                    self._release(block)

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
        """Make a block free and merge it with its free neighbours."""
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
        """Index of the free block that serves a request, from the first that is large enough; `len(blocks)` if none."""
        blocks, count = pool.blocks, len(pool.blocks)
        if at == count:
            return count
        if self.settings.expandable_segments:
            # A block that can grow counts with the size it can grow to: others are taken first.
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
        """Reserve memory for a request that no free block serves.

        Raises:
            OutOfMemory: It does not fit, even after all cached memory has been released.
        """
        block = self._obtained(pool, rounded)
        if block is None and self._released_oversize(pool, rounded):
            block = self._obtained(pool, rounded)
        if block is None:
            self.empty_cache()
            block = self._obtained(pool, rounded)
        if block is None:
            raise OutOfMemory(
                f"no memory for {rounded} bytes, with {self.reserved} reserved and {self.allocated} in use"
            )
        return block

    def _obtained(self, pool: Pool, rounded: int) -> Block | None:
        """A new segment, or a block of an expandable one; None if it does not fit."""
        if self.settings.expandable_segments:
            return self._grown(pool, rounded)
        size = self.settings.segment(rounded)
        if not self._take(size):
            return None
        address = next(self._addresses, self._next)
        self._next = max(self._next, address + size)
        return Block(address, size, FREE, pool, None, None)

    def _take(self, size: int) -> bool:
        """Reserve bytes of the device; False if that exceeds its capacity."""
        if self.settings.capacity is not None and self.reserved + size > self.settings.capacity:
            return False
        self.reserved += size
        return True

    def _release(self, block: Block) -> None:
        """Release a segment that is entirely free."""
        block.pool.remove(block)
        self.reserved -= block.size

    def _released_oversize(self, pool: Pool, rounded: int) -> bool:
        """Release blocks that are too large to be split; True if a request may fit then."""
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
        """A block of an expandable segment, mapped as far as a request needs it; None if that does not fit."""
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
        """The lowest free or unmapped block with enough addresses after it, of a new segment if necessary."""
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
        # Like torch: an eighth more than the capacity, to allow for holes.
        addresses = _ADDRESSES if capacity is None else capacity * 9 // 8
        address = -(-self._next // page) * page
        block = Block(address, -(-addresses // page) * page, UNMAPPED, pool, None, None)
        self._next = address + block.size
        pool.add_unmapped(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Map the beginning of an unmapped block in whole pages and make it free; False if it does not fit."""
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
        """Unmap the whole pages of a free block of an expandable segment."""
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
