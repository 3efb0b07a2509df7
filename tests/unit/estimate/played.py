"""Recordings of a rank that allocates as told, without an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_mux.dry_run.run_spec import JOINS, STEP, Mark, Recording, RunSpec
from megatron_mux.estimate.rehearsal import Rehearsal, Signature, rehearsal, signature_of
from megatron_mux.estimate.windows import Windows
from megatron_mux.footprint.table import Group
from megatron_mux.fusion.plan import Plan
from megatron_mux.memory.stream.events import Moment, Stream, StreamBuilder
from megatron_mux.tasks import TaskSpec

CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 12,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192,
}  # fmt: skip
WEIGHTS, ADAPTER, MOMENTS = 1000, 10, 20
"""Bytes of a layer that last: of the backbone, of a task, of its optimizer after the first step."""
CHUNK = 512
"""Rows of a chunk of logits."""

RowBytes = Callable[[float], int]
"""Bytes that a layer keeps of so many rows."""


def signature(**adapter: Any) -> Signature:
    """Of a LoRA task."""
    task = {"name": "t", "adapter": {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], **adapter}}
    data = {"data": {"path": "none"}, "training": {"max_steps": 3}}
    return signature_of(TaskSpec.model_validate({**task, **data}).plain())


def base() -> RunSpec:
    """A run on one rank."""
    return RunSpec(CONFIG, (), Plan("auto", 1, ()))


def played(groups: list[Group], layers: int, kept: RowBytes) -> Windows:
    """A rehearsal of two signatures whose layers keep bytes by rows, and the same again while they go backward."""
    made = rehearsal(base(), [signature(), signature(r=8)], groups, layers, CHUNK)
    rows = _rows(made)
    builder, marks = StreamBuilder(), list[Mark]()

    def mark(what: str) -> None:
        marks.append((len(builder._stream), what))

    builder.allocate(WEIGHTS * layers, Moment("load"))
    for _ in made.run.tasks:
        mark(JOINS)
        builder.allocate(ADAPTER * layers, Moment("join"))
    for step in range(made.run.steps):
        mark(STEP)
        for bucket, group in enumerate(groups):
            mark(f"0F{bucket}.0")
            blocks = [
                builder.allocate(kept(rows[step, bucket]), Moment("forward", i, "op")) for i in range(layers)
            ]
            loss = builder.allocate(64, Moment("forward", None, "loss"))
            mark(f"0B{bucket}.0")
            for layer in reversed(range(layers)):
                builder.free(
                    builder.allocate(int(rows[step, bucket]), Moment("backward", layer, "op")),
                    Moment("backward", layer),
                )
                builder.free(blocks[layer], Moment("backward", layer))
            builder.free(loss, Moment("backward"))
            mark(f"0N{bucket}")
            mark(f"0U{bucket}")
            builder.free(builder.allocate(300, Moment("optimizer", None, "step")), Moment("optimizer"))
            for _ in group if step == 0 else ():
                builder.allocate(MOMENTS * layers, Moment("optimizer", None, "zeros"))
    return Windows(made, Recording(builder.done(), tuple(marks)))


def _rows(made: Rehearsal) -> dict[tuple[int, int], float]:
    """Rows of each step's buckets, as `Windows` reads them off the plan."""
    every = range(len(made.groups))
    marks = tuple(
        (0, what) for step in range(made.run.steps) for what in (STEP, *(f"0F{b}.0" for b in every))
    )
    made = replace(made, warm=0)
    windows = Windows(made, Recording(Stream.empty((Moment("load"),)), ((0, JOINS), *marks)))
    found: dict[tuple[int, int], float] = {}
    for bucket in every:
        own = windows.of("F", bucket)
        for window, rows in zip(own, windows.contents(own).rows.sum(axis=1), strict=True):
            found[window.step, bucket] = float(np.round(rows))
    return found
