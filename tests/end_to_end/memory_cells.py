"""Families, adapter kinds and divisions, each with its memory by closed forms and in a dry run."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_mux.adapters.registry import KINDS
from megatron_mux.backbone.registry import DENSE, WITH_EXPERTS, read_shape
from megatron_mux.dry_run.process import dry_runs
from megatron_mux.dry_run.run_spec import Dtype, RunSpec, TaskRecords
from megatron_mux.errors import UserError
from megatron_mux.fusion.plan import plan_for
from megatron_mux.memory.forms.architecture import architecture_of
from megatron_mux.memory.forms.method import Method
from megatron_mux.memory.forms.recipe import Recipe
from megatron_mux.memory.forms.step_memory import EngineStepMemory
from megatron_mux.memory.forms.task_adapters import TaskAdapters
from megatron_mux.shape import BackboneShape
from megatron_mux.tasks import TaskSpec
from tests.unit.memory.architectures import at_stage
from tests.unit.memory.stream.peak import peak_of

_LLAMA: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 2048,
}  # fmt: skip
_DEEPSEEK: dict[str, Any] = {
    **_LLAMA, "vocab_size": 512, "num_key_value_heads": 8, "n_routed_experts": 16, "num_experts_per_tok": 4,
    "n_shared_experts": 1, "moe_intermediate_size": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32, "v_head_dim": 64,
}  # fmt: skip
CONFIGS: Mapping[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 4096, "n_positions": 2048, "n_embd": 512, "n_layer": 4, "n_head": 8},
    "gpt_neo": {
        "vocab_size": 4096, "hidden_size": 512, "num_layers": 4, "num_heads": 8, "max_position_embeddings": 2048,
        "attention_types": [[["global", "local"], 2]], "window_size": 64,
    },
    "opt": {
        "vocab_size": 4096, "hidden_size": 512, "word_embed_proj_dim": 512, "ffn_dim": 2048, "num_hidden_layers": 4,
        "num_attention_heads": 8, "max_position_embeddings": 2048,
    },
    "qwen3": {**_LLAMA, "head_dim": 64},
    "gemma3_text": {**_LLAMA, "head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 64},
    "phi3": {**_LLAMA, "pad_token_id": 0},
    "mixtral": {
        **_LLAMA, "vocab_size": 512, "intermediate_size": 704, "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "qwen3_moe": {
        **_LLAMA, "vocab_size": 512, "head_dim": 64, "num_experts": 16, "num_experts_per_tok": 4,
        "moe_intermediate_size": 256, "norm_topk_prob": True,
    },
    "deepseek_v2": {
        **_DEEPSEEK, "q_lora_rank": None, "first_k_dense_replace": 0, "topk_method": "greedy",
    },
    "deepseek_v3": {
        **_DEEPSEEK, "q_lora_rank": 192, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
        "routed_scaling_factor": 2.5,
    },
}  # fmt: skip
"""Configs of families that are not as Llama is."""
ON_EXPERTS = "LORA on experts"
ADAPTERS: Mapping[str, dict[str, Any]] = {
    "LORA": {"r": 8, "target_modules": "all-linear"},
    "LORA with dropout": {"r": 8, "lora_dropout": 0.1, "target_modules": "all-linear"},
    "BOTTLENECK": {"bottleneck_size": 32},
    "PREFIX_TUNING": {"num_virtual_tokens": 16},
    "DIFF_PRUNING": {"sparsity": 0.9, "target_modules": "all-linear"},
    ON_EXPERTS: {
        "r": 8,
        "target_modules": ["q_proj", "v_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
}
"""Fields of sections that do not have defaults for all, and of those whose defaults adapt little."""
KIND_NAMES = (*KINDS, "LORA with dropout")
METHODS = {
    "1x1": Method(parts=2),
    "TP2": Method(tensor=2, parts=2),
    "PP2": Method(pipeline=2, parts=8),
}
EXPERT_METHODS = {
    "1x1": Method(parts=2),
    "all computed again": Method(parts=2, recompute="full"),
    "PP2": Method(pipeline=2, parts=8),
    "TP2": Method(tensor=2, sequence_parallel=True, parts=2),
    "EP2": Method(data=2, expert=2, parts=2),
    "EP4": Method(data=4, expert=4, parts=2),
    "EP2+PP2": Method(data=2, expert=2, pipeline=2, parts=8),
}
"""Divisions of backbones with experts."""
LENGTH, SEQUENCES = 128, 16
"""Tokens of a sequence; sequences of a micro-batch, a quarter of them in a pipeline."""
_SIZES: Mapping[Dtype, int] = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Cell:
    """A task on a backbone, divided.

    Attributes:
        family: Of the backbone.
        kind: Of the adapter, a name of `KIND_NAMES`.
        division: A name of `METHODS`.
        dtype: Of the backbone.
        layers: Of the backbone.
    """

    family: str
    kind: str
    division: str
    dtype: Dtype = "bfloat16"
    layers: int = 4

    @property
    def method(self) -> Method:
        """The division."""
        return (EXPERT_METHODS if self.has_experts else METHODS)[self.division]

    @property
    def has_experts(self) -> bool:
        """Whether the backbone has experts."""
        return self.family in WITH_EXPERTS

    @property
    def config(self) -> dict[str, Any]:
        """The backbone's config.json."""
        config = {
            "model_type": self.family,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **CONFIGS.get(self.family, _LLAMA),
        }
        depth: dict[str, Any] = dict.fromkeys(
            {"num_hidden_layers", "n_layer", "num_layers"} & config.keys(), self.layers
        )
        if "attention_types" in config:
            depth["attention_types"] = [[["global", "local"], self.layers // 2]]
        return {**config, **depth}

    @property
    def task(self) -> TaskSpec:
        """The task."""
        section = {"peft_type": self.kind.split()[0], **ADAPTERS.get(self.kind, {})}
        sequences = self.sequences * self.method.micro_batches * self.method.data
        return TaskSpec.model_validate(
            {
                "name": "task",
                "adapter": section,
                "data": {"path": "none", "max_length": LENGTH},
                "training": {"per_device_train_batch_size": sequences, "max_steps": 8},
            }
        )

    @cached_property
    def shape(self) -> BackboneShape:
        """The backbone's shape."""
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "config.json").write_text(json.dumps(self.config))
            return read_shape(Path(directory))

    @property
    def exists(self) -> bool:
        """Whether the kind can be had on the backbone."""
        try:
            return bool(self.task.adapter.modules(self.shape))
        except UserError:
            return False

    @property
    def sequences(self) -> int:
        """Of a micro-batch."""
        return SEQUENCES // (4 if self.method.pipeline > 1 else 1)

    def memory(self) -> EngineStepMemory:
        """Its memory by closed forms."""
        shape = self.shape
        recipe = Recipe(
            LENGTH,
            "bf16" if _SIZES[self.dtype] == 2 else "fp32",
            adapters=(TaskAdapters.of(self.task, shape),),
        )
        return EngineStepMemory(architecture_of(shape), recipe, self.method, bare=True)

    def forms(self) -> list[int]:
        """Bytes of each stage's tensors at its peak, by closed forms."""
        memory = self.memory()
        rows, stages = self.sequences * LENGTH, range(self.method.pipeline)
        found = [at_stage(memory, stage, rows) for stage in stages]
        return [sum(parts.values()) - parts["fragmentation"] for parts in found]

    def runs(self) -> list[tuple[RunSpec, int]]:
        """The dry run of the first rank of each stage."""
        method, spec = self.method, self.task
        plan = plan_for("spatial", {spec.name: 1}, method.pipeline, method.micro_batches)
        count = 2 * spec.training.per_device_train_batch_size
        records = TaskRecords(spec.plain(), [LENGTH] * count, [LENGTH - 1] * count)
        run = RunSpec(
            self.config,
            [records],
            replace(plan, data=method.data, schedule="1f1b" if method.pipeline > 1 else "planned"),
            method.tensor,
            method.sequence_parallel,
            dtype=self.dtype,
            recompute=method.recompute,
            expert=method.expert,
            expert_tensor=method.tensor if self.has_experts else 1,
        )
        return [(run, stage * method.tensor * method.data) for stage in range(method.pipeline)]


@dataclass(frozen=True)
class Compared:
    """A stage of a cell.

    Attributes:
        cell: The cell.
        stage: Of its pipeline.
        form: Bytes by closed forms.
        dry_run: Bytes in a dry run.
        moment: When that has most.
    """

    cell: Cell
    stage: int
    form: int
    dry_run: int
    moment: str

    @property
    def off(self) -> float:
        """How far the closed forms are above the dry run, as a share of it."""
        return self.form / self.dry_run - 1

    def __str__(self) -> str:
        c = self.cell
        name = f"{c.family}, {c.kind}, {c.division}, stage {self.stage}, {c.dtype}"
        return f"{self.off:+.1%} {name}: {self.form} by closed forms, {self.dry_run} in a dry run ({self.moment})"


def compared(cells: Sequence[Cell]) -> Iterator[Compared]:
    """Every stage of these cells."""
    runs = [cell.runs() for cell in cells]
    made = iter(dry_runs([one for own in runs for one in own], whole=True))
    for cell in cells:
        for stage, form in enumerate(cell.forms()):
            peak = peak_of(next(made).stream)
            yield Compared(cell, stage, form, peak.size, str(peak.moment))


FAMILIES = (*DENSE, *(family for family in WITH_EXPERTS if family in CONFIGS))
"""Of the whole matrix: those whose memory closed forms know."""


def all_cells(
    families: Sequence[str] = FAMILIES,
    kinds: Sequence[str] = (*KIND_NAMES, ON_EXPERTS),
    dtype: Dtype = "bfloat16",
) -> list[Cell]:
    """The whole matrix, or a part of it, without adapters that a family cannot have.

    Of families with experts, LoRA without and with adapters on these.
    """
    every = [
        Cell(family, kind, division, dtype)
        for family in families
        for kind in kinds
        for division in (EXPERT_METHODS if family in WITH_EXPERTS else METHODS)
        if family in DENSE or (kind in ("LORA", ON_EXPERTS) and (kind, division) != (ON_EXPERTS, "TP2"))
    ]
    return [cell for cell in every if cell.exists]
