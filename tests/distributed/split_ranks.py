"""A body on several ranks against the same body on one: what both tests of it do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.adapters.registry import KINDS
from megatron_mux.backbone.model import Backbone
from megatron_mux.backbone.split import even_split
from megatron_mux.errors import UserError
from megatron_mux.runtime import Parallel
from megatron_mux.split.protocol.agreement import Proposal
from megatron_mux.split.protocol.pieces import Piece, assemble
from megatron_mux.split.server.body import Body, Rows
from megatron_mux.split.server.ranks import LeadingBody, StagedBody, follow
from megatron_mux.split.server.session_memory import profile
from megatron_mux.split.server.session_prediction import BodyPlace, SessionPredictor
from megatron_mux.tasks import TrainingSpec
from tests import tiny_models
from tests.unit.split.counted import meter

LAYERS, STEPS = 6, 3
TRAINING = TrainingSpec(learning_rate=0.02, max_steps=9, weight_decay=0.1, seed=3)
SESSIONS: dict[str, tuple[dict[str, Any], range]] = {
    "lora": ({"peft_type": "LORA", "r": 4, "lora_dropout": 0.2, "target_modules": "all-linear"}, range(1, 6)),
    "prefix": ({"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 3}, range(2, 5)),
    "bottleneck": ({"peft_type": "BOTTLENECK", "bottleneck_size": 5}, range(4, 6)),
    "twin": ({"peft_type": "LORA", "r": 8}, range(1, 6)),
}


def load(path: Path, parallel: Parallel) -> Backbone:
    """This rank's part of layers 1 to 5."""
    split = (1, *even_split(LAYERS - 1, parallel.pp_size), 0)
    return Backbone.load(path, parallel, torch.float64, split=split, stage=1 + parallel.pp_rank, ends=False)


def add(body: Body, name: str, pieces: list[Piece] | None = None) -> None:
    section, layers = SESSIONS[name]
    adapter = KINDS[section["peft_type"]].model_validate(section)
    body.add(name, adapter, TRAINING, layers, 9, pieces or [])


def rows(name: str, step: int) -> Rows:
    generator = torch.Generator().manual_seed(100 * step + len(name))
    hidden = torch.randn(11, 32, dtype=torch.float64, generator=generator)
    return Rows(name, (4, 7), (0, 1), step, True, hidden, needs_input=True)


def train(body: Body, groups: list[list[str]], first: int, steps: int, keep: bool) -> list[Tensor]:
    """Optimizer steps of sessions; returns everything that clients would get."""
    found: list[Tensor] = []
    for step in range(first, first + steps):
        for names in groups:
            own, layers = [rows(name, step) for name in names], SESSIONS[names[0]][1]
            outputs, kept = body.forward(own, layers, graph=keep)
            if kept is None:
                _, kept = body.forward(own, layers, graph=True)
            assert kept is not None
            gradients = body.backward(kept, [output.sin() for output in outputs])
            for name, output, gradient in zip(names, outputs, gradients, strict=True):
                square = body.squared_norm(name, step)
                body.update(name, step, square**0.5, skip=False)
                assert gradient is not None
                found += [output, gradient, torch.tensor([square], dtype=torch.float64)]
    return found


def values(body: Body, name: str) -> dict[str, Tensor]:
    pieces = body.state(name)
    return {
        f"{kind} {key}": t for kind in ("value", "exp_avg_sq") for key, t in assemble(pieces, kind).items()
    }


def lead(body: LeadingBody, alone: Body, together: bool) -> None:
    """What rank 0 does: train on both bodies, save in the middle, and go on from the save."""
    groups = [["lora", "twin"], ["prefix"], ["bottleneck"]] if together else [[name] for name in SESSIONS]
    everything = []
    for one in (body, alone):
        for name in SESSIONS:
            add(one, name)
        found = train(one, groups, 0, STEPS, keep=together)
        saved = {name: one.state(name) for name in SESSIONS}
        for name in SESSIONS:
            one.remove(name)
            add(one, name, saved[name])
        found += train(one, groups, STEPS, 1, keep=False)
        states = {f"{name} {key}": t for name in SESSIONS for key, t in values(one, name).items()}
        everything.append((found, states))
    (found, states), (wanted, reference) = everything
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    assert states.keys() == reference.keys()
    for key, value in reference.items():
        torch.testing.assert_close(states[key], value, rtol=1e-9, atol=1e-10, msg=key)
    broken = KINDS["LORA"].model_validate({"peft_type": "LORA", "target_modules": ["nowhere"]})
    with pytest.raises(UserError, match="nowhere"):
        body.add("broken", broken, TRAINING, range(1, 6), 9)
    rows_left = [rows("lora", STEPS + 1)]
    body.forward(rows_left, SESSIONS["lora"][1], graph=True)  # dropped without a backward
    body.stop()


def compare_memory(body: StagedBody, alone: Body | None) -> None:
    """A session's figures are those of the rank that takes the most, which need not be the first one.

    Args:
        body: This rank's, without sessions.
        alone: On the first rank: a body on one rank.
    """
    name = "bottleneck"  # in the last layers
    section, layers = SESSIONS[name]
    proposal = Proposal(
        task="t",
        fingerprint="f",
        run="0" * 16,
        incarnation="0" * 16,
        cut_front=layers.start,
        cut_back=LAYERS - layers.stop,
        adapter=section,
        training=TRAINING,
        total_steps=9,
        rows=64,
        train_rows=64,
        longest=32,
        sequences=2,
        wire="f64",
    )
    Body.add(body, name, proposal.adapter_spec(), TRAINING, layers, 9)
    ours = profile(body, name, proposal, layers, meter(body.parallel.device, tries=8))
    Body.remove(body, name)
    if alone is None:
        return
    add(alone, name)
    theirs = profile(alone, name, proposal, layers, meter(body.parallel.device))
    alone.remove(name)
    predicted = asyncio.run(SessionPredictor(BodyPlace.of(body, range(1, LAYERS)))(proposal))
    assert predicted.lasting == ours.lasting
    for figure in ("forward", "graph", "backward"):
        late = getattr(ours, figure) - getattr(predicted, figure)
        assert late in (0, ours.hidden), (figure, predicted, ours)  # gloo may still send an earlier message
    at_least = 1 / (body.parallel.tp_size * len(layers))
    for found, wanted in ((ours.graph, theirs.graph), (ours.backward, theirs.backward)):
        assert found > wanted * at_least, (found, wanted)
        if body.parallel.pp_size == 2 and body.parallel.tp_size == 1:  # one stage has all of it
            assert found == pytest.approx(wanted, rel=0.1)


def check(
    joined: Callable[..., Parallel], once: Callable[..., Path], tensor: int, pipeline: int, together: bool
) -> None:
    """Run the test on every rank."""
    path = once(
        "split", lambda directory: tiny_models.make(directory, "llama-biases", num_hidden_layers=LAYERS)
    )
    parallel = joined(tensor, pipeline)
    backbone = load(path / "llama-biases", parallel)
    own = Parallel.alone("cpu")
    alone = None if parallel.rank else Body(load(path / "llama-biases", own), own)
    compare_memory(StagedBody(backbone, parallel), alone)
    if alone is None:
        follow(StagedBody(backbone, parallel))
    else:
        lead(LeadingBody(backbone, parallel), alone, together)
    dist.barrier()
