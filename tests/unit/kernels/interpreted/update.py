"""Triton's optimizer step against torch.

`test_triton_interpreted.py` runs it in Triton's interpreter, `tests/gpu/test_triton_on_gpu.py` on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import triton
from torch import Tensor

from megatron_mux.kernels.update.table import ENTRY, LAUNCHES, TILE, Piece, UpdateTable, options_of
from megatron_mux.kernels.update.triton import squared_norms, update_

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
assert (DEVICE.type == "cpu") == triton.knobs.runtime.interpret


@dataclass(frozen=True)
class Task:
    """What a task's optimizer is told."""

    sizes: tuple[int, ...]
    learning_rate: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_norm: float = 1.0
    adam: bool = True


TASKS = (
    Task((5000, 8)),
    Task((3,), 3e-3, (0.8, 0.95), 1e-6, 0.1, 0.0),
    Task(()),
    Task((4096, 1, 100), 1e-1, weight_decay=0.01, max_norm=3.0, adam=False),
    Task((2048,), weight_decay=0.5, max_norm=1e-3),
)


def pieces_of(tasks: tuple[Task, ...], copies: torch.dtype | None = torch.float16) -> list[Piece]:
    """A piece for each size; every second one of a task has its weights decayed."""
    generator = torch.Generator().manual_seed(0)
    pieces = []
    for row, task in enumerate(tasks):
        for i, size in enumerate(task.sizes):
            value = torch.randn(size, generator=generator).to(DEVICE)
            first, second = (torch.zeros_like(value), torch.zeros_like(value)) if task.adam else (None, None)
            copy = None if copies is None else torch.zeros_like(value, dtype=copies)
            decay = task.weight_decay * (i % 2 == 0)
            pieces.append(Piece(row, value, torch.zeros_like(value), first, second, copy, decay))
    return pieces


def optimizers(
    tasks: tuple[Task, ...], pieces: list[Piece]
) -> tuple[list[list[torch.nn.Parameter]], list[torch.optim.Optimizer | None]]:
    """The same by torch."""
    parameters: list[list[torch.nn.Parameter]] = [[] for _ in tasks]
    found: list[torch.optim.Optimizer | None] = []
    for row, task in enumerate(tasks):
        own = [piece for piece in pieces if piece.row == row]
        parameters[row] = [torch.nn.Parameter(piece.value.clone()) for piece in own]
        groups = [
            {"params": [p], "weight_decay": piece.weight_decay}
            for p, piece in zip(parameters[row], own, strict=True)
        ]
        if not groups:
            found.append(None)
        elif task.adam:
            found.append(
                torch.optim.AdamW(
                    groups, lr=task.learning_rate, betas=task.betas, eps=task.epsilon, fused=True
                )
            )
        else:
            found.append(torch.optim.SGD(groups, lr=task.learning_rate, fused=True))
    return parameters, found


def options(tasks: tuple[Task, ...], step: int) -> Tensor:
    rows = [options_of(t.learning_rate, *t.betas, t.epsilon, t.max_norm, step) for t in tasks]
    return torch.tensor(rows, dtype=torch.float64, device=DEVICE)


@pytest.mark.parametrize(
    ("copies", "precision"),
    # The interpreter truncates to bf16; GPUs round.
    [(torch.float16, 2.0**-11), (torch.bfloat16, 2.0**-7), (None, 0.0)],
)
def test_steps_equal_those_of_torch(copies: torch.dtype | None, precision: float) -> None:
    pieces = pieces_of(TASKS, copies)
    parameters, steppers = optimizers(TASKS, pieces)
    table = UpdateTable(pieces, len(TASKS))
    generator = torch.Generator().manual_seed(1)
    for step in range(1, 4):
        for piece in pieces:
            piece.gradient.copy_(torch.randn(piece.gradient.shape, generator=generator))
        for row, (task, own, stepper) in enumerate(zip(TASKS, parameters, steppers, strict=True)):
            for p, piece in zip(own, [piece for piece in pieces if piece.row == row], strict=True):
                p.grad = piece.gradient.clone()
            if stepper is not None:
                if task.max_norm:
                    torch.nn.utils.clip_grad_norm_(own, task.max_norm)
                stepper.step()
        norms = squared_norms(table).sqrt()
        update_(table, options(TASKS, step), norms, torch.zeros(len(TASKS), dtype=torch.bool, device=DEVICE))
    wanted = [p for own in parameters for p in own]
    for piece, p in zip(pieces, wanted, strict=True):
        torch.testing.assert_close(piece.value, p.detach(), rtol=2e-6, atol=1e-7)
        assert not piece.gradient.any()
        if piece.copy is not None:
            torch.testing.assert_close(piece.copy.float(), piece.value, rtol=precision, atol=1e-7)


