"""Recordings of a rank that allocates as told, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_mux.dry_run.run_spec import JOINS, STEP, Mark, Recording, RunSpec
from megatron_mux.estimate.rehearsal import rehearsal
from megatron_mux.estimate.windows import Windows
from megatron_mux.footprint.signature import Signature
from megatron_mux.footprint.table import Group
from megatron_mux.fusion.plan import Plan
from megatron_mux.memory.stream.events import Category, Moment, Stream, StreamBuilder
from megatron_mux.pipeline.action import Action, ChunkId
from megatron_mux.tasks import TaskSpec

CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 12,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192,
}  # fmt: skip
WEIGHTS, ADAPTER, MOMENTS = 1000, 10, 20
"""Bytes of a layer that last: of the backbone, of a task, of its optimizer after the first step."""
ONCE = 5000
"""Bytes that last, allocated when the first task joins, and when it is first updated, for all of them."""
COPIED = 3
"""Bytes of a layer for each row of keys and values that is copied."""
MANY = 1900
"""Rows of a micro-batch from which passes take scratch."""
CHUNK = 512
"""Rows of a chunk of logits."""

RowBytes = Callable[[int], int]
"""Bytes that a layer keeps of so many rows."""


def signature(training: Mapping[str, Any] | None = None, **adapter: Any) -> Signature:
    """Of a LoRA task, with fields of its section training."""
    task = {"name": "t", "adapter": {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], **adapter}}
    data = {"data": {"path": "none"}, "training": {"max_steps": 3, **(training or {})}}
    return Signature.of(TaskSpec.model_validate({**task, **data}).plain())


SIGNATURES = [signature(), signature(use_dora=True)]


def base() -> RunSpec:
    """A run on one rank."""
    return RunSpec(CONFIG, (), Plan("auto", 1, ()))


def played(
    groups: list[Group], layers: int, kept: RowBytes, scratch: int = 0, chunks: bool = True
) -> Windows:
    """A rehearsal of two signatures whose layers keep bytes by rows.

    Args:
        groups: Of signatures.
        layers: Of the stage.
        kept: Bytes that a layer keeps of so many rows.
        scratch: Bytes that passes of many rows take behind all else.
        chunks: Whether some micro-batches are cut.
    """
    made = rehearsal(base(), SIGNATURES, groups, layers, CHUNK, chunks=chunks)
    all_chunked = Windows(made, Recording(Stream.empty(), ())).all_chunked
    player = _Player(layers, kept, scratch)
    player.allocate(WEIGHTS * layers, Moment("load"))
    for number, _ in enumerate(made.run.tasks):
        player.mark(JOINS)
        player.allocate(ADAPTER * layers, Moment("join"), Category.ADAPTERS)
        if not number:
            player.allocate(ONCE, Moment("join"))
    for step, (chunked, lengths) in enumerate(all_chunked):
        player.mark(STEP)
        for bucket, own in enumerate(made.run.plan.buckets):
            chunk_ids = sorted(chunk_id for chunk_id in chunked.chunks if chunk_id.bucket == bucket)
            for chunk_id in chunk_ids:
                pieces = [piece for chunk in chunked.chunks[chunk_id] for piece in chunk]
                copied = sum(
                    piece.start + piece.tokens * (piece.stop < lengths[piece.task].tokens[piece.sequence])
                    for piece in pieces
                )
                player.forward(chunk_id, sum(piece.tokens for piece in pieces), copied)
            for chunk_id in reversed(chunk_ids):
                player.backward(chunk_id)
            player.update(bucket, MOMENTS * layers * len(own.tasks) if step == 0 else 0)
            if step == bucket == 0:
                player.allocate(ONCE, Moment("optimizer"))
    return Windows(made, Recording(player.builder.done(), tuple(player.marks)))


class _Player:
    """Writes a recording."""

    def __init__(self, layers: int, kept: RowBytes, scratch: int) -> None:
        self.builder = StreamBuilder()
        self.marks: list[Mark] = []
        self._events = 0
        self._layers, self._kept, self._scratch = layers, kept, scratch
        self._held: dict[ChunkId, tuple[int, list[int], int]] = {}

    def mark(self, what: object) -> None:
        self.marks.append((self._events, str(what)))

    def allocate(self, size: int, moment: Moment, category: Category = Category.OTHER) -> int:
        self._events += 1
        return self.builder.allocate(size, moment, category=category)

    def free(self, block: int, phase: str) -> None:
        self._events += 1
        self.builder.free(block, Moment(phase))

    def forward(self, chunk_id: ChunkId, rows: int, copied: int) -> None:
        self.mark(Action.of(0, "F", chunk_id))
        size = self._kept(rows) + COPIED * copied
        blocks = [self.allocate(size, Moment("forward", layer, "op")) for layer in range(self._layers)]
        self._held[chunk_id] = rows, blocks, self.allocate(64, Moment("forward", None, "loss"))
        self._take(rows, "forward")

    def backward(self, chunk_id: ChunkId) -> None:
        self.mark(Action.of(0, "B", chunk_id))
        rows, blocks, loss = self._held.pop(chunk_id)
        for layer in reversed(range(self._layers)):
            self.free(self.allocate(rows, Moment("backward", layer, "op")), "backward")
            self.free(blocks[layer], "backward")
        self.free(loss, "backward")
        self._take(rows, "backward")

    def _take(self, rows: int, phase: str) -> None:
        if self._scratch and rows > MANY:
            self.free(self.allocate(self._scratch, Moment(phase, None, "scratch")), phase)

    def update(self, bucket: int, moments: int) -> None:
        self.mark(Action(0, "N", bucket))
        self.mark(Action(0, "U", bucket))
        self.free(self.allocate(300, Moment("optimizer", None, "step")), "optimizer")
        if moments:
            self.allocate(moments, Moment("optimizer", None, "zeros"), Category.OPTIMIZER)
