"""The quickstart's SmolLM2-135M against transformers, at 1x1 and 1x2; skipped where it was not prepared.

`SMOLLM2` names another directory than `.quickstart/backbone`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_mux.backbone.model import Backbone
from megatron_mux.batch.pack import PackedSequence, pack
from megatron_mux.runtime import Parallel
from tests.logits import all_logits

pytestmark = pytest.mark.versions

MODEL = Path(os.environ.get("SMOLLM2", ".quickstart/backbone"))


@pytest.mark.quickstart
@pytest.mark.skipif(not (MODEL / "config.json").is_file(), reason="`make prepare` was not run")
@pytest.mark.parametrize("pipeline", [1, 2])
def test_smollm2_agrees_with_transformers(
    pipeline: int, joined: Callable[..., Parallel], stages: Any
) -> None:
    from transformers import AutoModelForCausalLM

    parallel = joined(1, pipeline)
    backbone = Backbone.load(MODEL, parallel)
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(20, backbone.shape.vocab, (n,), generator=generator) for n in (40, 9, 9)]
    sequences = [
        PackedSequence("task", i, t, torch.ones(len(t), dtype=torch.bool), 1.0) for i, t in enumerate(tokens)
    ]
    batch = pack(sequences, ("task",), {"task": 0}).to()
    with torch.no_grad():
        hidden = stages(backbone, batch).forward()
        if parallel.is_last_stage:
            ours = all_logits(backbone, batch, hidden)
            del backbone, hidden
            model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
            wanted = torch.cat([model(t.unsqueeze(0)).logits[0] for t in tokens])
            worst = float((ours - wanted).abs().max())
            print(f"SmolLM2 at 1x{pipeline}: logits differ by at most {worst:.1e}")
            assert worst <= 5e-4
