"""Pictures are well-formed, show every action, and give a task one colour wherever it is seen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

import pytest

from megatron_mux.pipeline.action import Action, TimedAction
from megatron_mux.pipeline.bucket import BucketCost
from megatron_mux.pipeline.draw import bubble, busy, latency, styles, to_svg
from megatron_mux.pipeline.simulate import simulate
from megatron_mux.pipeline.template import interleaved
from megatron_mux.pipeline.trace import from_trace, to_trace

ACTIONS = [
    TimedAction(Action(0, "F", 0, 0), 10.0, 10.5, "a+b<&>"),
    TimedAction(Action(1, "F", 0, 0), 10.5, 11.0, "a+b<&>"),
    TimedAction(Action(1, "B", 0, 0), 11.0, 11.5, "a+b<&>"),
    TimedAction(Action(0, "B", 0, 0), 11.5, 12.0, "a+b<&>"),
]


def in_turn(labels: Sequence[str], kind: Any = "F") -> list[TimedAction]:
    """An action of each label, one after the other."""
    return [TimedAction(Action(0, kind, i, 0), float(i), i + 1.0, label) for i, label in enumerate(labels)]


def fills(svg: str) -> dict[str, str]:
    """The paint of each label's forward passes; labels have no spaces."""
    groups = ElementTree.fromstring(svg).findall("{*}g")
    found: dict[str, str] = {}
    for group in groups:
        hint, box = group.find("{*}title"), group.find("{*}rect")
        assert hint is not None and hint.text is not None and box is not None
        label = hint.text.split(": ")[0].split(" ", 1)[1]
        assert found.setdefault(label, box.attrib["fill"]) == box.attrib["fill"]
    return found


def test_svg_has_a_box_per_action_and_escapes_labels() -> None:
    root = ElementTree.fromstring(to_svg(ACTIONS, "title <1>\0"))
    boxes = root.findall("{*}g/{*}rect")
    assert len(boxes) == len(ACTIONS)
    xs = [float(box.attrib["x"]) for box in boxes]
    assert xs == sorted(xs)
    assert len({box.attrib["fill"] for box in boxes}) == 2, "forward and backward differ in shade"


def test_pictures_of_nothing_are_still_documents() -> None:
    ElementTree.fromstring(to_svg([], "empty"))
    ElementTree.fromstring(to_svg({"simulated": [], "measured": []}, "empty"))
    assert json.loads(to_trace([]))["traceEvents"] == []


@pytest.mark.parametrize("seconds", [0.0, 1e-7, 0.8, 1.0, 8.0, 1e6])
def test_any_scale_has_an_axis(seconds: float) -> None:
    root = ElementTree.fromstring(to_svg([TimedAction(Action(0, "F", 0, 0), 3.0, 3.0 + seconds, "a")], "t"))
    ticks = [e.text for e in root.findall("{*}text") if e.attrib.get("text-anchor") == "middle"]
    assert 2 <= len(ticks) <= 9 and len(set(ticks)) == len(ticks)


def test_colours_do_not_depend_on_which_parts_of_a_bucket_were_seen() -> None:
    """A measured micro-batch or chunk may lack tasks of its bucket; a simulated one has them all."""
    simulated, measured = (
        styles(["b+a+c", "d | e", "f"]),
        styles(["f", "a", "e", "b+a+c", "c", "d | e", "b+a"]),
    )
    assert {label: measured[label] for label in simulated} == simulated
    assert len(set(measured.values())) == len(measured), "parts of a bucket differ from it"
    assert {measured[part].colour for part in ("a", "c", "b+a")} == {simulated["b+a+c"].colour}
    assert measured["e"].colour == simulated["d | e"].colour


def test_more_labels_than_colours_are_told_apart() -> None:
    names = [f"task{i:02}" for i in range(70)]
    found = styles(names)
    assert len(set(found.values())) == len(names)
    paints = fills(to_svg(in_turn(names), "t"))
    assert len(set(paints.values())) == len(names)
    assert sum(paint.startswith("url(#") for paint in paints.values()) == len(names) - 8
    root = ElementTree.fromstring(to_svg(in_turn(names), "t"))
    patterns = [pattern.attrib["id"] for pattern in root.findall("{*}defs/{*}pattern")]
    assert len(set(patterns)) == len(patterns)
    assert {f"url(#{i})" for i in patterns} >= {p for p in paints.values() if p.startswith("url")}


def test_schedules_are_stacked_on_one_scale_with_their_figures() -> None:
    late = [
        TimedAction(t.action, 2 * t.start, 2 * t.stop - (0.5 if t.action.stage else 0.0), t.label)
        for t in ACTIONS
    ]
    root = ElementTree.fromstring(to_svg({"simulated": ACTIONS, "measured": late}, "both"))
    boxes = root.findall("{*}g/{*}rect")
    assert len(boxes) == 2 * len(ACTIONS)
    assert float(boxes[4].attrib["width"]) == pytest.approx(2 * float(boxes[0].attrib["width"]), abs=0.2)
    assert boxes[4].attrib["x"] == boxes[0].attrib["x"] and float(boxes[4].attrib["y"]) > float(
        boxes[3].attrib["y"]
    )
    texts = [e.text for e in root.findall("{*}text")]
    for text in ("both", "simulated", "measured", "2 s", "4 s", "50.0% bubble", "75.0% bubble"):
        assert text in texts
    assert (latency(late), busy(late), bubble(late)) == (4.0, [2.0, 1.0], [0.5, 0.75])


