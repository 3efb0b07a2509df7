"""A backbone without weights, and tasks on it, as the planner sees them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_mux.adapters.diff_pruning import DiffPruningSpec
from megatron_mux.adapters.ia3 import IA3Spec
from megatron_mux.adapters.kind import AdapterSpec
from megatron_mux.adapters.lora import LoraSpec
from megatron_mux.backbone.registry import BackboneInfo, family
from megatron_mux.footprint.content import COUNTS
from megatron_mux.footprint.memory import Memory, groups_of
from megatron_mux.footprint.signature import Signature
from megatron_mux.footprint.table import Group, PassTable, PersistentBytes, StageTable
from megatron_mux.fusion.mesh import Mesh
from megatron_mux.fusion.planner.load import TaskLoad
from megatron_mux.fusion.profiler.profile import Profile
from megatron_mux.fusion.profiler.roofline import roofline
from megatron_mux.memory.forms.method import Recompute
from megatron_mux.memory.forms.task_adapters import AdaptedOp, TaskAdapters, TrainedTensor
from megatron_mux.shape import BackboneShape
from megatron_mux.tasks import TaskSpec


def shape(layers: int = 8, hidden: int = 256) -> BackboneShape:
    """A small Llama's."""
    full = {
        "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 8,
        "num_key_value_heads": 4, "intermediate_size": 2 * hidden, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "vocab_size": 1000, "max_position_embeddings": 2048, "tie_word_embeddings": True, "eos_token_id": 2,
        "bos_token_id": 1,
    }  # fmt: skip
    return dataclasses.replace(family("llama").shape(full), ropes=(None,) * layers)


def info(layers: int = 8, fingerprint: str = "a" * 64) -> BackboneInfo:
    """Of that shape."""
    return BackboneInfo(Path("made-up"), shape(layers), fingerprint, {})


def profile(layers: int = 8, **changes: Any) -> Profile:
    """A roofline of two threads."""
    about = {"device": "made-up", "kind": "cpu", "threads": 2}
    tensor = changes.pop("tensor_parallel", 1)
    return dataclasses.replace(roofline(shape(layers), about, 4, tensor, most_tokens=4096), **changes)


def site(layer: int, kind: str = "LORA", size: int = 16) -> AdaptedOp:
    """An adapter on a layer's linear_qkv."""
    spec: AdapterSpec
    if kind.startswith("LORA"):
        spec = LoraSpec(peft_type="LORA", r=size, lora_dropout=0.1 if kind == "LORA_DROPOUT" else 0.0)
    elif kind == "IA3":
        spec = IA3Spec(peft_type="IA3", feedforward_modules=[])
    else:
        spec = DiffPruningSpec(peft_type="DIFF_PRUNING")
    return AdaptedOp(layer, "linear_qkv", spec.curve(1))


def load(
    name: str,
    lengths: list[int],
    layers: int = 8,
    kind: str = "LORA",
    size: int = 16,
    sites: tuple[AdaptedOp, ...] | None = None,
    **changes: Any,
) -> TaskLoad:
    """A task with sequences of these lengths, half of each labelled, its adapter on every layer's linear_qkv."""
    if sites is None:
        sites = tuple(site(layer, kind, size) for layer in range(layers))
    tensors = tuple(TrainedTensor((layer,), (100, 100), 0) for layer in {site.layer for site in sites})
    found = TaskLoad(
        name=name,
        tokens=tuple(lengths),
        labels=tuple(max(1, n // 2) for n in lengths),
        max_length=max(lengths),
        accumulation=1,
        adapter=TaskAdapters(name, "adamw_torch", sites, layers, 1, 64, tensors=tensors),
        spec=_spec(kind, size),
    )
    return dataclasses.replace(found, **changes)


def _spec(kind: str, size: int) -> TaskSpec:
    """A task of which tables of bytes are."""
    adapter: dict[str, Any] = {"peft_type": kind}
    if kind.startswith("LORA"):
        adapter = {"peft_type": "LORA", "r": size, "lora_dropout": 0.1 if kind == "LORA_DROPOUT" else 0.0}
    return TaskSpec.model_validate({"name": "task", "data": {"path": "none"}, "adapter": adapter})


def random_loads(seed: int, count: int | None = None, layers: int = 8) -> dict[str, TaskLoad]:
    """One to eight tasks of random lengths and kinds."""
    r, others = random.Random(seed), random.Random(-seed - 1)
    loads = {}
    for i in range(count or r.randint(1, 8)):
        longest = r.choice([16, 64, 128, 256, 512])
        lengths = sorted(r.randint(4, longest) for _ in range(r.randint(1, 8)))
        kind, size = r.choice([("LORA", 16), ("LORA_DROPOUT", 8), ("IA3", 0), ("DIFF_PRUNING", 0)])
        most = others.choice(
            [0, lengths[-1] + others.randint(1, longest)]
        )  # a step need not have the longest record
        loads[f"t{i}"] = load(f"t{i}", lengths, layers, kind=kind, size=size, longest=most)
    return loads


@dataclasses.dataclass(frozen=True)
class MadeUpTables:
    """A `MemorySource` of that backbone: fp32, some products of a layer kept, more for each kind of adapter."""

    layers: int = 8
    updating: float = 1e3

    def memory(
        self, mesh: Mesh, recompute: Recompute, signatures: Sequence[Signature], short: bool = True
    ) -> Memory:
        """See `MemorySource`."""
        sizes = [len(layers) for layers in mesh.stage_layers(self.layers)]
        last = len(sizes) - 1
        made = [
            _table(signatures, i == 0, i == last, recompute, mesh.tensor, self.updating)
            for i in range(last + 1)
        ]
        return Memory(signatures, made, sizes, 1 << 14, 4.0 * shape().hidden, mesh.pipeline)

    def prepare(self, *asked: object) -> None:
        """See `MemorySource`: it takes no time."""


def _table(
    signatures: Sequence[Signature],
    first: bool,
    last: bool,
    recompute: Recompute,
    tensor: int,
    updating: float,
) -> StageTable:
    """Of a stage of one layer."""
    known = shape()
    hidden, count = 4.0 * known.hidden, len(signatures)
    own = np.array([400.0 + 8 * one.rank + 100 * len(one.family) for one in signatures])
    ones = np.ones(count)
    adapters = PersistentBytes(
        4 * 8 * known.hidden**2 / tensor, 1e4 * ones, updating * ones, 0 * ones, 0 * ones
    )
    ends = known.vocab * hidden * (first + last)
    persistent = dataclasses.replace(adapters, backbone=adapters.backbone + ends)
    passes: dict[Group, PassTable] = {}
    for group in groups_of(signatures):
        rows = slice(len(COUNTS), len(COUNTS) + len(group))
        deeper, working, head = (np.zeros(len(COUNTS) + 2 * len(group)) for _ in range(3))
        deeper[rows] = hidden if recompute == "full" else 10 * hidden + own[list(group)].sum()
        deeper[COUNTS.index("copied")] = hidden
        kept = deeper.copy()
        kept[rows] += 48.0
        kept[COUNTS.index("sequences")] += 256.0
        working[rows] = 6 * hidden + (9 * hidden if recompute == "full" else 0)
        head[COUNTS.index("labels of a chunk")] = 8.0 * known.vocab * last
        passes[group] = PassTable(kept, deeper, np.stack([kept + working, kept + head]), np.ones(2))
    return StageTable(1, persistent, adapters, passes)
