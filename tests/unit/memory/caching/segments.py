"""All memory that a modelled allocator has reserved, segment by segment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron_mux.memory.caching.allocator import Allocator
from megatron_mux.memory.caching.blocks import UNMAPPED, USED, Block


@dataclass(frozen=True)
class Segment:
    """Reserved memory at successive addresses: bytes of each block, and whether it is in use."""

    address: int
    stream: int
    small: bool
    blocks: tuple[tuple[int, bool], ...]

    @property
    def size(self) -> int:
        return sum(size for size, _ in self.blocks)


def segments(allocator: Allocator, used: Iterable[Block]) -> list[Segment]:
    """By address; the allocator itself knows only the blocks that are free."""
    free = (block for pool in allocator._pools() for block in pool.blocks)
    found = []
    for block in sorted((*used, *free), key=lambda block: block.address):
        if block.before is None or block.before.state == UNMAPPED:
            pieces = tuple((piece.size, piece.state == USED) for piece in _mapped(block))
            found.append(Segment(block.address, block.pool.stream, block.pool.small, pieces))
    return found


def _mapped(first: Block) -> Iterator[Block]:
    block: Block | None = first
    while block is not None and block.state != UNMAPPED:
        yield block
        block = block.after
