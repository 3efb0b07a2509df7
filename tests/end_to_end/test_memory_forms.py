"""Closed forms of the engine's peak against dry runs of it: adapters of every kind, and divisions of every kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_mux.backbone.registry import DENSE, read_shape
from megatron_mux.choice.task_file import FileStep
from megatron_mux.dry_run.process import dry_runs
from megatron_mux.dry_run.run_spec import RunSpec, TaskRecords
from megatron_mux.fusion.plan import plan_for
from megatron_mux.memory.forms.architecture import architecture_of
from megatron_mux.memory.forms.method import Method
from megatron_mux.memory.forms.recipe import Recipe
from megatron_mux.memory.forms.step_memory import step_memory
from megatron_mux.memory.forms.task_adapters import TaskAdapters
from megatron_mux.tasks import TaskSpec
from tests.end_to_end.memory_cells import Cell, compared
from tests.end_to_end.memory_configs import KIND_NAMES
from tests.unit.memory.architectures import at_stage
from tests.unit.memory.configs import write
from tests.unit.memory.stream.peak import peak_of

pytestmark = pytest.mark.usefixtures("warm_workers")

CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
ADAPTERS: dict[str, dict[str, Any]] = {
    "bottle": {"peft_type": "BOTTLENECK", "bottleneck_size": 32, "target_modules": ["o_proj", "down_proj"]},
    "compared": {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj", "v_proj"]},
    "copied_head": {"peft_type": "LORA", "target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
    "diff": {"peft_type": "DIFF_PRUNING", "sparsity": 0.9, "target_modules": ["o_proj", "q_proj"]},
    "dropped": {"peft_type": "LORA", "r": 16, "lora_dropout": 0.1, "target_modules": "all-linear"},
    "eight_bits": {"peft_type": "LORA", "r": 32, "target_modules": "all-linear"},
    "factored": {"peft_type": "LORA", "r": 32, "target_modules": "all-linear"},
    "judged": {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj", "v_proj"]},
    "lora": {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj", "v_proj"]},
    "magnitudes": {"peft_type": "LORA", "r": 8, "use_dora": True, "target_modules": ["q_proj", "down_proj"]},
    "principal": {"peft_type": "LORA", "init_lora_weights": "pissa", "target_modules": ["k_proj", "o_proj"]},
    "prefix": {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 16},
    "scales": {
        "peft_type": "IA3",
        "target_modules": ["k_proj", "v_proj", "down_proj"],
        "feedforward_modules": ["down_proj"],
    },
    "signs": {"peft_type": "LORA", "r": 32, "target_modules": "all-linear"},
    "vectors": {"peft_type": "VERA", "r": 64, "target_modules": ["q_proj", "v_proj"]},
    "words": {
        "peft_type": "LORA",
        "target_modules": ["v_proj"],
        "trainable_token_indices": {"embed_tokens": [*range(300)], "lm_head": [*range(100, 1400)]},
    },
}
LOSSES = {"compared": "dpo", "judged": "kto"}
"""Of tasks that are not supervised."""
OPTIMIZERS = {"eight_bits": "adamw_8bit", "factored": "adafactor", "signs": "lion_32bit"}
"""Of tasks that do not have AdamW."""
LAYERS = 2
"""Of a stage."""
THREE = ("bottle", "lora", "scales")
CASES: dict[str, tuple[tuple[str, ...], Method]] = {
    "all kinds": (
        tuple(n for n in ADAPTERS if n not in ("copied_head", "words", *LOSSES, *OPTIMIZERS)),
        Method(),
    ),
    "other optimizers": (tuple(OPTIMIZERS), Method(parts=8)),
    "rows with a reference": (("compared",), Method(pipeline=2, parts=2)),
    "mismatched completions": (("judged",), Method(pipeline=2, parts=2)),
    "a copied output layer": (("copied_head",), Method(tensor=2)),
    "rows of both ends": (("words",), Method(pipeline=2, parts=2)),
    "two tensor ranks": (("diff", "prefix"), Method(tensor=2, parts=2)),
    "fixed matrices": (("vectors",), Method(tensor=2)),
    "sequence parallel": (THREE, Method(tensor=2, sequence_parallel=True)),
    "magnitudes": (("magnitudes", "principal"), Method(tensor=2)),
    "two stages": (("lora", "bottle"), Method(pipeline=2, parts=6)),
    "two stages, all computed again": (("dropped", "scales"), Method(pipeline=2, parts=4, recompute="full")),
    "sharded": (THREE, Method(data=2, zero=3)),
    "offloaded": (("dropped",), Method(offload=True)),
    "computed again": (THREE, Method(recompute="full")),
    "attention computed again": (("lora", "scales"), Method(recompute="selective")),
}
LEAST, MOST = -0.015, 0.04
"""Of the peak: what gradients take within a layer is bounded from above, and only there the form may be higher."""
LENGTH, SEQUENCES = 128, 12


def specs_of(names: Sequence[str], length: int, sequences: int) -> list[TaskSpec]:
    """Tasks with adapters of these names, and with so many sequences of a length in each step."""
    data = {"path": "none", "max_length": length}
    made = []
    for name in names:
        loss = LOSSES.get(name, "sft")
        training = {
            "per_device_train_batch_size": sequences // 2 if loss == "dpo" else sequences,  # pairs
            "max_steps": 8,
            "optim": OPTIMIZERS.get(name, "adamw_torch"),
            "loss": loss,
        }
        made.append({"name": name, "adapter": ADAPTERS[name], "data": data, "training": training})
    return [TaskSpec.model_validate(one) for one in made]


def setting_of(
    names: Sequence[str], method: Method, length: int, sequences: int, config: dict[str, Any]
) -> RunSpec:
    """What a dry run of these tasks under a method executes."""
    specs = specs_of(names, length, sequences)
    plan = plan_for("spatial", {s.name: 1 for s in specs}, method.pipeline, method.micro_batches)
    schedule: Any = "1f1b" if method.pipeline > 1 else "planned"
    where: Any = "sharded" if method.zero == 3 else "offloaded" if method.offload else "resident"
    lengths, labels = [length] * 2 * sequences, [length - 1] * 2 * sequences
    return RunSpec(
        config,
        [TaskRecords(spec.plain(), lengths, labels) for spec in specs],
        replace(plan, data=method.data, schedule=schedule),
        method.tensor,
        method.sequence_parallel,
        recompute=method.recompute,
        residence=where,
    )


def _config(method: Method) -> dict[str, Any]:
    return {**CONFIG, "num_hidden_layers": LAYERS * method.pipeline}


def _forms(specs: list[TaskSpec], method: Method, directory: Path) -> Iterator[int]:
    """Bytes of each stage's tensors at its peak."""
    write(directory, _config(method))
    shape = read_shape(directory)
    adapters = tuple(TaskAdapters.of(spec, shape) for spec in specs)
    step = FileStep(adapters)
    content = step.divided(method.data, method.micro_batches).heaviest[0]
    recipe = step.mix(content, Recipe(LENGTH, adapters=adapters))
    memory = step_memory(architecture_of(shape), recipe, method, bare=True)
    for stage in range(method.pipeline):
        found = at_stage(memory, stage, step.rows(content))
        yield sum(size for part, size in found.items() if part != "fragmentation")


