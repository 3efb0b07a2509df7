"""Cases of tables of bytes against dry runs of deeper stages at other sizes, drawn by seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron_mux.backbone.registry import DENSE, WITH_EXPERTS
from megatron_mux.dry_run.depth import read_info
from megatron_mux.dry_run.process import dry_runs
from megatron_mux.dry_run.run_spec import STEP, Dtype, Recording, RunSpec, TaskRecords
from megatron_mux.dry_run.worst_case_batch import STEPS_THAT_PRUNE
from megatron_mux.errors import UserError
from megatron_mux.estimate.rehearsal import Rehearsal
from megatron_mux.estimate.tables import Tables
from megatron_mux.estimate.windows import Windows
from megatron_mux.footprint.memory import Taken
from megatron_mux.footprint.signature import Signature
from megatron_mux.fusion.plan import Plan, plan_for
from megatron_mux.fusion.planner.load import persistent_share
from megatron_mux.tasks import TaskSpec
from tests.end_to_end.memory_configs import ADAPTERS as _ADAPTERS
from tests.end_to_end.memory_configs import CONFIGS, EVERYWHERE, LLAMA, ON_EXPERTS, ON_SHARED

KINDS: Mapping[str, Mapping[str, Any]] = {
    "LORA": {"adapter": {"peft_type": "LORA", "r": 8, "target_modules": "all-linear"}},
    "LORA with dropout": {
        "adapter": {"peft_type": "LORA", "r": 4, "lora_dropout": 0.1, "target_modules": "all-linear"}
    },
    "DoRA": {"adapter": {"peft_type": "LORA", "r": 8, "use_dora": True, "target_modules": "all-linear"}},
    "VERA": {"adapter": {"peft_type": "VERA", "r": 64}},
    "LOHA": {"adapter": {"peft_type": "LOHA", "r": 4, "target_modules": "all-linear"}},
    "IA3": {"adapter": {"peft_type": "IA3"}},
    "BOTTLENECK": {"adapter": {"peft_type": "BOTTLENECK", "bottleneck_size": 32}},
    "PREFIX_TUNING": {"adapter": {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 16}},
    "DIFF_PRUNING": {
        "adapter": {"peft_type": "DIFF_PRUNING", "sparsity": 0.9, "target_modules": "all-linear"}
    },
    "DPO": {
        "adapter": {"peft_type": "LORA", "r": 8, "target_modules": "all-linear"},
        "training": {"loss": "dpo"},
    },
    "Lion": {
        "adapter": {"peft_type": "LORA", "r": 16, "target_modules": "all-linear"},
        "training": {"optim": "lion_32bit"},
    },
    "copied head": {
        "adapter": {"peft_type": "LORA", "target_modules": "all-linear", "modules_to_save": ["lm_head"]}
    },
    "rows of its own": {
        "adapter": {
            "peft_type": "LORA", "target_modules": "all-linear",
            "trainable_token_indices": {"embed_tokens": [*range(100)]},
        }
    },
    **{name: {"adapter": {"peft_type": "LORA", **_ADAPTERS[name]}} for name in (ON_EXPERTS, ON_SHARED, EVERYWHERE)},
}  # fmt: skip
"""Adapter, loss and optimizer of a task."""
RANKS: Mapping[str, Mapping[str, int]] = {
    "1x1": {},
    "TP2": {"tensor": 2},
    "TP2 sequence parallel": {"tensor": 2, "sequence_parallel": 1},
    "PP2": {"stages": 2},
    "DP2": {"data": 2},
    "DP2 sharded": {"data": 2},
    "EP2": {"data": 2, "expert": 2},
}
_DRAWN = [name for name in RANKS if "sequence" not in name and name != "DP2"]
"""Not drawn: where tensor ranks divide rows, tables are of rows that do not come out even, which are copied; pipelines
that share nothing take what one takes."""
SAVINGS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "recomputed": {"recompute": "full"},
    "attention recomputed": {"recompute": "selective"},
    "offloaded": {"residence": "offloaded"},
    "NF4": {"quantise": "nf4"},
}
_LENGTHS = (40, 4000)
_CHUNKED = 0.2
"""Share of drawn cases whose micro-batches are cut."""
_SEQUENCES = 4
"""Records of a micro-batch."""


@dataclass(frozen=True)
class Case:
    """Tasks on a backbone, divided.

    Attributes:
        family: Of the backbone.
        kinds: Of the tasks that share a micro-batch, names of `KINDS`.
        ranks, saving: Names of `RANKS` and `SAVINGS`.
        layers: Of a stage.
        seed: Of the records' lengths.
        chunk: Tokens of a chunk, of a single stage; None: micro-batches are not cut.
        device: `cuda`, a fake one, or `cpu`.
        lengths: Of records, at least and at most.
        dtype: Of the backbone.
    """

    family: str
    kinds: tuple[str, ...]
    ranks: str = "1x1"
    saving: str = "plain"
    layers: int = 9
    seed: int = 0
    chunk: int | None = None
    device: Literal["cuda", "cpu"] = "cuda"
    lengths: tuple[int, int] = _LENGTHS
    dtype: Dtype = "bfloat16"

    @property
    def name(self) -> str:
        """In words."""
        chunks = f", chunks of {self.chunk}" if self.chunk else ""
        where = "" if self.device == "cuda" else f", on a CPU, {'{} to {} tokens'.format(*self.lengths)}"
        tasks = " + ".join(self.kinds)
        dtype = "" if self.dtype == "bfloat16" else f", {self.dtype}"
        return (
            f"{self.family}, {tasks}, {self.ranks}, {self.saving}, {self.layers} layers{chunks}{where}{dtype}"
        )

    @property
    def base(self) -> RunSpec:
        """The run without its tasks."""
        ranks = dict(RANKS[self.ranks])
        stages, data = ranks.pop("stages", 1), ranks.pop("data", 1)
        plan = Plan("auto", stages, (), tensor=ranks.get("tensor", 1), data=data)
        more = {**ranks, **SAVINGS[self.saving]}
        run = RunSpec(self._config(stages), (), plan, dtype=self.dtype, device=self.device, **more)
        return replace(run, residence="sharded") if self.ranks == "DP2 sharded" else run

    def task(self, name: str, kind: str, records: int = 1, steps: int = STEPS_THAT_PRUNE) -> TaskSpec:
        """A task with so many records in a step."""
        section = {"training": {}, **KINDS[kind]}
        training = {**section["training"], "per_device_train_batch_size": records, "max_steps": steps}
        data = {"path": "none", "max_length": _LENGTHS[1], "shuffle": False}
        return TaskSpec.model_validate({"name": name, "data": data, **section, "training": training})

    @property
    def exists(self) -> bool:
        """Whether the kinds can be had on the backbone, and it can be divided so."""
        experts = self.family in WITH_EXPERTS
        if (self.ranks == "EP2" and not experts) or (
            self.ranks == "TP2" and experts
        ):  # needs sequence parallelism
            return False
        if self.ranks == "DP2 sharded" and self.saving == "offloaded":
            return False
        try:
            shape = read_info(self.base.config, self.base.quantise).shape
            return all(self._has(kind, shape) for kind in self.kinds)
        except UserError:
            return False

    def _has(self, kind: str, shape: Any) -> bool:
        adapter = self.task("task", kind).adapter
        return bool(adapter.modules(shape)) and bool(adapter.tensors(shape))

    def _config(self, stages: int) -> dict[str, Any]:
        config = {"model_type": self.family, "bos_token_id": 1, "eos_token_id": 2}
        config |= CONFIGS.get(self.family, LLAMA)
        depth = self.layers * stages
        found: dict[str, Any] = dict.fromkeys(
            {"num_hidden_layers", "n_layer", "num_layers"} & config.keys(), depth
        )
        if "attention_types" in config:  # they alternate
            found["attention_types"] = [[["global", "local"], depth // 2]]
        return {**config, **found}


@dataclass(frozen=True)
class Compared:
    """A stage of a case.

    Attributes:
        case: The case.
        stage: Of its pipeline.
        peak, lasting: Bytes in a dry run, at the peak and after a step.
        predicted, predicted_lasting: The same from tables.
    """

    case: Case
    stage: int
    peak: float
    lasting: float
    predicted: float
    predicted_lasting: float

    @property
    def off(self) -> float:
        """Of the peak."""
        return self.predicted / self.peak - 1

    @property
    def off_lasting(self) -> float:
        """The same of what lasts, as a share of the peak."""
        return (self.predicted_lasting - self.lasting) / self.peak

    def __str__(self) -> str:
        return f"{self.off:+.3%} ({self.off_lasting:+.3%} lasting) {self.case.name}, stage {self.stage}"

    def to_json(self) -> dict[str, Any]:
        """The JSON form."""
        return asdict(self) | {"off": self.off, "off_lasting": self.off_lasting}


def on_cpu() -> list[Case]:
    """Cases of a CPU, each with records that its attention pads, and with some that are too long for that."""
    chosen = (
        ("llama", "LORA", "1x1"), ("gpt2", "IA3", "1x1"), ("qwen3", "LORA", "PP2"),
        ("qwen3_moe", "LORA on experts", "EP2"),
    )  # fmt: skip
    return [
        Case(family, (kind,), ranks, layers=6, device="cpu", lengths=lengths)
        for family, kind, ranks in chosen
        for lengths in ((16, 200), (40, 1500))
    ]


def drawn(count: int, seed: int, mixed: int = 0, dtype: Dtype = "bfloat16") -> list[Case]:
    """Cases that exist, every family and kind about as often.

    Args:
        count: How many.
        seed: Of the draw.
        mixed: Kinds that share a micro-batch; 0: one alone.
        dtype: Of the backbone.
    """
    generator = np.random.default_rng(seed)
    families, kinds = (*DENSE, *WITH_EXPERTS), list(KINDS)
    found: list[Case] = []
    while len(found) < count:
        chosen = generator.choice(kinds, max(1, mixed), replace=False)
        case = Case(
            str(generator.choice(families)),
            tuple(map(str, chosen)),
            str(generator.choice(_DRAWN)),
            str(generator.choice(list(SAVINGS))),
            2 * int(generator.integers(3, 7)),
            int(generator.integers(1 << 16)),
            dtype=dtype,
        )
        if case.ranks != "PP2" and generator.random() < _CHUNKED:
            case = replace(case, chunk=1200)
        if case.exists:
            found.append(case)
    return found


def compare(case: Case, tables: Path) -> Iterator[Compared]:
    """Predict every stage, and run it.

    Args:
        case: The case.
        tables: Where tables are kept.
    """
    base = case.base
    specs = [case.task("task", kind) for kind in case.kinds]
    memory = Tables(base, tables).memory([Signature.of(spec.plain()) for spec in specs])
    shape = read_info(base.config, base.quantise).shape
    counts = np.array([persistent_share(spec, shape, Signature.of(spec.plain())) for spec in specs])
    run = _run(case, base)
    each = run.world // run.plan.ranks
    recordings = dry_runs([(run, stage * each) for stage in range(run.plan.ranks)], whole=True)
    group = tuple(range(len(case.kinds)))
    for stage, recording in enumerate(recordings):
        windows = Windows(Rehearsal(run, (group,), run.steps - 1), recording)
        forward = windows.of("F", 0)
        taken = memory.passes(windows.contents(forward), in_step=len(forward))
        lasting = float(memory.persistent(counts)[stage])
        flight = len(forward) if case.chunk else min(run.plan.ranks - stage, len(forward))
        most = max(_in_flight(taken, stage, flight), float(memory.updating(counts)[stage]))
        yield Compared(case, stage, *_really(recording), lasting + most, lasting)


def _run(case: Case, base: RunSpec) -> RunSpec:
    generator = np.random.default_rng(case.seed)
    stages, data = base.plan.ranks, base.plan.data
    micro_batches = 2 * stages if stages > 1 else 1
    tasks = []
    for number, kind in enumerate(case.kinds):
        spec = case.task(f"t-{number}", kind, _SEQUENCES * data * micro_batches)
        # Micro-batches of a pipeline are alike: how many messages are on their way depends on which of them is largest.
        lengths = generator.integers(*case.lengths, spec.sequences_per_step // micro_batches)
        labels = np.maximum(2, lengths * generator.uniform(0.1, 1.0, len(lengths))).astype(int)
        lengths, labels = (np.tile(own, micro_batches) for own in (lengths, labels))
        tasks.append(TaskRecords(spec.plain(), lengths.tolist(), labels.tolist()))
    plan = plan_for("spatial", {one.name: 1 for one in tasks}, stages, micro_batches, case.chunk)
    plan = replace(plan, data=data, tensor=base.tensor, schedule="1f1b")
    return replace(base, tasks=tasks, plan=plan, steps=STEPS_THAT_PRUNE)


def _in_flight(taken: Taken, stage: int, flight: int) -> float:
    """The most that a stage holds at a time with so many micro-batches, or chunks of one, in flight."""
    kept, working = taken.kept[:, stage], taken.working[:, stage]
    return max(
        float(kept[max(0, m - flight + 1) : m + 1].sum() + working[computed])
        for m in range(len(kept))
        for computed in (m, max(0, m - flight + 1))
    )


def _really(recording: Recording) -> tuple[float, float]:
    """Bytes at the peak of the steps behind the first, and at their end."""
    live: Sequence[int] = recording.stream.live()
    start = [index for index, what in recording.marks if what == STEP][1]
    return float(max(live[start - 1 :])), float(live[-1])
