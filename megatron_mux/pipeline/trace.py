"""Schedules as Chrome traces, for Perfetto or chrome://tracing: written, and read back."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_mux.pipeline.action import Action, TimedAction, TimedPart
from megatron_mux.pipeline.draw import Schedules, Style, named, pass_styles, row_name, stages_of

Event = dict[str, Any]

_LANES = ("compute pieces", "messages of tensor ranks")
_CATEGORY = {"F": "forward", "B": "backward"}


def to_trace(actions: Schedules, ranks: int = 0, plan: Mapping[str, Any] | None = None) -> str:
    """Write a Chrome trace (open it in Perfetto or chrome://tracing): a process per schedule, a thread per rank.

    A rank that computes batches of a pass in turns has two threads more: its pieces, and its messages of tensor ranks.

    Viewers choose colours by a slice's name, which is the same for a label's passes in every schedule. A slice's
    arguments name its colour in the SVG.

    Args:
        actions: One schedule, or several by name.
        plan: The plan that the actions followed, kept as it is for whoever reads the file. Pieces and messages name
            their step if it is given.

    Returns:
        JSON text.
    """
    schedules = named(actions)
    drawn = pass_styles(schedules)
    period = len(plan["buckets"]) if plan is not None else 0
    names: list[Event] = []
    events: list[Event] = []
    for pid, (name, schedule) in enumerate(schedules.items()):
        if name:
            names.append({"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": name}})
        rows = ranks or stages_of(schedule)
        names += _threads(pid, rows, schedule)
        begin = min((t.start for t in schedule), default=0.0)
        for timed in schedule:
            events.append(_event(pid, rows, timed, begin, drawn))
            events += _parts(pid, rows, timed, begin, period)
    also = {} if plan is None else {"plan": plan}
    return json.dumps({"traceEvents": names + events, "displayTimeUnit": "ms", **also}) + "\n"


def _threads(pid: int, rows: int, schedule: Sequence[TimedAction]) -> Iterator[Event]:
    """Names of threads, and their order: each rank's lanes are below it."""
    has_lanes = {timed.action.stage % rows for timed in schedule if timed.parts}
    for row in sorted({timed.action.stage % rows for timed in schedule}):
        lanes = [(row, "")]
        if row in has_lanes:
            lanes += [(_lane(row, rows, i), f", {lane}") for i, lane in enumerate(_LANES)]
        for place, (tid, lane) in enumerate(lanes):
            told = {"ph": "M", "pid": pid, "tid": tid}
            yield {"name": "thread_name", **told, "args": {"name": row_name(row, rows, schedule) + lane}}
            if has_lanes:
                order = {"sort_index": row * (1 + len(_LANES)) + place}
                yield {"name": "thread_sort_index", **told, "args": order}


def _lane(row: int, rows: int, lane: int) -> int:
    """The thread of a lane of `_LANES`."""
    return rows + len(_LANES) * row + lane


def _event(pid: int, rows: int, timed: TimedAction, begin: float, drawn: Mapping[str, Style]) -> Event:
    told = {"action": str(timed.action)}
    if timed.label in drawn and timed.action.is_pass:
        told["colour"] = drawn[timed.label].colour
    return {
        "name": f"{timed.action.kind} {timed.label}",
        "cat": _CATEGORY.get(timed.action.kind, timed.action.kind),
        "ph": "X",
        "ts": (timed.start - begin) * 1e6,
        "dur": (timed.stop - timed.start) * 1e6,
        "pid": pid,
        "tid": timed.action.stage % rows,
        "args": told,
    }


def _parts(pid: int, rows: int, timed: TimedAction, begin: float, period: int) -> Iterator[Event]:
    """The pieces and messages of a pass; `period` buckets are a step, 0: unknown."""
    action = timed.action
    step = {"step": action.bucket // period} if period else {}
    for part in timed.parts:
        what = part.message or "piece"
        yield {
            "name": f"{action.kind} {part.label} {what} {part.piece}",
            "cat": "message" if part.message else "piece",
            "ph": "X",
            "ts": (part.start - begin) * 1e6,
            "dur": (part.stop - part.start) * 1e6,
            "pid": pid,
            "tid": _lane(action.stage % rows, rows, bool(part.message)),
            "args": {
                "pass": str(action),
                **step,
                "hybrid_task": part.label,
                "batch": part.batch,
                "piece": part.piece,
                "message": part.message,
            },
        }


def from_trace(text: str) -> dict[str, list[TimedAction]]:
    """Read a trace written by `to_trace`; its clocks start at zero.

    Returns:
        The schedules by name; a schedule that was written without a name has the empty name.

    Raises:
        ValueError: `text` is not such a trace; the message says what is wrong, and where.
    """
    value: Any = json.loads(text)
    events = value.get("traceEvents") if isinstance(value, dict) else None
    if not isinstance(events, list):
        raise ValueError("is no trace: it must be a JSON object with a list of traceEvents")
    names: dict[Any, str] = {}
    schedules: dict[Any, list[TimedAction]] = {}
    parts: dict[tuple[Any, Action], list[TimedPart]] = {}
    for i, event in enumerate(events):
        try:
            if event["ph"] == "M" and event["name"] == "process_name":
                names[event["pid"]] = str(event["args"]["name"])
                schedules.setdefault(event["pid"], [])
            elif event["ph"] == "X" and "pass" in event["args"]:
                action = Action.parse(event["args"]["pass"])
                parts.setdefault((event["pid"], action), []).append(_part(event))
            elif event["ph"] == "X":
                schedules.setdefault(event["pid"], []).append(_timed(event))
        except KeyError as error:
            raise ValueError(f"traceEvents[{i}]: is no action of a schedule: it has no {error}") from error
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ValueError(f"traceEvents[{i}]: is no action of a schedule: {error}") from error
    timed = {
        names.get(pid, ""): [replace(t, parts=tuple(parts.get((pid, t.action), ()))) for t in schedule]
        for pid, schedule in schedules.items()
    }
    if len(timed) < len(schedules):
        raise ValueError("is no trace of schedules: its processes must have different names")
    return timed


def _timed(event: Mapping[str, Any]) -> TimedAction:
    action = Action.parse(event["args"]["action"])
    return TimedAction(action, *_times(event), event["name"].partition(" ")[2])


def _part(event: Mapping[str, Any]) -> TimedPart:
    told = event["args"]
    batch, piece = int(told["batch"]), int(told["piece"])
    return TimedPart(batch, piece, *_times(event), str(told["hybrid_task"]), str(told["message"]))


def _times(event: Mapping[str, Any]) -> tuple[float, float]:
    start, seconds = float(event["ts"]) / 1e6, float(event["dur"]) / 1e6
    if not (math.isfinite(start) and 0 <= seconds < math.inf):
        raise ValueError(f"ts and dur must be numbers of microseconds, got {event['ts']!r}, {event['dur']!r}")
    return start, start + seconds
