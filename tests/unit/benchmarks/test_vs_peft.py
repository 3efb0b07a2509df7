"""PEFT's sides of `vs_peft.py`: packed sequences never see each other, and operators have the right kinds."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

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

    batch = peft_side.flatten(pairs(), torch.device("cpu"))
    assert set(batch) == {"input_ids", "position_ids", "labels"}
    assert batch["position_ids"].tolist() == [[0, *range(7), *range(4)]]
    assert (batch["labels"][0] == -100).nonzero().flatten().tolist() == [0, 1, 8]


def test_packed_logits_are_those_of_each_sequence_alone(tmp_path: Path) -> None:
    import peft_side
    from workload import write_random_backbone

    write_random_backbone("tiny", tmp_path, torch.float32)
    model = peft_side.load(tmp_path, torch.float32, torch.device("cpu"), "packed")
    batch = peft_side.flatten(pairs(), torch.device("cpu"))
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
        ("aten::_softmax", "reductions and norms"),
        ("aten::_fused_adamw_", "optimizer"),
    ],
)
def test_kinds_of_operators(name: str, kind: str) -> None:
    from operator_profile import kind_of

    assert kind_of(name) == kind


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
    ("module", "words"),
    [
        ("vs_peft", ["--backbone-shape", "tiny"]),
        ("policies", []),
        ("tools.profile_backbone", ["--backbone", "model"]),
    ],
)
def test_what_measures_on_gpus_sets_the_allocator_first(
    module: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a run does, and before torch is imported."""
    script = importlib.import_module(module)

    def stop() -> None:
        raise InterruptedError

    monkeypatch.setattr(script, "set_allocator_options", stop)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InterruptedError):
        script.main(words)
