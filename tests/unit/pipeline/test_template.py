"""Templates are complete, ordered and free of deadlock for any number of stages, micro-batches and chunks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mux.pipeline.action import Action, Kind
from megatron_mux.pipeline.bucket import BucketCost, Sizes
from megatron_mux.pipeline.simulate import simulate
from megatron_mux.pipeline.template import (
    Template,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    plain,
)

Maker = Callable[[int, Sizes], Template]

sizes = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3)), min_size=1, max_size=4)


def cut(of: list[tuple[int, int]]) -> list[list[int]]:
    """Sizes of buckets of (micro-batches, chunks of each)."""
    return [[chunks] * count for count, chunks in of]


def costs(stages: int, of: list[tuple[int, int]]) -> list[BucketCost]:
    return [BucketCost(count, (1.0,) * stages, (1.0,) * stages, chunks) for count, chunks in of]


@given(
    st.integers(0, 99),
    st.sampled_from(["F", "B"]),
    st.integers(0, 99),
    st.integers(0, 99),
    st.integers(0, 9),
)
def test_action_string_form_round_trips(
    stage: int, kind: Kind, bucket: int, micro_batch: int, chunk: int
) -> None:
    action = Action(stage, kind, bucket, micro_batch, chunk)
    assert Action.parse(str(action)) == action


def test_chunk_zero_is_not_written() -> None:
    assert [str(Action(0, "F", 1, 3, chunk)) for chunk in (0, 2)] == ["0F1.3", "0F1.3.2"]


@pytest.mark.parametrize("text", ["", "0F1", "F1.2", "0X1.2", "0F1.2 ", "-1F0.0", "0F1.2.", "0F1.2.3.4"])
def test_action_refuses_other_text(text: str) -> None:
    with pytest.raises(ValueError, match="is not an action"):
        Action.parse(text)


@given(st.sampled_from([gpipe, one_f_one_b]), st.integers(1, 5), sizes)
def test_templates_can_be_run(make: Maker, stages: int, of: list[tuple[int, int]]) -> None:
    # `simulate` checks that all passes are there, in order, and that nothing waits for ever.
    template = make(stages, cut(of))
    found = simulate(template, costs(stages, of))
    assert sum(len(actions) for actions in found.timed) == 2 * stages * sum(m * c for m, c in of)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 4))
def test_interleaved_can_be_run(ranks: int, virtual: int, groups: int) -> None:
    of = [(ranks * groups, 1)]
    template = interleaved(ranks, virtual, cut(of))
    assert len(template) == ranks
    simulate(template, costs(ranks * virtual, of))


@pytest.mark.parametrize(("of", "said"), [([[1, 1, 1]], "multiple of 2"), ([[2, 2]], "not cut into chunks")])
def test_interleaved_refuses_what_it_cannot_do(of: list[list[int]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        interleaved(2, 2, of)


def _text(template: Template) -> list[str]:
    return [" ".join(str(action)[1:] for action in actions) for actions in template]


def test_one_f_one_b_is_the_known_one() -> None:
    assert _text(one_f_one_b(2, plain([3]))) == [
        "F0.0 F0.1 B0.0 F0.2 B0.1 B0.2",
        "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2",
    ]


def test_chunks_run_backward_in_reverse() -> None:
    assert _text(one_f_one_b(1, plain([2], 2))) == ["F0.0 F0.0.1 B0.0.1 B0.0 F0.1 F0.1.1 B0.1.1 B0.1"]


def test_forward_only_has_no_backward() -> None:
    assert [str(a) for a in forward_only(2, 3)[1]] == ["1F0.0", "1F0.1", "1F0.2"]
