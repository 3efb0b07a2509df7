"""Lanes of pieces and messages: boxes where they ran, the same for simulated and measured passes, and in traces."""

from __future__ import annotations

import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from megatron_mux.pipeline.action import Action, TimedAction, TimedPart
from megatron_mux.pipeline.draw import to_svg
from megatron_mux.pipeline.lanes import passes_to_svg
from megatron_mux.pipeline.trace import from_trace, to_trace


def timed(action: str, start: float, pieces: int = 3, batches: int = 2) -> TimedAction:
    """A pass of batches that take turns: each piece takes a second, and so does its message meanwhile."""
    parts = []
    for piece in range(pieces):
        for batch in range(batches):
            begin = start + piece * batches + batch
            label = f"{batch}<&>"
            parts.append(TimedPart(batch, piece, begin, begin + 1, label))
            if piece + 1 < pieces:
                parts.append(TimedPart(batch, piece, begin + 1, begin + 2, label, "all_reduce"))
    return TimedAction(Action.parse(action), start, start + pieces * batches, "a | b", tuple(parts))


PASSES = [timed("0F0.0", 5.0), timed("1F0.0", 11.0), timed("1B0.0", 17.0), timed("0B0.0", 23.0)]


def boxes(svg: str) -> list[tuple[str, dict[str, float]]]:
    """Hint and place of the boxes of pieces and messages."""
    found = []
    for group in ElementTree.fromstring(svg).findall("{*}g"):
        hint, box = group.find("{*}title"), group.find("{*}rect")
        assert hint is not None and hint.text is not None and box is not None
        found.append((hint.text, {k: float(box.attrib[k]) for k in ("x", "y", "width", "height")}))
    return found


def test_boxes_are_where_the_parts_were() -> None:
    own = boxes(passes_to_svg(PASSES[:1]))
    assert [hint for hint, _ in own] == [
        "0<&>: piece 0: 1 s",
        "0<&>: all_reduce 0: 1 s",
        "1<&>: piece 0: 1 s",
        "1<&>: all_reduce 0: 1 s",
        "0<&>: piece 1: 1 s",
        "0<&>: all_reduce 1: 1 s",
        "1<&>: piece 1: 1 s",
        "1<&>: all_reduce 1: 1 s",
        "0<&>: piece 2: 1 s",
        "1<&>: piece 2: 1 s",
    ]
    pieces, messages = (
        [place for hint, place in own if ("piece" in hint) is is_piece] for is_piece in (True, False)
    )
    for lane in (pieces, messages):
        assert len({place["y"] for place in lane}) == 1
        for one, after in zip(lane, lane[1:], strict=False):
            assert one["x"] + one["width"] <= after["x"] + 0.11, "one at a time"
    assert messages[0]["y"] >= pieces[0]["y"] + pieces[0]["height"]
    assert messages[0]["x"] == pieces[1]["x"], "hidden by the other batch's piece"


def test_a_long_pass_is_cut_after_its_first_layers() -> None:
    svg = passes_to_svg([timed("0F0.0", 0.0, pieces=50)])
    found = boxes(svg)
    assert sum("piece" in hint for hint, _ in found) == 14
    assert max(place["x"] + place["width"] for _, place in found) == pytest.approx(70 + 1080)
    assert "first 14 s of 100 s" in svg


def test_simulated_and_measured_lanes_follow_each_other_below_the_schedule() -> None:
    slow = [replace(t, parts=tuple(replace(p, stop=p.stop + 0.5) for p in t.parts)) for t in PASSES]
    svg = to_svg({"simulated": PASSES, "measured": slow}, "both")
    texts = [e.text or "" for e in ElementTree.fromstring(svg).findall("{*}text")]
    titles = [text.split(":")[0] for text in texts if ", forward" in text or ", backward" in text]
    assert titles == [
        f"stage {stage}, {direction} {stage}{direction[0].upper()}0.0, {name}"
        for stage in (0, 1)
        for direction in ("forward", "backward")
        for name in ("simulated", "measured")
    ]
    assert texts.count("0: 0<&>") == 1, "a legend"
    assert texts.count("compute") == texts.count("messages") == len(titles)


def test_the_pass_with_the_most_batches_is_drawn_of_these_the_last() -> None:
    passes = [timed("0F0.0", 0.0), timed("0F0.1", 6.0), timed("0F0.2", 12.0, batches=1)]
    assert "0F0.1" in passes_to_svg(passes)


def test_a_schedule_without_turns_has_no_lanes() -> None:
    svg = to_svg([replace(own, parts=()) for own in PASSES], "plain")
    assert ">compute<" not in svg and ">messages<" not in svg
    events = json.loads(to_trace([replace(own, parts=()) for own in PASSES]))["traceEvents"]
    assert {event["tid"] for event in events} == {0, 1}


def test_a_trace_has_two_lanes_for_each_rank() -> None:
    later = [timed("0F3.0", 29.0)]
    trace = json.loads(to_trace([*PASSES, *later], plan={"buckets": [{}, {}]}))["traceEvents"]
    threads = {e["args"]["name"]: e["tid"] for e in trace if e["name"] == "thread_name"}
    assert len(set(threads.values())) == len(threads) == 6
    order = {e["tid"]: e["args"]["sort_index"] for e in trace if e["name"] == "thread_sort_index"}
    assert sorted(threads, key=lambda name: order[threads[name]]) == [
        name
        for stage in ("stage 0", "stage 1")
        for name in (stage, f"{stage}, compute pieces", f"{stage}, messages of tensor ranks")
    ]
    for stage in (0, 1):
        own = [e for e in trace if e["tid"] == threads[f"stage {stage}, messages of tensor ranks"]]
        spans = [e for e in own if e["ph"] == "X"]
        assert {e["cat"] for e in spans} == {"message"}
        assert {e["args"]["pass"][0] for e in spans} == {str(stage)}
    first = next(e for e in trace if e["name"] == "F 1<&> all_reduce 1")
    assert (first["ts"], first["dur"]) == (4e6, 1e6)
    assert first["args"] == {
        "pass": "0F0.0",
        "step": 0,
        "hybrid_task": "1<&>",
        "batch": 1,
        "piece": 1,
        "message": "all_reduce",
    }
    assert {e["args"]["step"] for e in trace if e.get("args", {}).get("pass") == "0F3.0"} == {1}


def test_lanes_are_read_back_with_their_passes() -> None:
    found = from_trace(to_trace({"simulated": PASSES, "measured": PASSES[:2]}))
    for name, passes in (("simulated", PASSES), ("measured", PASSES[:2])):
        first = min(own.start for own in passes)
        for ours, theirs in zip(found[name], passes, strict=True):
            assert [replace(p, start=0, stop=0) for p in ours.parts] == [
                replace(p, start=0, stop=0) for p in theirs.parts
            ]
            assert [p.stop for p in ours.parts] == pytest.approx([p.stop - first for p in theirs.parts])


def test_a_part_that_is_none_is_refused() -> None:
    trace = json.loads(to_trace(PASSES))
    part = next(e for e in trace["traceEvents"] if "pass" in e.get("args", {}))
    del part["args"]["batch"]
    with pytest.raises(ValueError, match=r"traceEvents\[\d+\].*'batch'"):
        from_trace(json.dumps(trace))
