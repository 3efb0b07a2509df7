"""What a step launches on a GPU, and where the host waits for it: counted on a fake GPU, without one.

    python benchmarks/launches.py [--kind lora|ia3|bottleneck|prefix]... [--tasks N]... [--targets qv|all-linear]...
        [--dropout P] [--quantise nf4|int8|fp8] [--json]

The model has Llama-3-8B's shape with two layers, in bf16; tasks of ranks 8 to 64 with two sequences each train in two
micro-batches. They are LoRA tasks; or of other kinds, one after the other, with the modules that these target by
default. Launches are those of a BaseOp with adapters: forward with the frozen product; backward with it for LoRA,
without it for kinds that act on rows, which have a backward pass of their own. Then those of the end of a bucket's
step, the copy of learning rates and other options included; of dequantising in a steady step; and of everything else
in it. The first step after tasks came or went brings tables to the device besides. By default a table of 1, 8 and 64
tasks and, for LoRA, both targets.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

from script import table

from megatron_mux.dry_run.launches import StepLaunches, count_launches
from megatron_mux.dry_run.run_spec import RunSpec, TaskRecords
from megatron_mux.fusion.plan import plan_for
from megatron_mux.kernels import dequantise
from megatron_mux.quantised.scheme import METHODS, Method
from megatron_mux.tasks import TaskSpec

CONFIG: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 2,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "rope_theta": 500000.0,
    "tie_word_embeddings": False,
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
    quantise: Method | None = None,
) -> tuple[StepLaunches, StepLaunches]:
    """The launches of the first step after all tasks have joined, and of a steady step."""
    specs = []
    for i in range(tasks):
        adapter = section(kinds[i % len(kinds)], RANKS[i % 4], targets, dropout)
        training = {"per_device_train_batch_size": 2, "max_steps": 3}
        spec = {"name": f"task-{i}", "adapter": adapter, "data": {"path": "records"}, "training": training}
        specs.append(TaskSpec.model_validate(spec))
    records = [TaskRecords(spec.plain(), [16 + i] * 6, [8] * 6) for i, spec in enumerate(specs)]
    plan = plan_for("spatial", {spec.name: 2 for spec in specs}, 1)
    first, steady = count_launches(RunSpec(CONFIG, records, plan, steps=2, quantise=quantise))
    return first, steady


def figures(
    tasks: int, targets: str, dropout: float, kinds: Sequence[str], quantise: Method | None = None
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
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    kinds = args.kind or ["lora"]
    targets = args.targets or TARGETS if "lora" in kinds else ("default",)
    cases = [(t, n) for t in targets for n in args.tasks or (1, 8, 64)]
    found = [figures(tasks, targets, args.dropout, kinds, args.quantise) for targets, tasks in cases]
    if args.json:
        print(json.dumps(found))
        return 0
    print("\n".join(table(" | ".join(found[0]), [list(one.values()) for one in found])))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
