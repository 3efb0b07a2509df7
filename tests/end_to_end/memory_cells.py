"""Families, adapter kinds and divisions, each with its memory by closed forms and in a dry run."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_mux.backbone.registry import DENSE, WITH_EXPERTS, read_shape
from megatron_mux.dry_run.process import dry_runs
from megatron_mux.dry_run.run_spec import Dtype, RunSpec, TaskRecords
from megatron_mux.errors import UserError
from megatron_mux.expert_shape import Placement
from megatron_mux.fusion.plan import plan_for
from megatron_mux.memory.assumed_routes import Access
from megatron_mux.memory.forms.architecture import architecture_of
from megatron_mux.memory.forms.method import Method
from megatron_mux.memory.forms.recipe import Recipe
from megatron_mux.memory.forms.step_memory import EngineStepMemory
from megatron_mux.memory.forms.task_adapters import TaskAdapters
from megatron_mux.shape import BackboneShape
from megatron_mux.tasks import TaskSpec
from tests.end_to_end.memory_configs import (
    ADAPTERS,
    CONFIGS,
    EVERYWHERE,
    EXPERT_KINDS,
    EXPERT_METHODS,
    KIND_NAMES,
    LLAMA,
    METHODS,
    ON_EXPERTS,
    SIZES,
)
from tests.unit.memory.architectures import at_stage
from tests.unit.memory.stream.peak import peak_of

LENGTH, SEQUENCES = 128, 16
"""Tokens of a sequence; sequences of a micro-batch, a quarter of them in a pipeline."""
_TOGETHER = 16
"""Cells whose dry runs are made by one process."""
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
        size: A name of `SIZES` of the family; empty: that of `CONFIGS`.
    """

    family: str
    kind: str
    division: str
    dtype: Dtype = "bfloat16"
    layers: int = 4
    size: str = ""

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
            **CONFIGS.get(self.family, LLAMA),
            **(SIZES[self.family][self.size].config if self.size else {}),
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
        whole = SIZES[self.family][self.size].sequences if self.size else SEQUENCES
        return whole // (4 if self.method.pipeline > 1 else 1)

    @cached_property
    def placement(self) -> Placement | None:
        """Rank 0 has half of the experts, the last expert is everywhere; odd layers the other way round."""
        ranks, experts = self.method.expert, self.shape.experts
        if "placed" not in self.division or experts is None:
            return None
        count = experts.count
        of = [(0,) if e < count // 2 else (1 + e % (ranks - 1),) for e in range(count - 1)]
        rows = [(*of, tuple(range(ranks))), (tuple(range(ranks)), *of[::-1])]
        return Placement(ranks, {layer: rows[layer % 2] for layer in experts.layers(self.layers)})

    @cached_property
    def access(self) -> Access | None:
        """The first experts are selected most often."""
        experts = self.shape.experts
        if "placed" not in self.division or experts is None:
            return None
        count, top_k = experts.count, experts.routing.top_k
        weights = [1.5 - e / (count - 1) for e in range(count)]
        row = [min(1.0, top_k * weight / sum(weights)) for weight in weights]
        return dict.fromkeys(experts.layers(self.layers), row)

    def memory(self) -> EngineStepMemory:
        """Its memory by closed forms."""
        shape = self.shape
        recipe = Recipe(
            LENGTH,
            "bf16" if _SIZES[self.dtype] == 2 else "fp32",
            adapters=(TaskAdapters.of(self.task, shape),),
        )
        return EngineStepMemory(
            architecture_of(shape, self.placement, self.access), recipe, self.method, bare=True
        )

    def forms(self) -> list[int]:
        """Bytes of each stage's tensors at its peak, by closed forms."""
        memory = self.memory()
        rows, stages = self.sequences * LENGTH, range(self.method.pipeline)
        found = [at_stage(memory, stage, rows) for stage in stages]
        return [sum(parts.values()) - parts["fragmentation"] for parts in found]

    def runs(self) -> list[tuple[RunSpec, int]]:
        """Dry runs of the first rank of each stage, or where these differ of all expert ranks; stage by stage."""
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
            placement=self.placement,
            access=self.access,
        )
        ranks = range(self.ranks)
        return [
            (run, stage * method.tensor * method.data + rank)
            for stage in range(method.pipeline)
            for rank in ranks
        ]

    @property
    def ranks(self) -> int:
        """Ranks of a stage that differ."""
        return 1 if self.placement is None else self.method.expert


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
        family = f"{c.family} ({c.size})" if c.size else c.family
        name = f"{family}, {c.kind}, {c.division}, stage {self.stage}, {c.dtype}"
        return f"{self.off:+.1%} {name}: {self.form} by closed forms, {self.dry_run} in a dry run ({self.moment})"


def compared(cells: Sequence[Cell]) -> Iterator[Compared]:
    """Every stage of these cells; a few at a time, since dry runs have a time limit."""
    for first in range(0, len(cells), _TOGETHER):
        yield from _compared(cells[first : first + _TOGETHER])


def _compared(cells: Sequence[Cell]) -> Iterator[Compared]:
    runs = [cell.runs() for cell in cells]
    made = iter(dry_runs([one for own in runs for one in own], whole=True))
    for cell in cells:
        for stage, form in enumerate(cell.forms()):
            peak = max((peak_of(next(made).stream) for _ in range(cell.ranks)), key=lambda one: one.size)
            yield Compared(cell, stage, form, peak.size, str(peak.moment))


FAMILIES = (*DENSE, *WITH_EXPERTS)


def all_cells(
    families: Sequence[str] = FAMILIES,
    kinds: Sequence[str] = (*KIND_NAMES, *EXPERT_KINDS[1:]),
    dtype: Dtype = "bfloat16",
) -> list[Cell]:
    """The whole matrix, or a part of it, without adapters that a family cannot have."""
    every = []
    for family in families:
        if family in WITH_EXPERTS:
            every += [cell for cell in expert_cells(family, dtype) if cell.kind in kinds]
        else:
            names = [kind for kind in kinds if kind in KIND_NAMES]
            every += [Cell(family, kind, division, dtype) for kind in names for division in METHODS]
    return [cell for cell in every if cell.exists]


def expert_cells(family: str, dtype: Dtype = "bfloat16") -> Iterator[Cell]:
    """Of a family with experts: everywhere adapters may be, divisions with two of them, two more sizes."""
    for kind in EXPERT_KINDS:
        for division in EXPERT_METHODS:
            on_experts = kind in (ON_EXPERTS, EVERYWHERE)
            if on_experts and "TP2" in division:
                continue  # tensor ranks divide no expert that has an adapter
            if kind in ("LORA", EVERYWHERE) or division in ("1x1", "all computed again"):
                yield Cell(family, kind, division, dtype)
    for size in SIZES[family]:
        for division in ("1x1", "all computed again", "TP2+EP2", "EP2+PP2", "EP3, placed"):
            yield Cell(family, "LORA", division, dtype, size=size)
            if "TP2" not in division:
                yield Cell(family, ON_EXPERTS, division, dtype, size=size)
