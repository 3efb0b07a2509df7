"""Dividing layers among the stages of a pipeline.

A split counts the layers of every stage in the order of the model. With several stages to a rank (virtual stages),
stage `s` is on rank `s % ranks`, as in Megatron.
"""

from __future__ import annotations

import re
from itertools import accumulate, pairwise

from megatron_mux.errors import UserError

Split = tuple[int, ...]
"""`[S]` number of layers of each stage."""


def even_split(layers: int, stages: int) -> Split:
    """Divide layers evenly; if there is a remainder, the first stages get one more each."""
    base, more = divmod(layers, stages)
    return tuple(base + (stage < more) for stage in range(stages))


def split_between(layers: int, stages: int, first: int | None, last: int | None) -> Split:
    """Divide layers among stages of which the first and the last have given numbers of them.

    Args:
        stages: Number of stages, at least two.
        first, last: Number of layers of those stages; None: like the others.

    Raises:
        UserError: The layers do not suffice, or some are left over.
    """
    left = layers - (first or 0) - (last or 0)
    others = stages - (first is not None) - (last is not None)
    if left < others or (not others and left):
        raise UserError(
            "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers leave "
            f"{left} of {layers} layers for {others} stages"
        )
    between = even_split(left, others) if others else ()
    return (*([first] if first else []), *between, *([last] if last else []))


def stage_layers(split: Split) -> list[range]:
    """Global indices of each stage's layers."""
    return [range(start, stop) for start, stop in pairwise(accumulate(split, initial=0))]


def parse_layout(text: str) -> Split:
    """Read Megatron's `--pipeline-model-parallel-layout`, for instance `Et*3|(t|)*4,t*2,L`.

    `E` is the embedding, `t` a layer, `L` the loss, `|` the end of a stage; `x*n` repeats a letter or a group in
    parentheses; commas are ignored.

    Raises:
        UserError: The text is malformed, embedding and loss are not at the ends, or a stage has no layer.
    """
    flag = f"--pipeline-model-parallel-layout {text}"
    flat = text.replace(",", "").replace(" ", "")
    repeated = re.compile(r"(?:\(([EtLm|]*)\)|([EtLm|]))\*(\d+)")
    while (found := repeated.search(flat)) is not None:
        group, letter, times = found.groups()
        if int(times) * len(group or letter) > 100_000:
            raise UserError(f"{flag}: repeats too much")
        flat = flat[: found.start()] + (group or letter) * int(times) + flat[found.end() :]
    if "m" in flat:
        raise UserError(f"{flag}: layers for multi-token prediction (m) are not supported")
    if re.fullmatch(r"E[t|]*L", flat) is None:
        raise UserError(
            f"{flag}: must be E (embedding), layers t with a | after each stage, L (loss), like Et*4|t*4L"
        )
    counts = tuple(stage.count("t") for stage in flat.split("|"))
    if not all(counts):
        raise UserError(f"{flag}: stage {counts.index(0)} has no layer: give each at least one")
    return counts
