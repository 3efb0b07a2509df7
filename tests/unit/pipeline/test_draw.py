"""Pictures are well-formed and show every action."""

from __future__ import annotations

import json
from xml.etree import ElementTree

from megatron_mux.pipeline.action import Action, TimedAction
from megatron_mux.pipeline.draw import to_svg, to_trace

ACTIONS = [
    TimedAction(Action(0, "F", 0, 0), 10.0, 10.5, "a+b<&>"),
    TimedAction(Action(1, "F", 0, 0), 10.5, 11.0, "a+b<&>"),
    TimedAction(Action(1, "B", 0, 0), 11.0, 11.5, "a+b<&>"),
    TimedAction(Action(0, "B", 0, 0), 11.5, 12.0, "a+b<&>"),
]


def test_svg_has_a_box_per_action_and_escapes_labels() -> None:
    root = ElementTree.fromstring(to_svg(ACTIONS, "title <1>"))
    boxes = root.findall("{*}g/{*}rect")
    assert len(boxes) == len(ACTIONS)
    xs = [float(box.attrib["x"]) for box in boxes]
    assert xs == sorted(xs)
    assert len({box.attrib["fill"] for box in boxes}) == 2, "forward and backward differ in shade"


def test_trace_starts_at_zero_and_names_stages() -> None:
    events = json.loads(to_trace(ACTIONS))["traceEvents"]
    passes = [e for e in events if e["ph"] == "X"]
    assert [e["ts"] for e in passes] == [0.0, 0.5e6, 1.0e6, 1.5e6]
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {"stage 0", "stage 1"}


def test_pictures_of_nothing_are_still_documents() -> None:
    ElementTree.fromstring(to_svg([], "empty"))
    assert json.loads(to_trace([]))["traceEvents"] == []
