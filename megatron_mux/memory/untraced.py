"""Memory that traces do not see: a table, each entry with its source, and how many bytes it is likely to be.

Some of it goes through torch's caching allocator: scratch that kernels allocate for themselves, and workspaces that are
kept. It is inserted into the stream of allocations, at the operator that takes it. The rest is the process's alone.

**None of it has been measured on a GPU here.** Sizes are read from sources, of torch 2.13 where nothing else is said.
What the sources leave open carries a range: the least and the most it may be, in shares of what is likely. It becomes
the interval of a prediction. Formulas are kept free of rounding to blocks of tokens where the error is below a
hundredth, so that sizes are polynomials of batch and length.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_mux.gpus import Gpu
from megatron_mux.memory.sizes import MIB

KIB = 1 << 10

Taken = Literal["in an operator", "by each thread", "by the process", "by each communicator"]


@dataclass(frozen=True)
class Untraced:
    """An entry of the table.

    Attributes:
        taken: By what it is taken. What an operator takes is free again when it is done.
        pooled: Whether it goes through torch's caching allocator.
        source: Where its size is from.
        least, most: What it may really be, as shares of what is likely.
    """

    taken: Taken
    pooled: bool
    source: str
    least: float = 1.0
    most: float = 1.0


CONTEXT = "CUDA context"
COMMUNICATOR = "NCCL communicator"
CUBLAS = "cuBLAS workspace"
FLASH = "flash attention's backward scratch"
CUDNN = "cuDNN attention's backward workspace"
EFFICIENT = "memory-efficient attention's backward workspace"
EMBEDDING = "scratch of the embedding's gradient"
NORM = "partial sums of a norm's gradient"
FOREACH_NORM = "partial sums of foreach norms"
SORT = "scratch of a sort"

TABLE: Mapping[str, Untraced] = {
    CONTEXT: Untraced(
        "by the process",
        False,
        "pytorch/pytorch issues 107667 (300 MB since modules are loaded lazily, 1 GB before), 20532, 28394",
        300 / 512,
        2.0,
    ),
    COMMUNICATOR: Untraced(
        "by each communicator",
        False,
        "NCCL src/init.cc (buffers of a connection), NVIDIA/nccl issues 986 (channels) and 864 (1.6 GB seen)",
        1 / 12,
        7.0,
    ),
    # cuBLASLt has the same block: TORCH_CUBLASLT_UNIFIED_WORKSPACE is on by default.
    CUBLAS: Untraced(
        "by each thread",
        True,
        "aten/src/ATen/cuda/CublasHandlePool.cpp: parseChosenWorkspaceSize, getNewWorkspace",
    ),
    FLASH: Untraced(
        "in an operator",
        True,
        "aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp: mha_bwd",
    ),
    CUDNN: Untraced(
        "in an operator",
        True,
        "aten/src/ATen/native/cudnn/MHA.cpp: get_workspace_size of the backward graph; what cuDNN asks for is not said",
        0.0,
        2.0,
    ),
    EFFICIENT: Untraced(
        "in an operator",
        True,
        "aten/src/ATen/native/transformers/cuda/attention_backward.cu: delta, and workspace_size of the kernel",
        0.0,
        3.0,
    ),
    EMBEDDING: Untraced(
        "in an operator",
        True,
        "aten/src/ATen/native/cuda/Embedding.cu (sort; none up to 3,072 tokens) and EmbeddingBackwardKernel.cu",
        0.0,
    ),
    NORM: Untraced(
        "in an operator",
        True,
        "aten/src/ATen/native/cuda/layer_norm_kernel.cu: LaunchGammaBetaBackwardCUDAKernel",
        0.0,
    ),
    FOREACH_NORM: Untraced(
        "in an operator",
        True,
        "aten/src/ATen/native/cuda/ForeachReduceOp.cu: output_per_tensor",
    ),
    SORT: Untraced(
        "in an operator",
        True,
        "aten/src/ATen/native/cuda/Sort.cu: segmented_sort_large_segments; what cub asks for is not said",
        8 / 20,
        1.2,
    ),
}
"""All entries by name. The name of one that an operator takes is the operator of its events in a stream."""

SMALL_INDEX = 3072
"""Up to so many tokens the embedding's gradient is made without sorting them."""
MANY_TOKENS = 1 << 16
"""Beyond, the gradient of a norm's weight is summed up in two steps."""


class Scratch(NamedTuple):
    """Bytes that an operator takes and returns."""

    name: str
    size: int


def context() -> int:
    """Likely bytes of the CUDA context, with what torch's libraries load."""
    return 512 * MIB


def communicator(channels: int = 24) -> int:
    """Likely bytes of one NCCL communicator: a ring's receiving connection in each channel.

    A connection has a buffer for each of NCCL's protocols: 4 MiB (Simple), 8 lines x 512 threads x 8 steps of 16 bytes
    (LL), 120 elements x 640 threads x 8 steps of 8 bytes (LL128).
    """
    return channels * (4 * MIB + 8 * 512 * 8 * 16 + 120 * 640 * 8 * 8)


