"""Segmentation of graphs into subgraphs."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from megatron_mux.fusion.graphs.subgraphs import LayerSubgraphs, Operator, Subgraph, segment
from megatron_mux.fusion.plan import Plan, dumps, plan_for

KINDS = ("compute", "compute", "compute", "adapter", "all_reduce")


@st.composite
def graphs(draw: st.DrawFn) -> list[Operator]:
    """Operators in topological order, each with up to three inputs."""
    count = draw(st.integers(1, 24))
    found: list[Operator] = []
    for i in range(count):
        inputs = draw(st.lists(st.integers(-2, i - 1), max_size=3, unique=True))
        names = tuple(f"m.o{j}" if j >= 0 else f"input{-j}" for j in inputs)
        found.append(Operator(f"m.o{i}", draw(st.sampled_from(KINDS)), names, float(i + 1), 8 * i))
    return found


@given(graphs())
def test_every_operator_is_in_one_subgraph_of_its_kind(operators: list[Operator]) -> None:
    found = segment(operators)
    assert sorted(name for s in found for name in s.operators) == sorted(o.name for o in operators)
    by_name = {operator.name: operator for operator in operators}
    for subgraph in found:
        own = [by_name[name] for name in subgraph.operators]
        assert own == [operator for operator in operators if operator in own]  # in order
        assert {operator.kind == "adapter" for operator in own} == {subgraph.kind == "adapter"}


@given(graphs())
def test_every_message_ends_its_subgraph(operators: list[Operator]) -> None:
    by_name = {operator.name: operator for operator in operators}
    for subgraph in segment(operators):
        *before, last = (by_name[name] for name in subgraph.operators)
        assert not any(operator.is_message for operator in before)
        sent = ("all_reduce", last.bytes, last.seconds) if last.is_message else (None, 0, 0.0)
        assert (subgraph.message, subgraph.bytes, subgraph.message_seconds) == sent
        assert subgraph.seconds == sum(o.seconds for o in (*before, last) if not o.is_message)


@given(graphs())
def test_dependencies_are_all_there_and_point_back(operators: list[Operator]) -> None:
    found = segment(operators)
    place = {name: i for i, subgraph in enumerate(found) for name in subgraph.operators}
    needs: list[set[int]] = [set() for _ in found]
    awaits: list[set[int]] = [set() for _ in found]
    for operator in operators:
        here = place[operator.name]
        for name in operator.inputs:
            if place.get(name, here) != here:
                sent = found[place[name]].operators[-1] == name and found[place[name]].message
                (awaits if sent else needs)[here].add(place[name])
    for i, subgraph in enumerate(found):
        assert (set(subgraph.needs), set(subgraph.awaits)) == (needs[i], awaits[i])
        before = needs[i] | awaits[i]
        assert all(j < i for j in before)  # so there is no circle
        assert subgraph.depth == max((found[j].depth + 1 for j in before), default=0)


def test_a_half_layer_with_an_adapter() -> None:
    """Figure 11: the adapter stands apart, the sum belongs to the message."""
    operators = [
        Operator("norm.a", "compute", ("x",), 1.0),
        Operator("proj.mm", "compute", ("norm.a",), 2.0),
        Operator("proj.adapter.down", "adapter", ("norm.a",), 0.5),
        Operator("proj.adapter.up", "adapter", ("proj.adapter.down",), 0.5),
        Operator("proj.add", "compute", ("proj.mm", "proj.adapter.up"), 0.25),
        Operator("proj.all_reduce", "all_reduce", ("proj.add",), 3.0, 64),
        Operator("next.a", "compute", ("x", "proj.all_reduce"), 1.0),
    ]
    assert segment(operators) == (
        Subgraph("compute", ("norm.a", "proj.mm"), 3.0, 0),
        Subgraph("adapter", ("proj.adapter.down", "proj.adapter.up"), 1.0, 1, (0,)),
        Subgraph("compute", ("proj.add", "proj.all_reduce"), 0.25, 2, (0, 1), (), "all_reduce", 64, 3.0),
        Subgraph("compute", ("next.a",), 1.0, 3, (), (2,)),
    )


def test_what_does_not_need_a_message_does_not_delay_it() -> None:
    operators = [
        Operator("a", "compute", (), 1.0),
        Operator("b", "compute", ("a",), 1.0),
        Operator("send", "all_gather", ("a",), 1.0, 8),
        Operator("c", "compute", ("send",), 1.0),
    ]
    first, beside, after = segment(operators)
    assert first.operators == ("a", "send")
    assert (beside.operators, beside.needs, beside.awaits) == (("b",), (0,), ())
    assert (after.operators, after.needs, after.awaits) == (("c",), (), (0,))


def test_an_operator_that_needs_nothing_stays_where_it_stands() -> None:
    operators = [
        Operator("a", "compute", (), 1.0),
        Operator("send", "all_reduce", ("a",), 1.0, 8),
        Operator("of_saved", "compute", ("saved",), 1.0),
        Operator("c", "compute", ("send", "of_saved"), 1.0),
    ]
    assert [subgraph.operators for subgraph in segment(operators)] == [("a", "send"), ("of_saved", "c")]


def example() -> LayerSubgraphs:
    forward = segment(
        [
            Operator("qkv.mm", "compute", ("x",), 1e-3),
            Operator("qkv.all_reduce", "all_reduce", ("qkv.mm",), 2e-3, 64),
            Operator("add_1", "compute", ("x", "qkv.all_reduce"), 1e-3),
        ]
    )
    return LayerSubgraphs((0, 1, 2, 5), 16, 2, True, "made up", forward, forward[:1])


def test_what_a_plan_file_keeps_and_what_is_printed() -> None:
    subgraphs = example()
    plan = replace(plan_for("spatial", {"a": 1}, 1), layers=(subgraphs,))
    assert Plan.from_json(json.loads(dumps(plan))) == plan
    assert str(subgraphs).splitlines() == [
        "layers 0-2, 5: 16 rows, 2 tensor ranks, rows divided (sequence parallel); made up",
        "  forward:",
        "     0  depth 0, compute: qkv, then all_reduce of 64 bytes (1 ms + 2 ms)",
        "     1  depth 1, compute: sum (1 ms); awaits the message of 0",
        "  backward:",
        "     0  depth 0, compute: qkv, then all_reduce of 64 bytes (1 ms + 2 ms)",
    ]
