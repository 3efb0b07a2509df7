"""The tables of a run's stages: rehearsed once for each group of signatures, then read from files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron_mux.backbone.split import even_split
from megatron_mux.dry_run.depth import read_info
from megatron_mux.dry_run.process import Part, dry_runs, recordings
from megatron_mux.dry_run.run_spec import Recording, RunSpec
from megatron_mux.estimate.rehearsal import DEEP, SHALLOW, rehearsal
from megatron_mux.estimate.solve import stage_table
from megatron_mux.estimate.windows import Windows
from megatron_mux.files import cache_directory, write_atomically
from megatron_mux.footprint.memory import Memory, groups_of
from megatron_mux.footprint.signature import Signature
from megatron_mux.footprint.table import OF_TASKS, Group, PassTable, PersistentBytes, StageTable
from megatron_mux.kernels.loss.head import chunk_rows
from megatron_mux.memory.store import versions
from megatron_mux.runtime import GRADIENTS_AT_ONCE
from megatron_mux.shape import BackboneShape
from megatron_mux.tasks import TaskSpec

_FORMAT = 13

_GIVES_WAY = 10
"""Of dry runs beside a run's steps, as of `os.nice`: Linux gives them a tenth of a core that is busy."""

Runs = Callable[[Sequence[Part]], list[Recording]]
"""Makes the recordings of ranks."""

Entry = dict[str, Any]
"""What a file has: the table of a group on a stage, as plain data."""


