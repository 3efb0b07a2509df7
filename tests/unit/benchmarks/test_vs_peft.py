"""PEFT's sides of `vs_peft.py`: packed sequences never see each other, and operators have the right kinds."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.kernels.test_triton_launched import kernels

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def pairs() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(3, 500, (length,), generator=generator) for length in (1, 7, 4)]
    return [(ids, torch.ones(len(ids), dtype=torch.bool)) for ids in tokens]


def test_a_packed_batch_has_positions_that_restart_and_no_label_across_sequences() -> None:
    import peft_side

    batch = peft_side.flatten(pairs())
    assert set(batch) == {"input_ids", "position_ids", "rows", "targets"}
    assert batch["position_ids"].tolist() == [[0, *range(7), *range(4)]]
    assert batch["rows"].tolist() == [*range(1, 7), 8, 9, 10]
    assert batch["targets"].equal(batch["input_ids"][0, batch["rows"] + 1])


def test_padded_rows_predict_the_same_tokens() -> None:
    import peft_side

    batch = peft_side.pad(pairs())
    assert batch["targets"].equal(peft_side.flatten(pairs())["targets"])
    assert batch["targets"].equal(batch["input_ids"].flatten()[batch["rows"] + 1])
    assert batch["attention_mask"].sum(dim=1).tolist() == [1, 7, 4]


@pytest.mark.parametrize("rival", ["padded", "packed"])
def test_heads_have_the_loss_and_gradients_of_transformers(rival: str) -> None:
    import peft_side
    import random_model

    device = torch.device("cpu")
    model = random_model.make("tiny", 1, torch.float32, device)
    tasks = [
        peft_side.PeftTask(peft_side.share_weights(model), 4, ["q_proj"], 1e-3, 1, rival=rival, head=head)
        for head in peft_side.heads_of(device)
    ]
    for task in tasks[1:]:
        peft_side.set_peft_model_state_dict(task.model, tasks[0].tensors())
    tokens, _ = pairs()[1]
    labels = torch.where(torch.arange(len(tokens)) < 3, -100, tokens).unsqueeze(0)
    labelled = [(tokens, labels[0] >= 0)]
    with torch.no_grad():
        wanted = float(tasks[0].model(input_ids=tokens.unsqueeze(0), labels=labels).loss)
    assert [float(task.step(labelled)) for task in tasks] == pytest.approx([wanted] * len(tasks), rel=1e-5)
    first, *others = [task.tensors() for task in tasks]
    for other in others:
        assert all(torch.allclose(other[name], value, atol=1e-6) for name, value in first.items())


def test_packed_logits_are_those_of_each_sequence_alone(tmp_path: Path) -> None:
    import peft_side
    from workload import write_random_backbone

    write_random_backbone("tiny", tmp_path, torch.float32)
    model = peft_side.load(tmp_path, torch.float32, torch.device("cpu"), "packed")
    batch = peft_side.flatten(pairs())
    batch = {name: batch[name] for name in ("input_ids", "position_ids")}
    with torch.no_grad():
        together = model(**batch).logits[0]
        alone = torch.cat([model(input_ids=ids.unsqueeze(0)).logits[0] for ids, _ in pairs()])
    assert torch.allclose(together, alone, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::mm", "matrix products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("aten::copy_", "copies"),
        ("aten::mul", "element-wise"),
        ("aten::tanh", "element-wise"),
        ("aten::t", "views, allocation, autograd"),
        ("autograd::engine::evaluate_function: MmBackward0", "views, allocation, autograd"),
        ("aten::_softmax", "loss"),
        ("aten::sum", "reductions"),
        ("aten::_fused_rms_norm", "norms"),
        ("aten::_fused_adamw_", "optimizer"),
    ],
)
def test_kinds_of_operators(name: str, kind: str) -> None:
    from operator_profile import kind_of

    assert kind_of(name) == kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT", "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu>(...)", "matrix products"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "attention"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>",
            "element-wise",
        ),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>", "copies"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, sum_functor>>", "reductions"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("void kDequantizeBlockwise<...>", "dequantise"),
        ("_rms_norm_forward_kernel", "norms"),
        ("_swiglu_forward_kernel", "element-wise"),
        ("liger_cross_entropy_kernel", "loss"),
    ],
)
def test_kinds_of_kernels(name: str, kind: str) -> None:
    from operator_profile import kind_of

    assert kind_of(name, on_device=True) == kind


def test_kinds_of_our_kernels() -> None:
    from operator_profile import kind_of

    of_kind = {
        "adapters": (
            "reduce_kernel up_kernel input_gradient_kernel weight_gradient_kernel add_parts_kernel "
            "activation_kernel scale_kernel factor_gradient_kernel expand_kernel outer_kernel"
        ),
        "matrix products": "product_kernel",
        "optimizer": "_update _tile_squares _row_sums",
        "norms": "_join _join_backward",
        "loss": "statistics_kernel gradient_kernel",
        "dequantise": "nf4_kernel eight_bit_kernel",
        "element-wise": "_activate _activate_backward _turn _turn_backward",
    }
    sources = {kernel.__name__: inspect.getsource(kernel.fn) for kernel in kernels()}
    # What no other function of Triton's calls is launched.
    launched = {
        name
        for name in sources
        if not any(re.search(rf"\b{name}\(", source) for other, source in sources.items() if other != name)
    }
    wanted = {name: kind for kind, names in of_kind.items() for name in names.split()}
    assert {name: kind_of(name, on_device=True) for name in launched} == wanted


def test_kernels_that_overlap_count_once() -> None:
    from operator_profile import Kernel, busy_seconds, by_name, kernels_by_kind

    spans = [(0, 4), (1, 2), (3, 4), (10, 5)]  # of 0 to 7, and of 10 to 15
    kernels = [Kernel("up_kernel" if i else "_update", start, n) for i, (start, n) in enumerate(spans)]
    assert busy_seconds(kernels) == pytest.approx(12e-9)
    assert kernels_by_kind(kernels)["adapters"] == {"seconds": pytest.approx(11e-9), "calls": 3}
    assert [one["name"] for one in by_name(kernels)] == ["up_kernel", "_update"]


def test_gaps_are_summed_by_size_and_named_by_their_neighbours() -> None:
    from operator_profile import Kernel, gaps

    us = 1000
    kernels = [
        Kernel("a", 0, 100 * us),
        Kernel("b", 20 * us, 10 * us),  # within a
        Kernel("c", 105 * us, 10 * us),
        Kernel("a", 205 * us, 10 * us),
        Kernel("c", 305 * us, 10 * us),
        Kernel("a", 2315 * us, 10 * us),
    ]
    found = gaps(kernels, steps=2)
    classes = {name: (own["us"], own["gaps"]) for name, own in found["classes"].items()}
    assert classes == {"to 10 us": (2.5, 0.5), "to 50 us": (0, 0), "to 1 ms": (90, 1), "more": (1000, 0.5)}
    assert found["largest"] == [
        {"before": "c", "after": "a", "us": 1045, "gaps": 1},
        {"before": "a", "after": "c", "us": 45, "gaps": 0.5},
    ]


def test_sequences_of_all_tasks_are_padded_to_the_longest_of_their_step() -> None:
    from workload import padded_to_longest

    one, two = [pairs()[:1], pairs()[1:2]], [pairs()[1:], pairs()[2:]]
    padded = padded_to_longest([one, two])
    assert [[[len(ids) for ids, _ in step] for step in task] for task in padded] == [
        [[7], [7]],
        [[7, 7], [7]],
    ]
    ids, labelled = padded[1][0][1]
    assert ids[:4].equal(two[0][1][0]) and not ids[4:].any()
    assert labelled.tolist() == [True] * 4 + [False] * 3


def test_the_mix_for_a_gpu_has_every_rank_and_length_and_peft_trains_the_same() -> None:
    import mux_side
    from workload import mix_of, mix_to_json

    for sequences in (2, 8, 32):
        mix = mix_of("llama3-8b", "cuda", sequences)
        assert len(mix) == 8 and {task.batch for task in mix} == {sequences}
        assert {task.rank for task in mix} == {8, 16, 32, 64}
        assert {task.max_length for task in mix} == {64, 128, 256}
        adapters = [mux_side.spec(task, ["q_proj"], 1, 0).adapter.model_dump() for task in mix]
        assert [own["r"] for own in adapters] == [own["rank"] for own in mix_to_json(mix)]
    assert {task.rank for task in mix_of(None, "cpu")} == {8}, "the published mix"


def test_many_tasks_are_compared_with_as_many_processes() -> None:
    from vs_peft_tables import replicas

    memory = {
        "mux:mix": {"peak": 9 << 20},
        "mux:32": {"peak": 110 << 20, "before_loading": 10 << 20},
        "packed:0": {"peak": 10 << 20, "tasks_of_this_kind": 6},
        "packed:6": {"peak": 30 << 20, "tasks_of_this_kind": 2},
    }
    _, text = replicas(memory)
    assert "peak at 100 MiB" in text and "32 x 15 MiB: **1/4.8 of the memory**" in text
    assert not replicas({name: memory[name] for name in ("mux:mix", "packed:0")})


@pytest.mark.parametrize(
    ("module", "place", "words"),
    [
        ("vs_peft", "vs_peft", ["--backbone-shape", "tiny"]),
        ("policies", "policies", []),
        ("megatron_mux.cli.profile", "megatron_mux.cli.launch", ["--backbone", "model"]),
    ],
)
def test_what_measures_on_gpus_sets_the_allocator_first(
    module: str, place: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a run does, and before torch is imported."""
    script = importlib.import_module(module)

    def stop() -> None:
        raise InterruptedError

    monkeypatch.setattr(importlib.import_module(place), "set_allocator_options", stop)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InterruptedError):
        script.main(words)
