"""Room of workers divided among pipeline stages."""

from __future__ import annotations

import random

from megatron_mux.training.expert_placer import shared_room


def test_every_stage_has_room_and_no_worker_too_much() -> None:
    drawn = random.Random(2)
    for _ in range(300):
        parts = [drawn.randint(1, 9) for _ in range(drawn.randint(1, 4))]
        experts, workers = drawn.randint(2, 9), drawn.randint(1, 5)
        needed = sum(parts) * experts
        room = [drawn.randint(0, needed) for _ in range(workers - 1)]
        room.append(max(0, needed - sum(room)) + drawn.choice((0, 0, 3)))
        shares = shared_room(room, parts, experts)
        assert [sum(share[n] for share in shares) for n in range(workers)] == room
        assert all(sum(share) >= part * experts for part, share in zip(parts, shares, strict=True)), (
            room,
            parts,
        )
