"""The tables of a run's stages: rehearsed once for each group of signatures, then read from files."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron_mux.backbone.split import even_split
from megatron_mux.dry_run.depth import read_info
from megatron_mux.dry_run.process import dry_runs
from megatron_mux.dry_run.run_spec import RunSpec
from megatron_mux.estimate.rehearsal import DEEP, SHALLOW, Signature, rehearsal
from megatron_mux.estimate.solve import stage_table
from megatron_mux.estimate.windows import Windows
from megatron_mux.files import cache_directory, write_atomically
from megatron_mux.footprint.memory import Memory
from megatron_mux.footprint.table import Group, Lasting, PassTable, StageTable
from megatron_mux.kernels.loss_head import chunk_rows
from megatron_mux.memory.store import versions
from megatron_mux.shape import BackboneShape
from megatron_mux.tasks import TaskSpec

_FORMAT = 1

Entry = list[dict[str, Any]]
"""What a file has: the table of each kind of stage, as plain data."""


class Tables:
    """Tables of a backbone that is divided and run in one way.

    Args:
        base: Backbone, ranks, and how memory is saved; its tasks and buckets do not matter.
        directory: Where tables are kept; None: the user's cache.
    """

    def __init__(self, base: RunSpec, directory: Path | None = None) -> None:
        self._base = replace(base, tasks=(), plan=replace(base.plan, buckets=()))
        self._shape: BackboneShape = read_info(base.config, base.quantise).shape
        self._directory = cache_directory("tables") if directory is None else directory

    @cached_property
    def chunk(self) -> int:
        """Rows whose logits a rank computes at once."""
        return chunk_rows(self._base.device, self._shape.padded_vocab // self._base.tensor)

    @property
    def layers(self) -> tuple[int, ...]:
        """Of each stage."""
        plan = self._base.plan
        return plan.split or even_split(self._shape.layers, plan.stages)

    def memory(self, signatures: Sequence[Signature]) -> Memory:
        """The memory of tasks of these signatures: from files, or by dry runs, which take seconds.

        Raises:
            WorkerError: A dry run failed.
            NotLinear: Bytes are not linear in what micro-batches contain.
        """
        singles: list[Group] = [(i,) for i in range(len(signatures))]
        groups = [*singles, *((i, j) for j in range(len(signatures)) for i in range(j))]
        entries = {group: self._read(group, signatures) for group in groups}
        if missing := [group for group in groups if entries[group] is None]:
            # Numbers in the entries are those of the group's own signatures: an entry serves any other set.
            for group, entry in zip(missing, self._rehearsed(missing, signatures), strict=True):
                entries[group] = entry
                self._write(group, signatures, entry)
        kinds = [self._assembled(entries, singles, kind) for kind in range(len(self._kinds))]
        stages, plan = len(self.layers), self._base.plan
        of_stage = [0 if s == 0 else len(kinds) - 1 if s == stages - 1 else 1 for s in range(stages)]
        divided = self._base.tensor if self._base.sequence_parallel else 1
        size = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}[self._base.dtype]
        return Memory(
            [kinds[k] for k in of_stage],
            self.layers,
            self.chunk,
            self._shape.hidden * size / divided,
            plan.ranks,
            self._base.tensor == 1 and self._base.residence != "sharded",
        )

    @cached_property
    def _kinds(self) -> list[int]:
        """Stages of a rehearsal: the first, one between, the last."""
        return list(range(min(3, len(self.layers))))

    def _rehearsed(self, groups: Sequence[Group], signatures: Sequence[Signature]) -> list[Entry]:
        """Entries of groups, from dry runs."""
        plan = self._base.plan
        stages = len(self._kinds)
        depths = [SHALLOW, DEEP] if self._are_alike(signatures) else [max(self.layers)]
        base = replace(self._base, plan=replace(plan, stages=stages, virtual=1, split=()))
        alone = [
            (i,) for i in sorted({i for group in groups for i in group})
        ]  # whose tasks last is told by them
        every = [*alone, *(group for group in groups if len(group) > 1)]
        runs = [rehearsal(base, signatures, every, depth, self.chunk) for depth in depths]
        each = runs[0].run.world // stages
        parts = [(run.run, kind * each) for kind in self._kinds for run in runs]
        made = iter(dry_runs(parts, whole=True))
        tables = []
        for _ in self._kinds:
            own = [Windows(run, next(made)) for run in runs]
            tables.append(stage_table(own[0], own[-1], (depths[0], depths[-1]), self.chunk))
        return [_entry(tables, group) for group in groups]

    def _are_alike(self, signatures: Sequence[Signature]) -> bool:
        """Whether a few layers tell what all take: neither backbone nor adapters treat some otherwise."""
        shape, base = self._shape, self._base
        if min(self.layers) <= DEEP or len(set(shape.windows)) > 1:
            return False
        if shape.experts is not None and (shape.experts.dense or base.placement or base.access):
            return False
        return all(_is_everywhere(one, shape) for one in signatures)

    # -- files

    def _path(self, group: Group, signatures: Sequence[Signature]) -> Path:
        about = {
            "format": _FORMAT,
            "run": {k: v for k, v in asdict(self._base).items() if k not in ("tasks", "steps", "rolling")},
            "signatures": [signatures[i] for i in group],
            "versions": versions(),
        }
        text = json.dumps(about, sort_keys=True, default=str)
        return self._directory / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"

    def _read(self, group: Group, signatures: Sequence[Signature]) -> Entry | None:
        try:
            found: Entry = json.loads(self._path(group, signatures).read_text())
            return found
        except (OSError, ValueError):  # none, or not whole: it is made anew
            return None

    def _write(self, group: Group, signatures: Sequence[Signature], entry: Entry) -> None:
        write_atomically(self._path(group, signatures), json.dumps(entry))

    def _assembled(self, entries: Mapping[Group, Any], singles: Sequence[Group], kind: int) -> StageTable:
        """The table of a kind of stage from the entries of groups."""
        made = {group: StageTable.of_json(entry[kind]) for group, entry in entries.items()}
        lasting, deeper = (
            Lasting(
                min(getattr(made[one], name).backbone for one in singles),
                np.array([getattr(made[one], name).tasks[0] for one in singles]),
                np.array([getattr(made[one], name).updating[0] for one in singles]),
            )
            for name in ("lasting", "deeper")
        )
        passes: dict[Group, PassTable] = {
            group: next(iter(own.passes.values())) for group, own in made.items()
        }
        return StageTable(made[singles[0]].layers, lasting, deeper, passes)


def _entry(tables: Sequence[StageTable], group: Group) -> Entry:
    """What is kept of a group: for each kind of stage the table of these signatures alone."""
    own = list(group)
    return [
        replace(
            table,
            lasting=_only(table.lasting, own),
            deeper=_only(table.deeper, own),
            passes={group: table.passes[group]},
        ).to_json()
        for table in tables
    ]


def _only(lasting: Lasting, signatures: list[int]) -> Lasting:
    return Lasting(lasting.backbone, lasting.tasks[signatures], lasting.updating[signatures])


def _is_everywhere(signature: Signature, shape: BackboneShape) -> bool:
    """Whether an adapter has the same tensors in every layer."""
    spec = TaskSpec.model_validate({"name": "task", "data": {"path": "none"}, **signature})
    found = defaultdict(list)
    for tensor in spec.adapter.tensors(shape).values():
        if tensor.layer is not None:
            found[tensor.layer].append((tensor.shape, tensor.dim, tensor.trained))
    every = [sorted(map(str, own)) for own in found.values()]
    return not every or (len(every) == shape.layers and all(own == every[0] for own in every))
