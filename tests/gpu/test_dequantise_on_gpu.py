"""Quantised matrices dequantised by Triton kernels on a GPU have the bits of those dequantised on a CPU."""

from __future__ import annotations

import torch

from tests.gpu.needs_gpu import NEEDS_GPU

pytestmark = NEEDS_GPU

if torch.cuda.is_available():
    from tests.unit.kernels.interpreted.dequantise import (  # noqa: F401
        test_bits_are_those_of_loops,
        test_experts_without_rows_are_left_as_they_are,
    )
