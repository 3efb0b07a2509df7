"""Moving experts between ranks while a run goes on: their frozen weights are sent from rank to rank, not read again.

A layer at a time, so that a rank needs memory for its old and new experts of one layer only.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.backbone.experts.layer import MoELayer
from megatron_mux.expert_ranks import ExpertRanks
from megatron_mux.expert_shape import Move, Placement


def move_experts(layer: MoELayer, before: Placement, after: Placement) -> int:
    """Send a layer's experts where a placement has them. A collective of the expert ranks, between steps.

    Ranks that divide an expert's matrices each send their part to their like.

    Returns:
        Bytes that this rank received.
    """
    own, moves = layer.ranks.rank, before.moves(after, layer.layer)
    operators = layer.experts_fc1, layer.experts_fc2
    kept = [dict(zip(layer.held, operator.matrices.unbind(), strict=True)) for operator in operators]
    received = 0
    if moves:
        rows = [
            torch.cat([matrices[move.expert].flatten() for matrices in kept])
            for move in _in_order(moves)
            if move.source == own
        ]
        came = _exchange(layer, moves, rows)
        arriving = [
            move.expert for move in sorted(moves, key=lambda m: (m.source, m.expert)) if move.target == own
        ]
        received = came.nbytes
        for expert, row in zip(arriving, came, strict=True):
            parts = row.split([operator.in_features * operator.out_features for operator in operators])
            for operator, matrices, part in zip(operators, kept, parts, strict=True):
                matrices[expert] = part.view(operator.out_features, operator.in_features)
    layer.place(after)
    if layer.held != operators[0].held:  # experts may leave, too, without one that comes
        for operator, matrices in zip(operators, kept, strict=True):
            operator.place(layer.held, [matrices[expert] for expert in layer.held])
    return received


def _in_order(moves: list[Move]) -> list[Move]:
    """Rank by rank, as messages are laid out."""
    return sorted(moves, key=lambda move: (move.target, move.expert))


def _exchange(layer: MoELayer, moves: list[Move], rows: list[Tensor]) -> Tensor:
    """Send rows, one for each expert that leaves this rank, and return those that come: `[experts, values]`."""
    ranks, weight = layer.ranks, layer.experts_fc1.weight
    width = sum(
        operator.in_features * operator.out_features for operator in (layer.experts_fc1, layer.experts_fc2)
    )
    outgoing, incoming = (_counts(moves, ranks, sends) for sends in (True, False))
    sent = torch.stack(rows) if rows else weight.new_empty(0, width)
    came = weight.new_empty(sum(incoming), width)
    dist.all_to_all_single(came, sent.detach(), incoming, outgoing, group=ranks.group)
    return came


def _counts(moves: list[Move], ranks: ExpertRanks, sends: bool) -> list[int]:
    """Experts that this rank sends to each process of the group, or receives from each."""
    counts = [0] * ranks.group.size()
    for move in moves:
        here, there = (move.source, move.target) if sends else (move.target, move.source)
        if here == ranks.rank:
            counts[there * ranks.tensor_size + ranks.tensor_rank] += 1
    return counts


def trial_seconds(ranks: ExpertRanks, device: torch.device, size: int) -> float:
    """Seconds in which each process sends so many bytes to that of the next rank with experts. A collective.

    A master has no experts: it takes part, and sends nothing. Timed the second time: the first one connects.
    """
    here, count = ranks.group.rank(), ranks.group.size()
    first = ranks.first_worker
    outgoing, incoming = [0] * count, [0] * count
    if here >= first:
        place, places, step = here - first, count - first, ranks.tensor_size
        outgoing[first + (place + step) % places] = size
        incoming[first + (place - step) % places] = size
    sent, came = (torch.zeros(sum(sizes), dtype=torch.uint8, device=device) for sizes in (outgoing, incoming))
    seconds = 0.0
    for _ in range(2):
        dist.barrier(ranks.group)
        began = time.perf_counter()
        dist.all_to_all_single(came, sent, incoming, outgoing, group=ranks.group)
        if len(came):
            int(came[-1])  # until it is there
        seconds = time.perf_counter() - began
    return seconds
