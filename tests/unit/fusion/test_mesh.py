"""Ways to divide ranks among which experts, too, are divided."""

from __future__ import annotations

import pytest

from megatron_mux.errors import UserError
from megatron_mux.expert_ranks import size_problems
from megatron_mux.fusion.mesh import Mesh, possible_meshes
from tests.unit.fusion.planner.test_messages import shape_of


def test_experts_are_divided_as_layers_are_or_kept_whole() -> None:
    shape = shape_of("mixtral")
    divided, whole = (possible_meshes(shape, 4, whole_experts=kept) for kept in (False, True))
    assert Mesh(2, 1, 2, expert=2, expert_tensor=2) in divided
    assert {mesh.expert_tensor for mesh in divided if mesh.tensor == 2} == {2}
    assert Mesh(2, 1, 2, expert=4, expert_tensor=1) in whole, "over tensor ranks and pipelines"
    assert {mesh.expert_tensor for mesh in whole} == {1}
    for mesh in (*divided, *whole):
        assert mesh.ranks == 4 and mesh.expert_tensor is not None
        assert not size_problems(4, mesh.tensor, mesh.pipeline, mesh.expert, mesh.expert_tensor)


def test_without_experts_nothing_is_said_of_them() -> None:
    meshes = possible_meshes(shape_of("llama"), 4)
    assert Mesh(2, 2, 1) in meshes and {mesh.expert_tensor for mesh in meshes} == {None}
    assert not any("expert" in flag for mesh in meshes for flag in mesh.flags)


def test_flags_start_a_run_that_is_divided_so() -> None:
    assert Mesh(2, 1, 2, expert=4, expert_tensor=1).flags == [
        *("--tensor-model-parallel-size", "2"),
        *("--expert-model-parallel-size", "4"),
        *("--expert-tensor-parallel-size", "1"),
        "--sequence-parallel",
    ]
    assert Mesh(managers=2, expert_tensor=1).flags == ["--mux-expert-managers", "2"]


@pytest.mark.parametrize("residence", ["sharded", "sharded-offloaded"])
def test_weights_are_not_shared_out_among_pipelines_with_unlike_experts(residence: str) -> None:
    with pytest.raises(UserError, match=f"--weights {residence}: divides weights over pipelines"):
        Mesh(data=2, expert=2, expert_tensor=1).refuse_residence("--weights", residence)
    for mesh in (Mesh(data=2, expert_tensor=1), Mesh(2, data=2, expert=2, expert_tensor=1)):
        mesh.refuse_residence("--weights", residence)
    Mesh(data=2, expert=2, expert_tensor=1).refuse_residence("--weights", "offloaded")


def test_memory_is_predicted_where_ranks_hold_their_part_of_the_experts() -> None:
    assert Mesh(2).predicts_memory and Mesh(2, expert_tensor=2).predicts_memory
    assert Mesh(2, expert=2, expert_tensor=1).predicts_memory
    assert not Mesh(2, expert_tensor=1).predicts_memory, "each of two ranks holds all experts"
    assert not Mesh(managers=2, expert_tensor=1).predicts_memory
