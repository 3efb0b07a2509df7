"""Steps of two and three layers extended: against the step of that depth itself, event for event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mux.memory.stream.events import Category, Moment, Stream, StreamBuilder, StreamError
from megatron_mux.memory.stream.extension import extended


@dataclass(frozen=True)
class Op:
    """What a part of the program does, in all of its layers or in some of them.

    `whose` is the layer of the block that is freed: relative to the layer that frees, or "first" or "last".
    """

    action: str
    name: str
    size: int = 0
    growth: int = 0
    part: int = 0
    whose: int | str = 0
    of: str = ""
    only: str = "all"


@dataclass
class Part:
    """Outside layers (order 0), or a visit of all layers upwards (1) or downwards (-1)."""

    order: int
    phase: str
    ops: list[Op] = field(default_factory=list)
    # Frees of every layer's block, in turn, by somebody who does not say for which layer.
    unlabelled: list[Op] = field(default_factory=list)


def run(program: list[Part], layers: int) -> Stream:
    """The step with so many layers."""
    builder = StreamBuilder()
    made: dict[tuple[int, int, str], int] = {}

    def do(op: Op, number: int, phase: str, layer: int | None, label: int | None) -> None:
        at = 0 if layer is None else layer
        if (op.only == "first" and at) or (op.only == "last" and at != layers - 1):
            return
        moment = Moment(phase, label, op.name.partition("/")[0])
        if op.action == "allocate":
            key = (number, at, op.name)
            made[key] = builder.allocate(op.size + op.growth * layers, moment, category=Category.ACTIVATIONS)
            return
        target = {"first": 0, "last": layers - 1}.get(str(op.whose))
        target = at + int(op.whose) if target is None else target
        block = made.pop((op.part, target, op.of), None)
        if block is not None:
            builder.free(block, moment)

    for number, part in enumerate(program):
        if not part.order:
            for op in part.ops:
                do(op, number, part.phase, None, None)
            for layer in range(layers):
                for op in part.unlabelled:
                    do(op, number, part.phase, layer, None)
            continue
        for layer in range(layers)[:: part.order]:
            for op in part.ops:
                do(op, number, part.phase, layer, layer)
    return builder.done()


@st.composite
def programs(draw: st.DrawFn) -> list[Part]:
    """A step made up of parts, with every way of freeing what a layer has allocated."""
    program: list[Part] = []
    for number in range(draw(st.integers(1, 4))):
        phase = f"phase {number}"
        program.append(Part(0, phase, draw(allocations("outside", growing=True))))
        program.append(Part(draw(st.sampled_from([1, -1])), phase, draw(allocations("layer", growing=False))))
    program.append(Part(0, "end", draw(allocations("outside", growing=True))))
    for number, part in enumerate(program):
        for op in [op for op in part.ops if op.action == "allocate"]:
            draw_free(draw, program, number, op)
    return program


@st.composite
def allocations(draw: st.DrawFn, name: str, growing: bool) -> list[Op]:
    """Some of them alike but for what comes after the stroke, which the stream does not tell."""
    found = []
    for index in range(draw(st.integers(0 if growing else 1, 4))):
        growth = draw(st.integers(0, 2)) if growing else 0
        found.append(Op("allocate", f"{name}/{index}", draw(st.integers(1, 3)), growth))
        if not growing and draw(st.integers(0, 4)) == 0:
            only = draw(st.sampled_from(["first", "last"]))
            found.append(Op("allocate", f"extra {only}/{index}", 5, only=only))
    return found


def draw_free(draw: st.DrawFn, program: list[Part], number: int, op: Op) -> None:
    """Free what an operation allocates: somewhere later, by whoever can; or never."""
    later = range(number + 1, len(program))
    own = program[number]

    def insert(at: int, free: Op) -> None:
        ops = program[at].ops
        first = ops.index(op) + 1 if at == number else 0
        ops.insert(draw(st.integers(first, len(ops))), free)

    def visits() -> list[int]:
        return [at for at in later if program[at].order]

    sections = [at for at in later if not program[at].order]
    ways = ["never"]
    if own.order:
        ways += ["itself"] + (["at the end"] if sections else [])
        if op.only == "all":
            ways += ["neighbour"]
    elif op.only == "all":
        ways += (["outside"] if sections else []) + (["layer"] if visits() else [])
    way = draw(st.sampled_from(ways))
    if way == "itself":
        at = draw(st.sampled_from([number, *visits()]))
        insert(at, Op("free", "own", part=number, whose=0, of=op.name, only=op.only))
    elif way == "neighbour":
        # In its own visit, the layer visited next; later, either neighbour. Who has none frees nothing.
        at = draw(st.sampled_from([number, *visits()]))
        whose = -own.order if at == number else draw(st.sampled_from([-1, 1]))
        insert(at, Op("free", "neighbour", part=number, whose=whose, of=op.name))
        after = [section for section in sections if section > at]
        if draw(st.booleans()) and after:
            left = "first" if whose > 0 else "last"
            insert(draw(st.sampled_from(after)), Op("free", "left over", part=number, whose=left, of=op.name))
    elif way == "at the end" and op.only == "all":
        free = Op("free", "in turn", part=number, whose=0, of=op.name)
        program[draw(st.sampled_from(sections))].unlabelled.append(free)
    elif way == "at the end":
        insert(draw(st.sampled_from(sections)), Op("free", "once", part=number, whose=op.only, of=op.name))
    elif way == "outside":
        insert(draw(st.sampled_from(sections)), Op("free", "outside", part=number, of=op.name))
    elif way == "layer":
        only = draw(st.sampled_from(["first", "last"]))
        at = draw(st.sampled_from(visits()))
        # The block outside layers is kept under layer 0.
        insert(at, Op("free", "from outside", part=number, whose="first", of=op.name, only=only))


@settings(max_examples=300, deadline=None)
@given(programs(), st.integers(2, 7))
def test_any_depth_equals_the_step_of_that_depth(program: list[Part], layers: int) -> None:
    full = run(program, layers)
    found = extended(run(program, 2), run(program, 3), layers)
    assert list(found) == list(full)
    assert found == full


def forward_and_backward() -> list[Part]:
    return [
        Part(0, "forward", [Op("allocate", "embedding", 10)]),
        Part(1, "forward", [Op("allocate", "saved", 3)]),
        Part(0, "loss", [Op("allocate", "loss", 1)]),
        Part(-1, "backward", [Op("free", "done", part=1, whose=0, of="saved")]),
    ]


def spoilt(change: Callable[[list[Part]], None]) -> tuple[Stream, Stream]:
    program = forward_and_backward()
    two = run(program, 2)
    change(program)
    return two, run(program, 3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda p: p[1].ops.append(Op("allocate", "more", 1)),
            r"1 events with two layers, beginning with event 1 .*layer 0, saved.*, are 2 events by",
        ),
        (
            lambda p: p[1].ops.__setitem__(0, Op("allocate", "saved", 4)),
            r"event 1 of 2 layers \(forward, layer 0, saved\) allocates 3 bytes, but event 1 of 3 .* 4 bytes",
        ),
        (lambda p: setattr(p[3], "order", 1), r"two layers are visited \(up down\), three layers \(up up\)"),
    ],
)
def test_steps_that_do_not_line_up(change: Callable[[list[Part]], None], said: str) -> None:
    two, three = spoilt(change)
    with pytest.raises(StreamError, match=said):
        extended(two, three, 4)


def test_a_free_that_belongs_to_no_layer_in_particular() -> None:
    """The first layer's block with two layers, the last one's but two with three."""

    def step(layers: int, whose: int) -> Stream:
        builder = StreamBuilder()
        made = [builder.allocate(1, Moment("forward", layer, "mm")) for layer in range(layers)]
        builder.free(made[whose], Moment("loss", None, "free"))
        return builder.done()

    with pytest.raises(StreamError, match="allocated elsewhere"):
        extended(step(2, 1), step(3, 0), 4)


def test_fewer_than_two_layers() -> None:
    program = forward_and_backward()
    with pytest.raises(StreamError, match="1 layers are not 1 and then groups of 1"):
        extended(run(program, 2), run(program, 3), 1)