THREADS = 2
"""With products of matrices, and so with a workspace of cuBLAS: the main one, and autograd's for the backward pass."""


def cublas_of(gpu: Gpu) -> int:
    """Bytes of a cuBLAS workspace on a GPU; `CUBLAS_WORKSPACE_CONFIG` of the environment counts."""
    return cublas(gpu.capability, os.environ.get("CUBLAS_WORKSPACE_CONFIG"))


def cublas(capability: tuple[int, int], config: str | None = None) -> int:
    """Bytes of a cuBLAS workspace: one for each thread and stream, kept until the process ends.

    Args:
        capability: Compute capability.
        config: What `CUBLAS_WORKSPACE_CONFIG` holds: pairs of a size in KiB and a number, `:4096:2:16:8`.
    """
    if config is not None:
        pairs = re.findall(r":([0-9]+):([0-9]+)", config)
        if pairs:
            return sum(int(size) * KIB * int(number) for size, number in pairs)
    return 32 * MIB if capability[0] in (9, 10, 12) else 2 * 4096 * KIB + 8 * 16 * KIB


def flash(
    batch: int, heads: int, groups: int, queries: int, keys: int, head: int, itemsize: int
) -> list[Scratch]:
    """What the backward pass of flash attention takes.

    Args:
        batch: Sequences.
        heads: Of the queries.
        groups: Heads of keys and values.
        queries, keys: Tokens of a sequence.
        head: Elements of a head.
        itemsize: Bytes of an element.
    """
    rounded, wide = _up(queries, 128), _up(head, 32 if head <= 128 else 64)
    found = [batch * heads * rounded * 4, batch * heads * rounded * wide * 4]  # softmax_d, dq_accum
    if heads != groups:
        found += [batch * keys * heads * head * itemsize] * 2  # dk_expanded, dv_expanded
    return [Scratch(FLASH, size) for size in found]


def flash_packed(
    segments: int, heads: int, groups: int, queries: int, keys: int, head: int, itemsize: int
) -> list[Scratch]:
    """The same of packed segments of any lengths, each of which begins 128 rows behind the one before.

    Args:
        segments: How many.
        heads: Of the queries.
        groups: Heads of keys and values.
        queries, keys: Tokens of all segments.
        head: Elements of a head.
        itemsize: Bytes of an element.
    """
    rows, wide = queries + 128 * segments, _up(head, 32 if head <= 128 else 64)
    found = [heads * rows * 4, rows * heads * wide * 4]  # softmax_d, dq_accum
    if heads != groups:
        found += [keys * heads * head * itemsize] * 2  # dk_expanded, dv_expanded
    return [Scratch(FLASH, size) for size in found]


def cudnn(batch: int, heads: int, queries: int, head: int) -> list[Scratch]:
    """What cuDNN's backward pass of attention is likely to take: the queries' gradient in fp32, a number a row."""
    return [Scratch(CUDNN, batch * heads * queries * (head + 1) * 4)]


def efficient(batch: int, heads: int, queries: int, head: int, itemsize: int) -> list[Scratch]:
    """What the backward pass of memory-efficient attention takes: a number a row; where it is not fp32, the queries'
    gradient in fp32 too.
    """
    return [Scratch(EFFICIENT, batch * heads * queries * (1 + (head if itemsize < 4 else 0)) * 4)]


def embedding(tokens: int, hidden: int) -> list[Scratch]:
    """What the gradient of an embedding takes to sort its tokens and add up runs of them.

    Sorted tokens and places, each twice while they are sorted, the runs' beginnings and lengths (eight bytes each), and
    rows of fp32: one for each token that there is at most, one more for each ten (13 in 128 here). A vocabulary smaller
    than the batch makes fewer.
    """
    if tokens <= SMALL_INDEX:
        return []
    return [
        Scratch(EMBEDDING, 2 * tokens * 8),
        Scratch(EMBEDDING, 5 * tokens * 8),
        Scratch(EMBEDDING, tokens * (128 + 13) * _up(hidden, 32) * 4 // 128),
    ]


def norm(tokens: int, hidden: int, itemsize: int) -> list[Scratch]:
    """What the gradient of a norm's weight takes, or of its bias: 32,768 blocks of 32 elements, where there are many
    tokens and rows are narrow (by the 132 multiprocessors of a Hopper).
    """
    return [Scratch(NORM, MIB * itemsize)] if tokens > MANY_TOKENS and hidden // 32 < 66 else []


def foreach_norm(sizes: list[int]) -> list[Scratch]:
    """What norms of many tensors at once take: a number for each 65,536 elements of the largest, for each tensor.

    Args:
        sizes: Elements of each tensor.
    """
    return [Scratch(FOREACH_NORM, len(sizes) * -(-max(sizes) // 65536) * 4)] if sizes else []


def sort(elements: int, itemsize: int) -> list[Scratch]:
    """What sorting one long row takes: numbers of its elements, and elements and numbers once more while it sorts."""
    return [Scratch(SORT, elements * (8 + itemsize + 8))]


def _up(count: int, step: int) -> int:
    return -(-count // step) * step
