"""Sessions on one body: over one set of parameters, isolated, saved exactly, attached whole or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_mux.adapters.kind import AdapterSpec
from megatron_mux.adapters.registry import KINDS
from megatron_mux.backbone.model import Backbone
from megatron_mux.errors import UserError
from megatron_mux.runtime import Parallel
from megatron_mux.split.protocol.pieces import Piece, from_index, to_index
from megatron_mux.split.server.body import Body, Rows, unique_bytes
from megatron_mux.tasks import TrainingSpec
from tests import tiny_models

SECTIONS: dict[str, dict[str, Any]] = {
    "lora": {"peft_type": "LORA", "r": 4, "lora_dropout": 0.2, "target_modules": "all-linear"},
    "prefix": {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 3},
    "bottleneck": {"peft_type": "BOTTLENECK", "bottleneck_size": 5},
    "ia3": {"peft_type": "IA3"},
    "diff": {"peft_type": "DIFF_PRUNING", "l0_weight": 0.01},
    "vera": {"peft_type": "VERA", "r": 8},
    "loha": {"peft_type": "LOHA", "r": 3},
}
BODY, STEPS = range(1, 4), 6
"""Diff pruning freezes its mask after two thirds of the steps."""


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    path = tiny_models.make(tmp_path_factory.mktemp("backbone"), "llama-biases")
    return Backbone.load(
        path, Parallel.alone("cpu"), torch.float64, split=(1, len(BODY), 0), stage=1, ends=False
    )


def section(kind: str) -> AdapterSpec:
    return KINDS[SECTIONS[kind]["peft_type"]].model_validate(SECTIONS[kind])


def training(**fields: Any) -> TrainingSpec:
    return TrainingSpec(learning_rate=0.05, max_steps=STEPS, max_grad_norm=0.5, weight_decay=0.1, **fields)


def add(body: Body, kind: str, initial: Sequence[Piece] = (), **fields: Any) -> None:
    body.add(kind, section(kind), training(**fields), BODY, STEPS, initial)


def rows_of(body: Body, kind: str, step: int, trains: bool = True, lengths: tuple[int, ...] = (5, 9)) -> Rows:
    generator = torch.Generator().manual_seed(1000 * step + len(kind))
    hidden = torch.randn(sum(lengths), body.backbone.shape.hidden, generator=generator, dtype=torch.float64)
    return Rows(kind, lengths, tuple(range(len(lengths))), step, trains, hidden, needs_input=True)


def passes(body: Body, rows: Sequence[Rows], gradients: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Output and gradient of the input of each session's rows, computed as one micro-batch."""
    outputs, kept = body.forward(rows, BODY, graph=True)
    assert kept is not None
    made = body.backward(kept, gradients)
    return [(out, own) for out, own in zip(outputs, made, strict=True) if own is not None]


def step_of(body: Body, kind: str, step: int) -> float:
    """A step of one session by itself, on random rows; its squared norm."""
    rows = rows_of(body, kind, step)
    passes(body, [rows], [rows.hidden.flip(0)])
    square = body.squared_norm(kind, step)
    body.update(kind, step, square**0.5, skip=False)
    return square


def tensors_of(body: Body, kind: str) -> dict[tuple[str, str], Tensor]:
    return {(piece.key, piece.kind): piece.tensor for piece in body.state(kind)}


