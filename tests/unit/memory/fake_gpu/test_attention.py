"""Which attention kernel a GPU would take."""

from __future__ import annotations

import pytest
import torch

from megatron_mux.gpus import Gpu
from megatron_mux.memory.fake_gpu.attention import Kernel, kernel_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OLD, AMPERE, HOPPER = Gpu((7, 5), False), Gpu((8, 0), False), Gpu((9, 0), True)
ADA, BLACKWELL = Gpu((8, 9), False), Gpu((10, 0), True)


@pytest.mark.parametrize(
    ("gpu", "dtype", "heads", "size", "mask", "dropout", "kernel"),
    [
        (AMPERE, BF16, (4, 4), 64, False, 0.0, Kernel.FLASH),
        (HOPPER, BF16, (4, 4), 64, False, 0.0, Kernel.CUDNN),
        (HOPPER, BF16, (4, 4), 64, True, 0.0, Kernel.CUDNN),
        (HOPPER, BF16, (4, 4), 256, False, 0.0, Kernel.CUDNN),
        (BLACKWELL, BF16, (4, 4), 256, False, 0.0, Kernel.FLASH),
        (ADA, BF16, (4, 4), 192, False, 0.0, Kernel.FLASH),
        (ADA, BF16, (4, 4), 224, False, 0.0, Kernel.EFFICIENT),
        (ADA, BF16, (4, 4), 256, False, 0.0, Kernel.FLASH),
        (ADA, BF16, (4, 4), 256, False, 0.1, Kernel.EFFICIENT),
        (HOPPER, BF16, (4, 4), 64, False, 0.1, Kernel.FLASH),  # not a multiple of 1/16
        (HOPPER, BF16, (4, 4), 64, False, 0.125, Kernel.CUDNN),
        (AMPERE, BF16, (4, 4), 64, True, 0.0, Kernel.EFFICIENT),
        (AMPERE, FP32, (4, 4), 64, False, 0.0, Kernel.EFFICIENT),
        (AMPERE, FP32, (4, 4), 66, False, 0.0, Kernel.MATH),
        (AMPERE, BF16, (4, 4), 20, False, 0.0, Kernel.FLASH),
        (AMPERE, BF16, (4, 2), 64, False, 0.0, Kernel.FLASH),
        (AMPERE, FP32, (4, 2), 64, False, 0.0, Kernel.MATH),
        (OLD, FP16, (4, 4), 64, False, 0.0, Kernel.EFFICIENT),
        (OLD, BF16, (4, 4), 64, False, 0.0, Kernel.MATH),
    ],
)
def test_the_kernel_is_the_one_that_torch_chooses(
    gpu: Gpu,
    dtype: torch.dtype,
    heads: tuple[int, int],
    size: int,
    mask: bool,
    dropout: float,
    kernel: Kernel,
) -> None:
    query = torch.empty(2, heads[0], 16, size, dtype=dtype)
    key = torch.empty(2, heads[1], 16, size, dtype=dtype)
    grouped = heads[0] != heads[1]
    assert kernel_of(gpu, query, key, key, mask, dropout, not mask, grouped) is kernel
