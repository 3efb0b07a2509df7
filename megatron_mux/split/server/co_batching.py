"""Whether requests of several clients are faster as one micro-batch, as measured on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from megatron_mux.split.server.body import Body, Rows
from megatron_mux.tasks import TrainingSpec

_SIZES = (64, 128, 256, 512, 1024)
"""Rows that are tried together, in requests of the smallest size."""

_WORTH = 0.97
"""Share of the time one by one that computing together may take at most."""

_ROUNDS = 5


def measure_co_batching(body: Body, layers: range) -> int:
    """The most rows that are worth computing together; 0 if it never pays.

    Frozen layers alone are timed, on random rows: requests of 64 tokens one by one against all of them at once, in
    turns. Larger micro-batches than the largest measured are not made.

    Args:
        body: Computes; no session is in it yet.
        layers: Its layers; a few of them are timed.
    """
    from megatron_mux.adapters.registry import KINDS

    part, smallest = layers[: min(4, len(layers))], _SIZES[0]
    kind = KINDS["LORA"].model_validate({"peft_type": "LORA", "r": 8})
    names = [f"probe/{i}" for i in range(_SIZES[-1] // smallest)]
    backbone = body.backbone
    hidden = torch.randn(smallest, backbone.shape.hidden, generator=torch.Generator().manual_seed(0))
    hidden = hidden.to(backbone.device, backbone.dtype)
    for name in names:
        body.add(name, kind, TrainingSpec(max_steps=1), part, 1)
    rows = [Rows(name, (smallest,), (0,), 0, False, hidden) for name in names]

    def seconds(groups: Sequence[Sequence[Rows]]) -> float:
        began = time.perf_counter()
        for group in groups:
            body.forward(group, part, graph=False)
        if backbone.device.type == "cuda":
            torch.cuda.synchronize(backbone.device)
        return time.perf_counter() - began

    best = 0
    try:
        seconds([rows[:1]])
        for size in _SIZES[1:]:
            some = rows[: size // smallest]
            alone, together = zip(
                *[(seconds([[row] for row in some]), seconds([some])) for _ in range(_ROUNDS)], strict=True
            )
            if min(together) > _WORTH * min(alone):  # the least: other processes only add to it
                break
            best = size
    finally:
        for name in names:
            body.remove(name)
    return best
