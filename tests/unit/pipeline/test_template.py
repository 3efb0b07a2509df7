"""Templates are complete, ordered and free of deadlock for any number of stages and micro-batches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mux.pipeline.action import Action
from megatron_mux.pipeline.template import forward_only, one_f_one_b

micro_batches = st.lists(st.integers(0, 6), min_size=1, max_size=4)


@given(st.integers(0, 99), st.sampled_from("FB"), st.integers(0, 99), st.integers(0, 99))
def test_action_string_form_round_trips(stage: int, kind: str, bucket: int, micro_batch: int) -> None:
    action = Action(stage, "F" if kind == "F" else "B", bucket, micro_batch)
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "0F1", "F1.2", "0X1.2", "0F1.2 ", "-1F0.0"])
def test_action_refuses_other_text(text: str) -> None:
    with pytest.raises(ValueError, match="is not an action"):
        Action.parse(text)


@given(st.integers(1, 6), micro_batches)
def test_one_f_one_b_runs_each_pass_once_and_backward_after_forward(stages: int, counts: list[int]) -> None:
    for stage in range(stages):
        actions = one_f_one_b(stage, stages, counts)
        expected = {(b, m) for b, count in enumerate(counts) for m in range(count)}
        for kind in "FB":
            passes = [(a.bucket, a.micro_batch) for a in actions if a.kind == kind]
            assert len(passes) == len(expected) and set(passes) == expected
            assert passes == sorted(passes), "neighbours must agree on the order of transfers"
        position = {(a.kind, a.bucket, a.micro_batch): i for i, a in enumerate(actions)}
        assert all(position["F", b, m] < position["B", b, m] for b, m in expected)


@given(st.integers(1, 6), micro_batches)
def test_one_f_one_b_keeps_few_micro_batches_alive(stages: int, counts: list[int]) -> None:
    for stage in range(stages):
        alive = most = 0
        for action in one_f_one_b(stage, stages, counts):
            alive += 1 if action.kind == "F" else -1
            most = max(most, alive)
        assert most <= stages - stage


@given(st.integers(1, 6), micro_batches)
def test_one_f_one_b_never_deadlocks_with_blocking_receives(stages: int, counts: list[int]) -> None:
    queues = [one_f_one_b(stage, stages, counts) for stage in range(stages)]
    done: set[tuple[int, str, int, int]] = set()
    progressed = True
    while progressed:
        progressed = False
        for stage, queue in enumerate(queues):
            while queue:
                action = queue[0]
                neighbour = stage - 1 if action.kind == "F" else stage + 1
                if (
                    0 <= neighbour < stages
                    and (neighbour, action.kind, action.bucket, action.micro_batch) not in done
                ):
                    break
                done.add((stage, action.kind, action.bucket, action.micro_batch))
                queue.pop(0)
                progressed = True
    assert not any(queues)


def test_forward_only_has_no_backward() -> None:
    assert [str(a) for a in forward_only(1, 3)] == ["1F0.0", "1F0.1", "1F0.2"]