def assert_same(found: dict[tuple[str, str], Tensor], wanted: dict[tuple[str, str], Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())


@pytest.mark.parametrize("spoilt", ["lora", "prefix", "diff"])
@pytest.mark.parametrize("what", ["hidden", "gradient", "adapter"])
def test_a_nan_of_one_session_reaches_no_other(body: Body, spoilt: str, what: str) -> None:
    for kind in SECTIONS:
        add(body, kind)
        step_of(body, kind, 0)  # adapters begin as nothing: let them be something
    rows = [rows_of(body, kind, 1) for kind in SECTIONS]
    gradients = [own.hidden.flip(0) for own in rows]
    wanted = passes(body, rows, gradients)
    squares = {kind: body.squared_norm(kind, 1) for kind in SECTIONS}
    for kind in SECTIONS:
        body.zero(kind)
    at = list(SECTIONS).index(spoilt)
    target = {"hidden": rows[at].hidden, "gradient": gradients[at]}.get(what)
    if target is None:
        target = body.adapters.tasks[spoilt].flat_params.values
    target.view(-1)[3] = float("nan")
    found = passes(body, rows, gradients)
    for kind, own, other in zip(SECTIONS, found, wanted, strict=True):
        assert all(map(torch.equal, own, other)) is (kind != spoilt), kind
        assert (body.squared_norm(kind, 1) == squares[kind]) is (kind != spoilt), kind


def test_all_sessions_share_one_storage_of_the_parameters(body: Body, backbone: Backbone) -> None:
    before = {p.untyped_storage().data_ptr() for p in backbone.model.parameters()}
    shared = body.shared_bytes
    for kind in SECTIONS:
        add(body, kind)
    modules: list[Any] = [op.info.module for op in body.adapters.ops]
    used = {module.weight.untyped_storage().data_ptr() for module in modules}
    assert used <= before == {p.untyped_storage().data_ptr() for p in backbone.model.parameters()}
    assert body.shared_bytes == shared
    tensors = [*backbone.model.parameters()]
    for kind in SECTIONS:
        member = body._members[kind]
        flat_params = member.adapter.flat_params
        tensors += [flat_params.values, flat_params.gradients, *member.optimizer.tensors]
        tensors += [record.value for record in member.adapter.fixed]
    held = shared + sum(map(body.bytes_of, SECTIONS))
    assert unique_bytes(tensors) == held, "nothing is held twice, nothing else"


@pytest.mark.parametrize("kind", ["lora", "prefix"])
@pytest.mark.parametrize("value", [1e308, -1e200, 0.0])
def test_a_session_computed_together_with_an_absurd_one_is_as_it_would_be_alone(
    body: Body, kind: str, value: float
) -> None:
    """Values that overflow stay within the rows of their own session."""
    for name in ("victim", "absurd"):
        body.add(name, section(kind), training(), BODY, STEPS)
    victim = rows_of(body, "victim", 0)
    absurd = replace(victim, session="absurd", hidden=torch.full_like(victim.hidden, value))
    found = []
    for rows in ([victim], [absurd, victim]):
        gradients = [torch.full_like(victim.hidden, 1e308)] * (len(rows) - 1) + [victim.hidden.flip(0)]
        output, made = passes(body, rows, gradients)[-1]
        found.append((output, made, torch.tensor(body.squared_norm("victim", 0))))
        for own in rows:
            body.zero(own.session)
    for alone, together in zip(*found, strict=True):
        torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("steps", [2, 5], ids=["before the mask is frozen", "after"])
@pytest.mark.parametrize("optim", ["adamw_torch", "lion_32bit", "sgd"])
def test_a_session_goes_on_from_its_save_to_the_bit(body: Body, steps: int, optim: str) -> None:
    for kind in SECTIONS if optim == "sgd" or steps == 2 else ("diff", "prefix"):
        add(body, kind, optim=optim)
        for step in range(steps):
            step_of(body, kind, step)
        state = body.state(kind)
        saved = from_index(to_index(state), [piece.tensor for piece in state])
        at = tensors_of(body, kind)
        square = step_of(body, kind, steps)
        wanted = tensors_of(body, kind)
        body.remove(kind)
        add(body, kind, saved, optim=optim)
        assert_same(tensors_of(body, kind), at)
        assert step_of(body, kind, steps) == square
        assert_same(tensors_of(body, kind), wanted)


def test_a_skipped_step_leaves_everything_as_it_was(body: Body) -> None:
    for kind in SECTIONS:
        add(body, kind)
        step_of(body, kind, 0)
        before, rows = tensors_of(body, kind), rows_of(body, kind, 1)
        passes(body, [rows], [rows.hidden.flip(0)])
        square = body.squared_norm(kind, 1)
        assert body.squared_norm(kind, 1) == square  # the regulariser is added once
        body.update(kind, 1, float("nan"), skip=True)
        assert_same(tensors_of(body, kind), before)
        assert not body.adapters.tasks[kind].flat_params.gradients.any()
        passes(body, [rows], [rows.hidden.flip(0)])
        assert body.squared_norm(kind, 1) == square


def test_a_forward_pass_without_a_graph_computes_the_same_and_keeps_nothing(body: Body) -> None:
    for kind in SECTIONS:
        add(body, kind)
        step_of(body, kind, 0)
    rows = [rows_of(body, kind, 1) for kind in SECTIONS]
    plain, nothing = body.forward(rows, BODY, graph=False)
    outputs, kept = body.forward(rows, BODY, graph=True)
    assert nothing is None and kept is not None
    assert all(map(torch.equal, plain, outputs))
    assert not any(own.requires_grad for own in (*plain, *outputs))
    evaluated, _ = body.forward([rows_of(body, kind, 1, trains=False) for kind in SECTIONS], BODY, False)
    differ = {
        kind
        for kind, one, other in zip(SECTIONS, plain, evaluated, strict=True)
        if not torch.equal(one, other)
    }
    assert differ == {"lora", "diff"}  # dropout, and a mask that is drawn


def piece_of(body: Body, **changes: Any) -> Piece:
    """Zeros for a vector of IA3, but for some fields."""
    key, tensor = next(
        own for own in section("ia3").tensors(body.backbone.shape).items() if own[1].layer in BODY
    )
    fields = {"key": key, "kind": "value", "shape": tensor.shape, "tensor": torch.zeros(tensor.shape)}
    return Piece(**{**fields, **changes})


def test_pieces_that_are_not_the_adapters_are_refused_and_leave_nothing(body: Body) -> None:
    huge = {"shape": (2**31 - 1, 2**20), "tensor": torch.zeros(1, 2**20), "dim": 0, "runs": ((0, 1),)}
    first = piece_of(body)
    for wrong, words in (
        ([piece_of(body, **huge)], "the adapter needs"),
        ([piece_of(body, key="elsewhere")], "does not have it"),
        ([first, piece_of(body, kind="exp_avg")], "optimizer state has no"),
        (
            [first, piece_of(body, kind="exp_avg"), piece_of(body, kind="exp_avg_sq")],
            "optimizer state has no",
        ),
    ):
        with pytest.raises(UserError, match=words):
            add(body, "ia3", wrong)
        assert not body.adapters.tasks
        assert not any("forward" in vars(op.info.module) for op in body.adapters.ops)
    add(body, "ia3", [first])
    assert not tensors_of(body, "ia3")[first.key, "value"].any()
