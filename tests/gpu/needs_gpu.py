"""The marks of tests that need a GPU."""

from __future__ import annotations

import pytest
import torch

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: `make gpu-check` on one"),
]
"""For a module's `pytestmark`."""