class Tables:
    """Tables of a backbone that is divided and run in one way.

    Args:
        base: Backbone, ranks, and how memory is saved; its tasks and buckets do not matter.
        directory: Where tables are kept; None: the user's cache.
        runs: Makes recordings of ranks with all their layers.
        say: Told before dry runs.
        short: Whether, on a CPU, its attention computes all sequences as short ones.
        expert_rank: Whose bytes; they differ where experts are placed.
        chunks: Whether micro-batches may be cut, for which more of them are run.
    """

    def __init__(
        self,
        base: RunSpec,
        directory: Path | None = None,
        runs: Runs = lambda parts: dry_runs(parts, whole=True),
        say: Callable[[str], None] = lambda text: None,
        short: bool = False,
        expert_rank: int = 0,
        chunks: bool = True,
    ) -> None:
        self._sums = 4.0 * GRADIENTS_AT_ONCE * (base.tensor * base.plan.data > 1)
        # Pipelines that share nothing but the sums of gradients take what one takes, and those.
        shares = base.residence.startswith("sharded") or base.expert > 1
        plan = replace(base.plan, buckets=(), data=base.plan.data if shares else 1)
        self._base = replace(base, tasks=(), plan=plan)
        # As `engine.out_of_memory.ranks_meet`: then a pass that has failed sends no zeros to the next stage.
        self._meet = base.tensor > 1 or (shares and base.plan.data > 1)
        self._runs, self._say = runs, say
        self._short = short and base.device == "cpu"
        self._expert_rank, self._chunks = expert_rank, chunks
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
            NotLinear: Dry runs do not tell how bytes follow from what micro-batches contain.
        """
        specs = [TaskSpec.model_validate(s.task) for s in signatures]
        alike = self._are_alike(specs)
        groups = groups_of(signatures)
        singles = groups[: len(signatures)]
        table = self._stages(alike)[1]
        entries: dict[tuple[Group, int], Entry | None] = {
            (group, stage): _read(self._path(group, stage, signatures, alike))
            for group in groups
            for stage in table
        }
        if missing := [key for key, entry in entries.items() if entry is None]:
            self._say(
                f"dry runs to predict memory, for {len(signatures)} kind(s) of tasks: kept for later runs"
            )
            for group, stage, entry in self._rehearsed(
                sorted({group for group, _ in missing}, key=groups.index),
                sorted({stage for _, stage in missing}),
                signatures,
                alike,
            ):
                entries[group, stage] = entry
                with suppress(OSError):  # the cache cannot be written: it is made anew
                    write_atomically(self._path(group, stage, signatures, alike), json.dumps(entry))
        stages, base = len(self.layers), self._base
        made = [_assembled({group: entries[group, stage] for group in groups}, singles) for stage in table]
        ends = {0: 0, stages - 1: len(made) - 1}
        divided = base.tensor if base.sequence_parallel else 1
        return Memory(
            signatures,
            [made[ends.get(stage, 1) if alike else stage] for stage in range(stages)],
            self.layers,
            self.chunk,
            self._shape.hidden * base.itemsize / divided,
            base.plan.ranks,
            not self._meet,
            self._sums,
            [i for i, spec in enumerate(specs) if spec.training.refers_in_steps],
        )

    def _stages(self, alike: bool) -> tuple[int, list[int]]:
        """How many stages a rehearsal has, and which of them are run.

        Where layers are alike, these are the first, one between, and the last, which pipelines of any depth share; else
        all of them.
        """
        count = len(self.layers)
        if not alike or count == 1:
            return count, list(range(count))
        if count == 2:
            return (3, [0, 2]) if self._shape.layers >= 3 * DEEP else (2, [0, 1])
        return 3, [0, 1, 2]

    def _rehearsed(
        self, groups: Sequence[Group], stages: Sequence[int], signatures: Sequence[Signature], alike: bool
    ) -> Iterator[tuple[Group, int, Entry]]:
        """Entries of groups on stages, from dry runs.

        Numbers in an entry are those of the group's own signatures: it serves any other set.
        """
        # The first bucket is compared with that of its signature alone.
        every = groups if len(groups[0]) == 1 else [groups[0][:1], *groups]
        base = self._run(alike)
        depths = (DEEP, SHALLOW) if alike else (self._shape.layers,)
        how = partial(rehearsal, chunk=self.chunk, short=self._short, chunks=self._chunks)
        runs = [how(base, signatures, every, depths[0])]
        if alike:
            alone = [group for group in every if len(group) == 1]
            runs.append(how(base, signatures, alone, SHALLOW, sized=False))
        each = runs[0].run.world // base.plan.stages
        own_rank = self._expert_rank * base.tensor
        parts = [(run.run, stage * each + own_rank) for stage in stages for run in runs]
        made = iter(self._runs(parts))
        for stage in stages:
            last = stage == base.plan.stages - 1
            windows = [Windows(run, next(made), self._expert_rank, last) for run in runs]
            layers = depths if alike else (self.layers[stage],)
            table = stage_table(windows[-1], windows[0], (layers[-1], layers[0]), self.chunk)
            yield from ((group, stage, _entry(table, group)) for group in groups)

    def _run(self, alike: bool) -> RunSpec:
        """The base with the stages of a rehearsal: pipelines of different depths share theirs."""
        split = () if alike else self.layers
        plan = replace(self._base.plan, stages=self._stages(alike)[0], virtual=1, split=split)
        return replace(self._base, plan=plan)

    def _are_alike(self, specs: Sequence[TaskSpec]) -> bool:
        """Whether a few layers tell what all take: neither backbone nor adapters treat some otherwise."""
        shape, base = self._shape, self._base
        if min(self.layers) <= DEEP or not shape.layers_are_alike or base.placement or base.access:
            return False
        return all(spec.adapter.is_alike(shape, range(shape.layers)) for spec in specs)

    def _path(self, group: Group, stage: int, signatures: Sequence[Signature], alike: bool) -> Path:
        about = {
            "format": _FORMAT,
            "run": {
                k: v for k, v in asdict(self._run(alike)).items() if k not in ("tasks", "steps", "rolling")
            },
            "signatures": [signatures[i].sections for i in group],
            "stage": stage,
            "alike": alike,
            "short": self._short,
            "expert rank": self._expert_rank,
            "chunks": self._chunks,
            "versions": versions(),
        }
        text = json.dumps(about, sort_keys=True, default=str)
        return self._directory / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def make(run: RunSpec, signatures: Sequence[Signature], short: bool, directory: Path) -> None:
    """In the process for dry runs: make tables that no file has, while the machine does more urgent work.

    Args:
        run, short, directory: See `Tables`.
        signatures: Of tasks that may meet.
    """
    runs = partial(recordings, whole=True, nice=_GIVES_WAY)
    Tables(run, directory, runs, short=short).memory(signatures)


def _read(path: Path) -> Entry | None:
    try:
        entry: Entry = json.loads(path.read_text())
        return entry
    except (OSError, ValueError):  # none, or not whole: it is made anew
        return None


def _assembled(entries: Mapping[Group, Any], singles: Sequence[Group]) -> StageTable:
    """The table of a stage that was run, from the entries of groups."""
    made = {group: StageTable.of_json(entry) for group, entry in entries.items()}
    persistent, deeper = (
        PersistentBytes(
            min(getattr(made[s], name).backbone for s in singles),
            *(np.array([getattr(getattr(made[s], name), of)[0] for s in singles]) for of in OF_TASKS),
        )
        for name in ("persistent", "deeper")
    )
    passes: dict[Group, PassTable] = {group: next(iter(t.passes.values())) for group, t in made.items()}
    return StageTable(made[singles[0]].layers, persistent, deeper, passes)


def _entry(table: StageTable, group: Group) -> Entry:
    """What is kept of a group: the table of these signatures alone."""
    signatures = list(group)
    return replace(
        table,
        persistent=_only(table.persistent, signatures),
        deeper=_only(table.deeper, signatures),
        passes={group: table.passes[group]},
    ).to_json()


def _only(persistent: PersistentBytes, signatures: list[int]) -> PersistentBytes:
    return PersistentBytes(persistent.backbone, *(getattr(persistent, name)[signatures] for name in OF_TASKS))
