"""Megatron without a GPU: the stand-ins work in whatever order packages are imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.training.training", reason="Megatron-Core ships its training loop since 0.19")
pytestmark = pytest.mark.versions

ROOT = Path(__file__).resolve().parents[2]
OTHERS = "import transformers, peft, datasets, torch._inductor, torchao, bitsandbytes\n"
MEGATRON = "from megatron.training import training\n"
OURS = "from megatron_mux.pipeline.plugin import multi_bucket\nfrom megatron_mux import runtime, engine\n"
USE = "from megatron_mux.megatron_on_cpu import use_cpu\nuse_cpu()\nuse_cpu()\n"
CHECK = """
import torch
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.training import initialize  # its modules are told that there is a GPU
assert eval("torch.cuda.is_available() and torch.cuda.device_count() == 1", vars(initialize))
assert not torch.cuda.is_available() and torch.cuda.device_count() == 0
tracker = CudaRNGStatesTracker()
tracker.add("mine", 7)
before = torch.get_rng_state()
drawn = []
for _ in range(2):
    with tracker.fork("mine"):
        drawn.append(torch.rand(3, device="cuda"))
assert torch.equal(before, torch.get_rng_state())
assert torch.equal(torch.cat(drawn), torch.rand(6, generator=torch.Generator().manual_seed(7)))
assert torch.ones(2).cuda().device.type == torch.zeros(2, device=torch.cuda.current_device()).device.type == "cpu"
print("fine")
"""


@pytest.mark.parametrize(
    "imports",
    [USE + OTHERS + MEGATRON + OURS, OURS + MEGATRON + OTHERS + USE],
    ids=["before all imports", "after them"],
)
def test_megatron_computes_on_the_cpu(imports: str) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", imports + CHECK]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=280)
    assert done.stdout.endswith("fine\n"), done.stderr[-3000:]
