"""The tables of a run's stages: rehearsed once for each group of signatures, then read from files."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron_mux.backbone.split import even_split
from megatron_mux.dry_run.depth import read_info
from megatron_mux.dry_run.process import dry_runs
from megatron_mux.dry_run.run_spec import RunSpec
from megatron_mux.estimate.rehearsal import DEEP, SHALLOW, rehearsal
from megatron_mux.estimate.solve import TOLERANCE, stage_table
from megatron_mux.estimate.windows import Windows
from megatron_mux.files import cache_directory, write_atomically
from megatron_mux.footprint.memory import Memory
from megatron_mux.footprint.signature import Signature
from megatron_mux.footprint.table import Group, Lasting, PassTable, StageTable
from megatron_mux.kernels.loss_head import chunk_rows
from megatron_mux.memory.store import versions
from megatron_mux.memory.worker import Worker
from megatron_mux.shape import BackboneShape
from megatron_mux.tasks import TaskSpec

_FORMAT = 4

Entry = list[dict[str, Any]]
"""What a file has: the table of each stage that was run, as plain data."""


class Tables:
    """Tables of a backbone that is divided and run in one way.

    Args:
        base: Backbone, ranks, and how memory is saved; its tasks and buckets do not matter.
        directory: Where tables are kept; None: the user's cache.
        worker: The process for dry runs, which `dry_run.process.prepare` gets ready; None: each call starts one.
        say: Told before dry runs.
        short: Whether, on a CPU, its attention computes all sequences as short ones.
        tolerance: See `stage_table`.
    """

    def __init__(
        self,
        base: RunSpec,
        directory: Path | None = None,
        worker: Worker | None = None,
        say: Callable[[str], None] = lambda text: None,
        short: bool = False,
        tolerance: float = TOLERANCE,
    ) -> None:
        self._base = replace(base, tasks=(), plan=replace(base.plan, buckets=()))
        self._worker, self._say, self._tolerance = worker, say, tolerance
        self._short = short and base.device == "cpu"
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
        alike = self._are_alike(signatures)
        singles: list[Group] = [(i,) for i in range(len(signatures))]
        every = range(len(signatures))
        # Beside a higher rank of its family a row takes what that takes.
        groups = [
            *singles,
            *((i, j) for j in every for i in range(j) if signatures[i].family != signatures[j].family),
        ]
        paths = {group: self._path(group, signatures, alike) for group in groups}
        entries = {group: _read(path) for group, path in paths.items()}
        if missing := [group for group in groups if entries[group] is None]:
            self._say(
                f"dry runs to predict memory ({len(missing)} kinds of tasks, and pairs of them): kept for later"
            )
            # Numbers in the entries are those of the group's own signatures: an entry serves any other set.
            for group, entry in zip(missing, self._rehearsed(missing, signatures, alike), strict=True):
                entries[group] = entry
                write_atomically(paths[group], json.dumps(entry))
        stages, base = len(self.layers), self._base
        made = [_assembled(entries, singles, stage) for stage in range(len(self._run_stages(alike)))]
        ends = {0: 0, stages - 1: len(made) - 1}
        divided = base.tensor if base.sequence_parallel else 1
        size = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}[base.dtype]
        return Memory(
            signatures,
            [made[ends.get(stage, 1) if alike else stage] for stage in range(stages)],
            self.layers,
            self.chunk,
            self._shape.hidden * size / divided,
            base.plan.ranks,
            base.tensor == 1 and base.residence != "sharded",
        )

    def _run_stages(self, alike: bool) -> range:
        """Stages of a rehearsal: where layers are alike, the first, one between, the last; else all of them."""
        return range(min(3, len(self.layers)) if alike else len(self.layers))

    def _rehearsed(
        self, groups: Sequence[Group], signatures: Sequence[Signature], alike: bool
    ) -> list[Entry]:
        """Entries of groups, from dry runs."""
        # The first bucket is compared with that of its signature alone.
        every = groups if len(groups[0]) == 1 else [groups[0][:1], *groups]
        stages = self._run_stages(alike)
        base = self._run(alike)
        depths = (SHALLOW, DEEP) if alike else (self._shape.layers,)
        runs = [rehearsal(base, signatures, every, depth, self.chunk, self._short) for depth in depths]
        each = runs[0].run.world // len(stages)
        parts = [(run.run, stage * each) for stage in stages for run in runs]
        made = iter(dry_runs(parts, whole=True, worker=self._worker))
        tables = []
        for stage in stages:
            own = [Windows(run, next(made)) for run in runs]
            layers = depths if alike else (self.layers[stage],)
            tables.append(stage_table(own[0], own[-1], (layers[0], layers[-1]), self.chunk, self._tolerance))
        return [_entry(tables, group) for group in groups]

    def _run(self, alike: bool) -> RunSpec:
        """The base with the stages of a rehearsal: pipelines of different depths share theirs."""
        split = () if alike else self.layers
        plan = replace(self._base.plan, stages=len(self._run_stages(alike)), virtual=1, split=split)
        return replace(self._base, plan=plan)

    def _are_alike(self, signatures: Sequence[Signature]) -> bool:
        """Whether a few layers tell what all take: neither backbone nor adapters treat some otherwise."""
        shape, base = self._shape, self._base
        if min(self.layers) <= DEEP or len(set(shape.windows)) > 1:
            return False
        if shape.experts is not None and (shape.experts.dense or base.placement or base.access):
            return False
        return all(_is_everywhere(one, shape) for one in signatures)

    def _path(self, group: Group, signatures: Sequence[Signature], alike: bool) -> Path:
        about = {
            "format": _FORMAT,
            "run": {
                k: v for k, v in asdict(self._run(alike)).items() if k not in ("tasks", "steps", "rolling")
            },
            "signatures": [signatures[i].sections for i in group],
            "alike": alike,
            "tolerance": self._tolerance,
            "short": self._short,
            "versions": versions(),
        }
        text = json.dumps(about, sort_keys=True, default=str)
        return self._directory / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def _read(path: Path) -> Entry | None:
    try:
        found: Entry = json.loads(path.read_text())
        return found
    except (OSError, ValueError):  # none, or not whole: it is made anew
        return None


def _assembled(entries: Mapping[Group, Any], singles: Sequence[Group], stage: int) -> StageTable:
    """The table of a stage that was run, from the entries of groups."""
    made = {group: StageTable.of_json(entry[stage]) for group, entry in entries.items()}
    lasting, deeper = (
        Lasting(
            min(getattr(made[one], name).backbone for one in singles),
            np.array([getattr(made[one], name).tasks[0] for one in singles]),
            np.array([getattr(made[one], name).updating[0] for one in singles]),
        )
        for name in ("lasting", "deeper")
    )
    passes: dict[Group, PassTable] = {group: next(iter(own.passes.values())) for group, own in made.items()}
    return StageTable(made[singles[0]].layers, lasting, deeper, passes)


def _entry(tables: Sequence[StageTable], group: Group) -> Entry:
    """What is kept of a group: for each stage that was run the table of these signatures alone."""
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
    spec = TaskSpec.model_validate(signature.task)
    found = defaultdict(list)
    for tensor in spec.adapter.tensors(shape).values():
        if tensor.layer is not None:
            found[tensor.layer].append((tensor.shape, tensor.dim, tensor.trained))
    every = [sorted(map(str, own)) for own in found.values()]
    return not every or (len(every) == shape.layers and all(own == every[0] for own in every))