def test_what_is_no_pass_is_a_narrow_tick() -> None:
    ticks = in_turn(["a"], "U")
    ticks = [TimedAction(t.action, 0.5, 0.5 + 1e-6, "a") for t in ticks]
    passes = in_turn(["a", "b"])
    root = ElementTree.fromstring(to_svg([*ticks, *passes], "t"))
    last = root.findall("{*}g")[-1]
    hint, box = last.find("{*}title"), last.find("{*}rect")
    assert hint is not None and box is not None
    assert (hint.text or "").startswith("0U0") and float(box.attrib["width"]) <= 2
    assert box.attrib["fill"] not in fills(to_svg(passes, "t")).values()
    (event,) = [e for e in json.loads(to_trace(ticks))["traceEvents"] if e["ph"] == "X"]
    assert event["name"] == "U a" and event["cat"] == "U"


def names_in(width: float, label: str) -> list[tuple[str, bool]]:
    """The names in a box of some thousandths of the picture's time, and whether each is upright."""
    whole = TimedAction(Action(1, "F", 1, 0), 0.0, 1000.0, "x")
    root = ElementTree.fromstring(to_svg([TimedAction(Action(0, "F", 0, 0), 0.0, width, label), whole], "t"))
    texts = root.findall("{*}g")[0].findall("{*}text")
    return [(text.text or "", "rotate(-90)" in text.attrib.get("transform", "")) for text in texts]


def test_boxes_have_the_names_of_their_tasks() -> None:
    assert names_in(100, "glosses+austen") == [("glosses", False), ("austen", False)]
    assert names_in(100, "a | b + c") == [("a", False), ("b", False), ("c", False)]
    assert names_in(30, "glosses+austen") == [("glosses", True), ("austen", True)]
    assert names_in(12, "movie-sentiment") == [("movie-sen…", True)]
    assert names_in(25, "+".join(f"task{i}" for i in range(6))) == [("task0", True), ("+5", True)]
    assert names_in(12, "task1+task2") == [] and names_in(5, "a") == [], "no room"


def test_a_label_has_one_name_and_colour_in_all_schedules_of_a_trace() -> None:
    schedules = {"simulated": in_turn(["a", "b"]), "measured": in_turn(["b", "b+c", "a"])}
    events = json.loads(to_trace(schedules))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(names.values()) == ["simulated", "measured"]
    colours: dict[str, set[str]] = {}
    for event in events:
        if event["ph"] == "X":
            colours.setdefault(event["name"], set()).add(event["args"]["colour"])
    assert set(colours) == {"F a", "F b", "F b+c"} and all(len(own) == 1 for own in colours.values())


def test_a_trace_is_read_back() -> None:
    schedules = {"simulated": in_turn(["a", "x | y+z"]), "measured": ACTIONS, "nothing": []}
    found = from_trace(to_trace(schedules))
    assert list(found) == list(schedules)
    for name, schedule in schedules.items():
        first = min((t.start for t in schedule), default=0.0)
        assert [(t.action, t.label) for t in found[name]] == [(t.action, t.label) for t in schedule]
        for ours, theirs in zip(found[name], schedule, strict=True):
            assert (ours.start, ours.stop) == pytest.approx((theirs.start - first, theirs.stop - first))
    assert list(from_trace(to_trace(ACTIONS))) == [""]


EVENT = {"name": "F a", "ph": "X", "ts": 0.0, "dur": 1.0, "pid": 0, "tid": 0, "args": {"action": "0F0.0"}}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "list of traceEvents"),
        ({"traceEvents": 3}, "list of traceEvents"),
        ({"traceEvents": ["x"]}, r"traceEvents\[0\]"),
        (
            {"traceEvents": [{**EVENT, "args": {"action": "0Q0.0"}}]},
            r"traceEvents\[0\].*'0Q0.0' is not an action",
        ),
        ({"traceEvents": [EVENT, {**EVENT, "args": {}}]}, r"traceEvents\[1\].*'action'"),
        ({"traceEvents": [{**EVENT, "ts": float("nan")}]}, "microseconds"),
        ({"traceEvents": [{**EVENT, "dur": -1.0}]}, "microseconds"),
        ({"traceEvents": [{**EVENT, "dur": None}]}, r"traceEvents\[0\]"),
        ({"traceEvents": [{**EVENT, "name": 7}]}, r"traceEvents\[0\]"),
        ({"traceEvents": [{**EVENT, "pid": []}]}, r"traceEvents\[0\]"),
        ({"traceEvents": [EVENT, {**EVENT, "pid": 1}]}, "different names"),
    ],
)
def test_what_is_no_trace_is_refused(value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        from_trace(json.dumps(value))


def test_several_stages_of_a_rank_share_its_row() -> None:
    buckets = [BucketCost(4, (1.0,) * 4, (1.0,) * 4)]
    timed = [t for rank in simulate(interleaved(2, 2, [[1] * 4]), buckets).timed for t in rank]
    assert busy(timed, 2) == [16.0, 16.0] and len(bubble(timed, 2)) == 2
    root = ElementTree.fromstring(to_svg(timed, "virtual", ranks=2))
    texts = [text.text for text in root.findall("{*}text")]
    assert "stages 0,2" in texts and "stages 1,3" in texts
    assert len({box.attrib["y"] for box in root.findall("{*}g/{*}rect")}) == 2
    events = json.loads(to_trace(timed, ranks=2))["traceEvents"]
    assert {event["tid"] for event in events} == {0, 1}
    assert from_trace(json.dumps({"traceEvents": events}))[""][0].action == timed[0].action
