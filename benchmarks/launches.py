"""What a step launches on a GPU, and where the host waits for it: counted on a fake GPU, without one.

    python benchmarks/launches.py [--kind lora|ia3|bottleneck|prefix]... [--tasks N]... [--targets qv|all-linear]...
        [--dropout P] [--experts N]... [--json]

The model has Llama-3-8B's shape with two layers, in bf16; tasks of ranks 8 to 64 with two sequences each train in two
micro-batches. They are LoRA tasks; or of other kinds, one after the other, with the modules that these target by
default. Launches are those of a BaseOp with adapters: forward with the frozen product; backward with it for LoRA,
without it for kinds that act on rows, which have a backward pass of their own. Then those of the end of a bucket's
step, the copy of learning rates and other options included; and of everything else in a steady step. The first step
after tasks came or went brings tables to the device besides. By default a table of 1, 8 and 64 tasks and, for LoRA,
both targets.

With `--experts` the model has Qwen3-30B-A3B's shape with two layers and so many experts, and tasks are LoRAs on q and
on all experts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from script import table

from megatron_mux.dry_run.run_spec import RunSpec, TaskRecords
from megatron_mux.fusion.plan import plan_for
from megatron_mux.kernels.dequantise import interface as dequantise
from megatron_mux.quantised.scheme import METHODS, QuantMethod
from megatron_mux.tasks import TaskSpec

if TYPE_CHECKING:
    from benchmarks.step_launches import StepLaunches

ROOT = str(Path(__file__).resolve().parents[1])
sys.path.insert(0, ROOT)  # run by file path, from a checkout; so does the process that counts
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))

CONFIG: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 2,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 2,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "vocab_size": 151936, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096, "rope_theta": 1e6, "tie_word_embeddings": False,
}  # fmt: skip
ON_EXPERTS = {
    "target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}  # fmt: skip
TARGETS = {"qv": ["q_proj", "v_proj"], "all-linear": "all-linear"}
RANKS = (8, 16, 32, 64)
KINDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "ia3": lambda rank: {"peft_type": "IA3"},
    "bottleneck": lambda rank: {"peft_type": "BOTTLENECK", "bottleneck_size": rank},
    "prefix": lambda rank: {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": rank},
}
"""Sections of kinds other than LoRA."""


def section(kind: str, rank: int, targets: str, dropout: float) -> dict[str, Any]:
    """The adapter of a task; targets and dropout are LoRA's."""
    if kind != "lora":
        return KINDS[kind](rank)
    return {"peft_type": "LORA", "r": rank, "lora_dropout": dropout, "target_modules": TARGETS[targets]}


def counted(
    tasks: int,
    targets: str,
    dropout: float,
    kinds: Sequence[str] = ("lora",),
    quantise: QuantMethod | None = None,
    experts: int | None = None,
) -> tuple[StepLaunches, StepLaunches]:
    """The launches of the first step after all tasks have joined, and of a steady step."""
    specs, config = [], CONFIG if experts is None else {**EXPERTS, "num_experts": experts}
    for i in range(tasks):
        adapter = section(kinds[i % len(kinds)], RANKS[i % 4], targets, dropout)
        if experts is not None:
            adapter = {"peft_type": "LORA", "r": RANKS[i % 4], **ON_EXPERTS}
        training = {"per_device_train_batch_size": 2, "max_steps": 3}
        spec = {"name": f"task-{i}", "adapter": adapter, "data": {"path": "records"}, "training": training}
        specs.append(TaskSpec.model_validate(spec))
    records = [TaskRecords(spec.plain(), [16 + i] * 6, [8] * 6) for i, spec in enumerate(specs)]
    plan = plan_for("spatial", {spec.name: 2 for spec in specs}, 1)
    from benchmarks.step_launches import count_launches

    first, steady = count_launches(RunSpec(config, records, plan, steps=2, quantise=quantise))
    return first, steady


def figures(
    tasks: int, targets: str, dropout: float, kinds: Sequence[str], quantise: QuantMethod | None = None
) -> dict[str, Any]:
    """The figures of one case."""
    first, found = counted(tasks, targets, dropout, kinds, quantise)
    plain = counted(tasks, targets, 0.0, kinds, quantise)[1] if dropout else found
    dequantising = sum(found.others[name] for name in dequantise.LAUNCHES)
    return {
        "tasks": tasks,
        "kinds": ", ".join(kinds),
        "targets": targets,
        "dropout": dropout,
        "forward_per_base_op": found.forward,
        "backward_per_base_op": found.backward,
        "update_per_bucket": found.norm + found.update + found.options,
        "dequantising": dequantising,
        "other_launches": found.others.total() - dequantising + found.tables,
        "waits": dict(found.waits),
        "copies_of_tables_after_a_join": first.tables,
        "waits_after_a_join": dict(first.waits),
        "bytes_kept_for_dropout": found.kept - plain.kept,
    }


def figures_of_experts(tasks: int, experts: int) -> dict[str, Any]:
    """The figures of a case with experts."""
    first, found = counted(tasks, "qv", 0.0, experts=experts)
    return {
        "experts": experts,
        "tasks": tasks,
        "forward_per_layer": found.experts,
        "backward_per_base_op": found.experts_backward,
        "other_launches": found.others.total() + found.tables,
        "waits": dict(found.waits),
        "copies_of_tables_after_a_join": first.tables,
        "waits_after_a_join": dict(first.waits),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Count and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=("lora", *KINDS), action="append", help="may be repeated")
    parser.add_argument("--tasks", type=int, action="append", help="number of tasks; may be repeated")
    parser.add_argument("--targets", choices=TARGETS, action="append", help="may be repeated")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--quantise", choices=METHODS, help="hold the weights of linear modules so")
    parser.add_argument(
        "--experts", type=int, action="append", help="of a model that has some; may be repeated"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    if args.experts:
        found = [figures_of_experts(tasks, own) for own in args.experts for tasks in args.tasks or (1, 8, 64)]
        return show(found, args.json)
    kinds = args.kind or ["lora"]
    targets = args.targets or TARGETS if "lora" in kinds else ("default",)
    cases = [(t, n) for t in targets for n in args.tasks or (1, 8, 64)]
    found = [figures(tasks, targets, args.dropout, kinds, args.quantise) for targets, tasks in cases]
    return show(found, args.json)


def show(found: Sequence[dict[str, Any]], as_json: bool) -> int:
    """Print figures."""
    lines = table(" | ".join(found[0]), [list(one.values()) for one in found])
    print(json.dumps(found) if as_json else "\n".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
