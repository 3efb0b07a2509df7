"""What only a GPU can show: its kernels against the exact paths, and training in bf16 against fp32 on the CPU.

`make gpu-check` runs these; elsewhere they are skipped.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_mux import runtime
from megatron_mux.backbone.model import Backbone
from megatron_mux.engine import Planning
from megatron_mux.fusion.profiler.measure import measure
from megatron_mux.fusion.profiler.profile_store import about_run
from megatron_mux.kernels.attention.segments import Segment, segment_attention
from tests import tiny_models
from tests.end_to_end.harness import Case, random_records, train
from tests.gpu.needs_gpu import NEEDS_GPU

pytestmark = NEEDS_GPU


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("window", [None, 48])
@pytest.mark.parametrize("prefixed", [False, True])
@pytest.mark.parametrize("pasts", [(0, 0, 0, 0, 0), (128, 0, 0, 0, 64)])
def test_attention_on_a_gpu_is_the_exact_one(
    dtype: torch.dtype, tolerance: float, window: int | None, prefixed: bool, pasts: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    lengths = [64, 7, 128, 200, 64]
    segments, start = [], 0
    for i, (length, past) in enumerate(zip(lengths, pasts, strict=True)):
        segments.append(Segment("ab"[i % 2], start, length, i, past))
        start += length
    keys = start + sum(pasts)
    shapes = [(start, 8, 64), (keys, 2, 64), (keys, 2, 64)]
    exact = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    prefix = (torch.randn(5, 2, 64, dtype=torch.float64), torch.randn(5, 2, 64, dtype=torch.float64))
    given = {"a": prefix} if prefixed else None
    query, key, value = exact
    wanted = segment_attention(query, key, value, segments, scale=0.125, window=window, prefix=given)
    seed = torch.randn_like(wanted)
    wanted.backward(seed)
    rough = [t.detach().to("cuda", dtype).requires_grad_(True) for t in exact]
    keys_on_gpu, values_on_gpu = (t.to("cuda", dtype) for t in prefix)
    on_gpu = {"a": (keys_on_gpu, values_on_gpu)} if prefixed else None
    query, key, value = rough
    found = segment_attention(query, key, value, segments, scale=0.125, window=window, prefix=on_gpu)
    found.backward(seed.to("cuda", dtype))
    pairs = [(found, wanted), *((r.grad, e.grad) for r, e in zip(rough, exact, strict=True))]
    for ours, theirs in pairs:
        assert ours is not None and theirs is not None
        assert float((ours.double().cpu() - theirs).norm() / theirs.norm()) < tolerance


@pytest.mark.parametrize("chunk", [None, 8])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_training_in_bf16_follows_fp32_on_the_cpu(family: str, chunk: int | None, tmp_path: Path) -> None:
    path = tiny_models.make(tmp_path, family)
    targets = ["c_attn"] if family == "gpt2" else ["q_proj", "v_proj"]
    training = {"per_device_train_batch_size": 4, "learning_rate": 1e-3, "max_steps": 10, "seed": 1}
    cases = [
        Case(
            f"rank-{rank}",
            {"peft_type": "LORA", "r": rank, "target_modules": targets},
            training,
            random_records(8, 90, 4, 24, seed=rank),
        )
        for rank in (4, 8)
    ]
    curves = {}
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        parallel = runtime.initialize(device=device)
        backbone = Backbone.load(path, parallel, dtype)
        planning = Planning("spatial", 1, chunk=chunk if device == "cuda" else None)
        curves[device] = train(backbone, parallel, cases, 10, planning=planning)
        runtime.shutdown()
    for case in cases:
        assert curves["cuda"].losses(case.name) == pytest.approx(curves["cpu"].losses(case.name), rel=3e-2)


def test_offloaded_weights_train_as_resident_ones_in_less_memory(tmp_path: Path) -> None:
    """In fp32: attention's gradients add up in an order that varies, which bf16 turns into thousandths of a loss."""
    parallel = runtime.initialize(device="cuda")
    path = tiny_models.make(tmp_path, "llama", hidden_size=1024, intermediate_size=4096, num_hidden_layers=16)
    section = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj", "v_proj"]}
    training = {"per_device_train_batch_size": 4, "learning_rate": 1e-3, "max_steps": 3, "seed": 1}
    case = Case("task", section, training, random_records(8, 90, 4, 24, seed=1))
    losses, most = {}, {}
    for kind in ("resident", "offloaded"):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        backbone = Backbone.load(path, parallel, torch.float32, residence=kind)
        losses[kind] = train(backbone, parallel, [case], 3).losses("task")
        most[kind] = torch.cuda.max_memory_allocated() - before
        del backbone
    runtime.shutdown()
    assert losses["offloaded"][0] == losses["resident"][0], "one forward pass of the same numbers"
    assert losses["offloaded"] == pytest.approx(losses["resident"], rel=1e-5)
    assert most["offloaded"] < 0.5 * most["resident"]


def test_a_profile_can_be_measured(tmp_path: Path) -> None:
    parallel = runtime.initialize(device="cuda")
    backbone = Backbone.load(tiny_models.make(tmp_path, "llama"), parallel, torch.bfloat16)
    about = about_run(backbone.shape, "cuda", torch.bfloat16, 1)
    profile = measure(backbone, about, most_tokens=256, rounds=2)
    runtime.shutdown()
    for name, curve in profile.curves.items():
        assert min(*curve.forward, *curve.backward) >= 0, name
        if name.startswith("utilisation"):
            assert max(*curve.forward, *curve.backward) <= 1, name
