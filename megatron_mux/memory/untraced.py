"""Memory that traces do not see: a table with a source for each entry, and the likely sizes of what processes keep.

Some of it goes through torch's caching allocator: workspaces that are kept, and scratch that kernels allocate for
themselves (see `kernel_scratch`). It is inserted into the stream of allocations. The rest belongs to the process.

**None of it has been measured on a GPU here.** Sizes are read from sources, of torch 2.13 unless noted. If the sources
leave a size open, its entry has bounds, as shares of the likely size, which become the interval of a prediction.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_mux.gpus import Gpu
from megatron_mux.memory.sizes import MIB

KIB = 1 << 10


@dataclass(frozen=True)
class Untraced:
    """An entry of the table.

    Attributes:
        least, most: Bounds of the real size, as shares of the likely one.
    """

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

_ATEN = "aten/src/ATen"
TABLE: Mapping[str, Untraced] = {
    # Of the process.
    CONTEXT: Untraced(
        "pytorch/pytorch issues 107667 (300 MB since modules are loaded lazily, 1 GB before), 20532, 28394",
        300 / 512,
        2.0,
    ),
    COMMUNICATOR: Untraced(
        "NCCL src/init.cc (buffers of a connection), NVIDIA/nccl issues 986 (channels) and 864 (1.6 GB seen)",
        1 / 12,
        7.0,
    ),
    # Kept by each thread. cuBLASLt uses the same block: TORCH_CUBLASLT_UNIFIED_WORKSPACE is on by default.
    CUBLAS: Untraced(f"{_ATEN}/cuda/CublasHandlePool.cpp: parseChosenWorkspaceSize, getNewWorkspace"),
    # Freed when an operator returns.
    FLASH: Untraced(f"{_ATEN}/native/transformers/cuda/flash_attn/flash_api.cpp: mha_bwd"),
    CUDNN: Untraced(
        f"{_ATEN}/native/cudnn/MHA.cpp: get_workspace_size of the backward graph; cuDNN does not document its size",
        0.0,
        2.0,
    ),
    EFFICIENT: Untraced(
        f"{_ATEN}/native/transformers/cuda/attention_backward.cu: delta, and workspace_size of the kernel",
        0.0,
        3.0,
    ),
    EMBEDDING: Untraced(
        f"{_ATEN}/native/cuda/Embedding.cu (sort; none up to 3,072 tokens) and EmbeddingBackwardKernel.cu",
        0.0,
    ),
    NORM: Untraced(f"{_ATEN}/native/cuda/layer_norm_kernel.cu: LaunchGammaBetaBackwardCUDAKernel", 0.0),
    FOREACH_NORM: Untraced(f"{_ATEN}/native/cuda/ForeachReduceOp.cu: output_per_tensor"),
    SORT: Untraced(
        f"{_ATEN}/native/cuda/Sort.cu: segmented_sort_large_segments; cub does not document its size",
        8 / 20,
        1.2,
    ),
}
"""All entries by name. In a stream, the name of an operator's scratch is the operator of its events."""

THREADS = 2
"""Threads that multiply matrices, each with a cuBLAS workspace: the main one, and autograd's for the backward pass."""


CONTEXT_BYTES = 512 * MIB
"""Likely bytes of the CUDA context, including what torch's libraries load."""
COMMUNICATOR_BYTES = 24 * (4 * MIB + 8 * 512 * 8 * 16 + 120 * 640 * 8 * 8)
"""Likely bytes of one NCCL communicator: a ring's receiving connection in each of 24 channels, with a buffer for each
of NCCL's protocols: 4 MiB (Simple), 8 lines x 512 threads x 8 steps of 16 bytes (LL), 120 elements x 640 threads x 8
steps of 8 bytes (LL128)."""


def cublas_of(gpu: Gpu) -> int:
    """Bytes of a cuBLAS workspace on a GPU, one for each thread and stream, kept until the process ends.

    `CUBLAS_WORKSPACE_CONFIG` of the environment counts: pairs of a size in KiB and a number, such as `:4096:2:16:8`.
    """
    pairs = re.findall(r":([0-9]+):([0-9]+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pairs:
        return sum(int(size) * KIB * int(number) for size, number in pairs)
    return 32 * MIB if gpu.capability[0] in (9, 10, 12) else 2 * 4096 * KIB + 8 * 16 * KIB
