"""The rows of `gpu_table.py`: which tasks train on which backbone, against which rivals. In order of importance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from workload import TINY_MIX, Pair, TaskShape

from megatron_mux.quantised.scheme import QuantMethod

QV = ("q_proj", "v_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
RANKS = (8, 16, 32, 64)
LLAMA, QWEN = "llama3-8b", "qwen3-30b-a3b"


@dataclass(frozen=True)
class Row:
    """What one row measures.

    Attributes:
        name: Its name in the results.
        shape, layers: Of the backbone; `layers` None: those of the shape.
        mix: The tasks.
        seconds: It begins only if as much time is left.
        burst: Steps of a turn; see `gpu_sides`.
        targets, parameters: Modules, and parameters of experts, that get a LoRA adapter.
        dropout: LoRA dropout.
        rival: How PEFT trains: `packed` or `padded`; None: only our side is measured.
        chunk: Tokens of a chunk, on our side.
        quantise: How linear weights are quantised, on all sides.
        processes: Whether as many processes of PEFT as tasks are measured on the one GPU at once.
        memory: Number of tasks, the mix repeated, whose memory is measured instead of speed.
    """

    name: str
    shape: str
    layers: int | None
    mix: tuple[TaskShape, ...]
    seconds: int = 30
    burst: int = 4
    targets: tuple[str, ...] = QV
    parameters: tuple[str, ...] = ()
    dropout: float = 0.0
    rival: str | None = "packed"
    chunk: int | None = None
    quantise: QuantMethod | None = None
    processes: bool = False
    memory: int = 0


_LENGTHS_AND_RANKS = ((64, 8), (64, 32), (64, 64), (128, 8), (128, 16), (128, 64), (256, 16), (256, 32))
_MIX = tuple(
    TaskShape(f"task-{i}-{length}", 8, length, rank=rank)
    for i, (length, rank) in enumerate(_LENGTHS_AND_RANKS)
)
"""Eight tasks; every length comes with low and high ranks."""


def mix(sequences: int, tasks: int = 8) -> tuple[TaskShape, ...]:
    """Eight tasks of ranks 8 to 64 and lengths 64 to 256, or half of them, with so many sequences each."""
    chosen = _MIX if tasks == 8 else (_MIX[0], _MIX[4], _MIX[5], _MIX[7])
    return tuple(replace(task, batch=sequences) for task in chosen)


def alike(tasks: int, sequences: int) -> tuple[TaskShape, ...]:
    """Tasks whose sequences have the same lengths, so that tokens are equal for the same number of all sequences."""
    return tuple(TaskShape(f"task-{i}", sequences, 128, rank=RANKS[i % 4]) for i in range(tasks))


def long() -> tuple[TaskShape, ...]:
    """Four tasks of one sequence of 4k to 8k tokens each."""
    return tuple(TaskShape(f"long-{rank}", 1, 8192, rank=rank, min_length=4096) for rank in RANKS)


_DROPOUT: dict[str, Any] = {"targets": ALL_LINEAR, "dropout": 0.1, "processes": True}
_EXPERTS: dict[str, Any] = {"targets": ATTENTION, "parameters": EXPERTS}

ROWS: tuple[Row, ...] = (
    Row("q v, 8 sequences", LLAMA, 8, mix(8), 35, 16, processes=True),
    Row("q v, 32 sequences", LLAMA, 8, mix(32), 30, processes=True),
    Row("q v, 128 sequences", LLAMA, 8, mix(128), 55),
    Row("all-linear with dropout, 8 sequences", LLAMA, 8, mix(8), 30, 8, **_DROPOUT),
    Row("all-linear with dropout, 32 sequences", LLAMA, 8, mix(32), 35, **_DROPOUT),
    Row("q v, 8 sequences, 32 layers", LLAMA, 32, mix(8), 45),
    Row("experts, 8 sequences", QWEN, 4, mix(8, 4), 50, **_EXPERTS),
    Row("NF4, 8 sequences", LLAMA, 8, mix(8, 4), 30, quantise="nf4", processes=True),
    Row("q v, 1 x 64 sequences", LLAMA, 8, alike(1, 64), 12, 8),
    Row("q v, 8 x 8 sequences", LLAMA, 8, alike(8, 8), 20, 8, processes=True),
    Row("q v, 64 x 1 sequences", LLAMA, 8, alike(64, 1), 10, 8, rival=None),
    Row("q v, 4k to 8k tokens", LLAMA, 8, long(), 25, processes=True),
    Row("q v, 4k to 8k tokens in chunks", LLAMA, 8, long(), 15, rival=None, chunk=2048),
    Row("32 tasks' memory", LLAMA, 8, mix(8), 20, memory=32),
    Row("q v, 8 sequences, padded", LLAMA, 8, mix(8), 20, rival="padded"),
    Row("experts, 32 sequences", QWEN, 4, mix(32, 4), 45, **_EXPERTS),
)


def tiny(row: Row) -> Row:
    """The same row with a tiny backbone and few short sequences, to try it out on a CPU."""
    tasks = tuple(
        replace(
            task, batch=min(task.batch, 2), max_length=TINY_MIX[i % 4].max_length, rank=8, min_length=None
        )
        for i, task in enumerate(row.mix[:8])
    )
    shape = {LLAMA: "tiny", QWEN: "tiny-experts"}[row.shape]
    chunk = None if row.chunk is None else 16
    return replace(row, shape=shape, layers=2, mix=tasks, burst=2, chunk=chunk, memory=min(row.memory, 4))


def labels_of(pairs: Sequence[Pair]) -> int:
    """Number of tokens that a model is trained to predict."""
    return sum(int(labelled[1:].sum()) for _, labelled in pairs)


def parameters_of(config: Any) -> tuple[float, float]:
    """Weights of the matrices that a token is multiplied with: those of all layers, and the output layer's.

    Args:
        config: Of a Llama or Qwen3-MoE.
    """
    hidden, heads = config.hidden_size, config.num_attention_heads
    dim = getattr(config, "head_dim", None) or hidden // heads
    attention = 2 * hidden * dim * (heads + config.num_key_value_heads)
    if hasattr(config, "num_experts"):
        router = hidden * config.num_experts
        mlp = router + 3 * hidden * config.moe_intermediate_size * config.num_experts_per_tok
    else:
        mlp = 3 * hidden * config.intermediate_size
    return float(config.num_hidden_layers * (attention + mlp)), float(hidden * config.vocab_size)


def operations(config: Any, row: Row, steps: Sequence[Sequence[Sequence[Pair]]]) -> Mapping[str, float]:
    """Floating-point operations of some steps of all tasks.

    Args:
        config: Of the backbone.
        row: Says which adapters train.
        steps: Of each step, the pairs of each task.

    Returns:
        `counted`: 4 for each parameter of the layers and token, and 4 for each parameter of the output layer and
        labelled token; `done`: also those of attention and of the adapters on attention and MLP, without the input
        gradient of the first layer's first products, which nothing needs.
    """
    layers, head = parameters_of(config)
    counted, more = 0.0, 0.0
    hidden, dim = config.hidden_size, getattr(config, "head_dim", None)
    dim = dim or hidden // config.num_attention_heads
    width, key_width = config.num_attention_heads * dim, config.num_key_value_heads * dim
    inner = getattr(config, "intermediate_size", 0)
    sizes = {
        "q_proj": hidden + width, "k_proj": hidden + key_width, "v_proj": hidden + key_width, "o_proj": hidden + width,
        "gate_proj": hidden + inner, "up_proj": hidden + inner, "down_proj": hidden + inner,
    }  # fmt: skip
    for tasks in steps:
        for shape, pairs in zip(row.mix, tasks, strict=True):
            tokens = sum(len(ids) for ids, _ in pairs)
            counted += 4 * layers * tokens + 4 * head * labels_of(pairs)
            squares = sum(len(ids) ** 2 for ids, _ in pairs)
            more += 7 * width * squares * config.num_hidden_layers  # causal: 2 forward, 5 backward
            adapters = shape.rank * sum(sizes[name] for name in row.targets) * config.num_hidden_layers
            more += 6 * adapters * tokens - 2 * hidden * (width + 2 * key_width) * tokens
    return {"counted": counted, "done": counted + more}
