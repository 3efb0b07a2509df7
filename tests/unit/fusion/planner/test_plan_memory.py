"""Equation 5: what is always there, what micro-batches keep and take; against dry runs of the engine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest

from megatron_mux.backbone.registry import info_without_weights
from megatron_mux.backbone.weight_offload import Kind
from megatron_mux.dry_run.process import dry_runs, kept_worker
from megatron_mux.dry_run.run_spec import Dtype, RunSpec, TaskRecords
from megatron_mux.estimate.run_tables import RunTables
from megatron_mux.fusion.mesh import Mesh
from megatron_mux.fusion.planner import step_memory
from megatron_mux.fusion.planner.load import TaskLoad
from megatron_mux.fusion.planner.planner import Planner
from megatron_mux.fusion.planner.planning_context import PlanningContext
from megatron_mux.fusion.profiler.roofline import roofline
from megatron_mux.memory.forms.method import Recompute
from tests.end_to_end.harness import Case, random_records
from tests.unit.dry_run.recordings import last_step_peak

BELOW, ABOVE = 0.01, 0.11
"""How far a prediction may lie below and above what a dry run counts: these are +0.6% to +9.5%. A plan counts all
gradients from the first pass on, and neighbours' messages as if a step had many micro-batches."""
CONFIG: Mapping[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ADAPTERS: Mapping[str, dict[str, object]] = {
    "lora": {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj", "v_proj"]},
    "dropped": {"peft_type": "LORA", "r": 8, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj"]},
    "all": {"peft_type": "LORA", "r": 4, "target_modules": "all-linear"},
    "bottle": {"peft_type": "BOTTLENECK", "bottleneck_size": 6, "target_modules": ["o_proj", "down_proj"]},
    "scales": {
        "peft_type": "IA3",
        "target_modules": ["k_proj", "v_proj", "down_proj"],
        "feedforward_modules": ["down_proj"],
    },
    "prefix": {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 5},
    "pruned": {"peft_type": "DIFF_PRUNING", "sparsity": 0.9, "target_modules": ["q_proj", "v_proj"]},
}


class Run(NamedTuple):
    """What a dry run executes."""

    tasks: tuple[str, ...]
    dtype: Dtype = "bfloat16"
    mesh: Mesh = Mesh()
    recompute: Recompute = "none"
    residence: Kind = "resident"
    sequence_parallel: bool = False
    device: Literal["cpu", "cuda"] = "cuda"


RUNS = (
    Run(("dropped",), "float64", device="cpu"),
    Run(("prefix", "scales", "bottle"), residence="offloaded"),
    Run(("lora", "bottle"), mesh=Mesh(tensor=2), sequence_parallel=True),
    Run(("lora", "all"), mesh=Mesh(pipeline=2)),
)


def _cases(run: Run) -> Iterator[Case]:
    for i, name in enumerate(run.tasks):
        training: dict[str, object] = {
            "per_device_train_batch_size": 8,
            "learning_rate": 1e-2,
            "max_steps": 4,
        }
        training["optim"] = "sgd" if i else "adamw_torch"
        # Sequences of one length: micro-batches are alike, as predictions have it.
        yield Case(name, ADAPTERS[name], training, random_records(8, 512, 100, 100, seed=i))


def _dry_run(run: Run, info: Any) -> tuple[RunSpec, tuple[float, ...]]:
    """What a dry run executes, and what is predicted of it."""
    cases = list(_cases(run))
    itemsize = {"bfloat16": 2, "float64": 8}[run.dtype]
    about = {"device": "made-up" if run.device == "cpu" else "H100", "kind": run.device, "threads": 1}
    profile = roofline(info.shape, about, itemsize, run.mesh.tensor)
    context = PlanningContext(
        profile,
        info,
        run.mesh,
        itemsize,
        run.recompute,
        residence=run.residence,
        sequence_parallel=run.sequence_parallel,
        micro_batches=4 if run.mesh.pipeline > 1 else None,
        chunk=None,
    )
    context = replace(context, tables=RunTables(context, None, lambda text: None))
    loads = {
        c.name: TaskLoad.of(c.spec, c.records.lengths, c.records.label_counts, info.shape) for c in cases
    }
    plan = Planner(context).fixed("spatial", loads)
    casts = [
        TaskRecords(c.spec.plain(), c.records.lengths.tolist(), c.records.label_counts.tolist())
        for c in cases
    ]
    setting = RunSpec(
        CONFIG,
        casts,
        plan,
        run.mesh.tensor,
        run.sequence_parallel,
        run.dtype,
        run.recompute,
        run.residence,
        run.device,
    )
    overhead = context.with_tasks(loads).step_memory().overhead  # which a dry run does not count
    return setting, tuple(bytes_ - overhead for bytes_ in plan.memory_bytes)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: "-".join([*run.tasks, run.dtype]))
def test_a_plan_takes_what_is_predicted(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_memory, "FRAGMENTATION", {"none": 0.0})  # dry runs count tensors only
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    setting, predicted = _dry_run(run, info_without_weights(tmp_path))
    # The first tensor and data rank of every stage.
    ranks = [stage * run.mesh.tensor * run.mesh.data for stage in range(run.mesh.pipeline)]
    found = dry_runs([(setting, rank) for rank in ranks], worker=kept_worker())
    off = [bytes_ / last_step_peak(one) - 1 for bytes_, one in zip(predicted, found, strict=True)]
    print(off)
    assert all(-BELOW <= one <= ABOVE for one in off), off