@pytest.mark.timeout(300)
def test_peaks_are_those_of_dry_runs(tmp_path: Path) -> None:
    asked = []
    for names, method in CASES.values():
        setting = setting_of(names, method, LENGTH, SEQUENCES, _config(method))
        # Tensor ranks differ in rows where these are divided: then a task's are on some of them only.
        tensor = range(method.tensor if method.sequence_parallel else 1)
        stages = range(0, method.pipeline * method.tensor, method.tensor)
        asked.append([(setting, stage * method.data + rank) for stage in stages for rank in tensor])
    made = iter(dry_runs([one for own in asked for one in own], whole=True))
    wrong = []
    for (name, (names, method)), own in zip(CASES.items(), asked, strict=True):
        peaks = [peak_of(next(made).stream) for _ in own]
        each = len(peaks) // method.pipeline
        for stage, form in enumerate(_forms(specs_of(names, LENGTH, SEQUENCES), method, tmp_path)):
            peak = max(peaks[stage * each : (stage + 1) * each], key=lambda one: one.size)
            off = form / peak.size - 1
            line = f"{name}, stage {stage}: {form} by forms, {peak.size} in a dry run ({off:+.2%}), {peak.moment}"
            print(line)
            wrong += [line] * (not LEAST <= off <= MOST)
    assert not wrong, "\n".join(wrong)


# A part of the matrix of benchmarks/memory_forms.py: every family, and every kind.
CELLS = (
    *(Cell(family, "LORA", "1x1", layers=2) for family in DENSE),
    *(Cell("gemma3_text", kind, "TP2", layers=2) for kind in KIND_NAMES if kind != "LORA"),
    Cell("mixtral", "LORA", "EP2", layers=2),
    Cell("mixtral", "LORA on experts", "all computed again", layers=2),
    Cell("mixtral", "LORA on experts", "EP3, placed", layers=2),
    Cell("qwen3_moe", "LORA", "TP2+EP2", layers=2),
    Cell("qwen3_moe", "LORA on experts", "1x1", layers=2),
    Cell("deepseek_v2", "LORA on shared experts", "all computed again", layers=2),
    Cell("deepseek_v3", "LORA everywhere", "EP2", layers=2),
)


@pytest.mark.timeout(300)
def test_every_family_and_adapter_kind() -> None:
    wrong = []
    for one in compared(CELLS):
        print(one)
        wrong += [str(one)] * (abs(one.off) > 0.02)
    assert not wrong, "\n".join(wrong)