def test_squared_norms() -> None:
    pieces = [replace(piece, counted=i != 1) for i, piece in enumerate(pieces_of(TASKS))]
    for i, piece in enumerate(pieces):
        piece.gradient.normal_() if i != 1 else piece.gradient.fill_(float("nan"))
    found = squared_norms(UpdateTable(pieces, len(TASKS)))
    for row in range(len(TASKS)):
        squares = [p.gradient.double().square().sum() for p in pieces if p.row == row and p.counted]
        torch.testing.assert_close(
            found[row], sum(squares, torch.zeros((), dtype=torch.float64, device=DEVICE))
        )
    # Alone, a task's norm has the same bits.
    for row in (0, 3):
        alone = [replace(piece, row=0) for piece in pieces if piece.row == row]
        assert torch.equal(squared_norms(UpdateTable(alone, 1))[0], found[row])


@pytest.mark.parametrize("before", [0, 2**31 // TILE])
def test_a_tile_of_a_piece_of_2_31_elements(before: int) -> None:
    """The table is edited: the only tile that is there has so many before it, of a piece of 2^31 elements and more."""
    task = Task((TILE,), max_norm=0.0)
    pieces = pieces_of((task,))
    pieces[0].gradient.fill_(0.5)
    start = pieces[0].value.clone()
    table = UpdateTable(pieces, 1)
    table.entries[0, ENTRY.index("count")] = 2**31 + TILE
    for field, width in (("value", 4), ("gradient", 4), ("exp_avg", 4), ("exp_avg_sq", 4), ("copy", 2)):
        table.entries[0, ENTRY.index(field)] -= before * TILE * width
    table.of_pieces.copy_(torch.tensor([-before, 1]))
    assert squared_norms(table).item() == 0.25 * TILE
    skip = torch.zeros(1, dtype=torch.bool, device=DEVICE)
    update_(table, options((task,), 1), torch.ones(1, dtype=torch.float64, device=DEVICE), skip)
    assert not pieces[0].gradient.any() and (pieces[0].value != start).all()


@pytest.mark.parametrize("sizes", [(1200,), (77, 2049)])
def test_a_task_that_skips_keeps_what_it_has(sizes: tuple[int, ...]) -> None:
    tasks = (Task(sizes), Task(sizes), Task(sizes))
    pieces = pieces_of(tasks)
    before = [replace(p, value=p.value.clone()) for p in pieces]
    for piece in pieces:
        piece.gradient.fill_(float("nan") if piece.row == 1 else 0.5)
    table = UpdateTable(pieces, 3)
    norms = squared_norms(table).sqrt()
    update_(table, options(tasks, 1), norms, ~torch.isfinite(norms))
    for piece, old in zip(pieces, before, strict=True):
        assert piece.exp_avg is not None and piece.copy is not None
        assert not piece.gradient.any()
        if piece.row == 1:
            assert torch.equal(piece.value, old.value)
            assert not piece.exp_avg.any() and not piece.copy.any()
        else:
            assert torch.isfinite(piece.value).all() and not torch.equal(piece.value, old.value)


def test_launches_are_as_declared(launches: list[str]) -> None:
    table = UpdateTable(pieces_of(TASKS), len(TASKS))
    norms = squared_norms(table)
    assert len(launches) == LAUNCHES["squared_norms"]
    launches.clear()
    update_(table, options(TASKS, 1), norms, torch.zeros(len(TASKS), dtype=torch.bool, device=DEVICE))
    assert len(launches) == LAUNCHES["update_"]
