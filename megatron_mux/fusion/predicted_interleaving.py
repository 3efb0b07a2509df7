"""When the pieces and messages of batches that are computed in turns are predicted to run, for pictures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from megatron_mux.fusion.graphs.launch_order import Span, decode, simulate
from megatron_mux.fusion.plan import Bucket, Plan
from megatron_mux.pipeline.action import TimedAction, TimedPart


def with_interleaving(actions: Iterable[TimedAction], plan: Plan) -> list[TimedAction]:
    """Add pieces and messages to the passes of a simulated schedule.

    The predictions are for the pass with the most batches of its bucket. They are stretched to the time of each pass,
    which the schedule has from the mean of the bucket's passes.

    Args:
        actions: The schedule, of one or several steps.
    """
    known: dict[tuple[int, int, bool], list[TimedPart]] = {}
    drawn = []
    for timed in actions:
        action = timed.action
        bucket = plan.buckets[action.bucket % len(plan.buckets)]
        if not (action.is_pass and bucket.launch and bucket.turns):
            drawn.append(timed)
            continue
        key = (action.bucket % len(plan.buckets), action.stage, action.is_backward)
        if key not in known:
            known[key] = _parts(bucket, action.stage, action.is_backward)
        drawn.append(replace(timed, parts=_stretched(known[key], timed)))
    return drawn


def _parts(bucket: Bucket, stage: int, backward: bool) -> list[TimedPart]:
    """The parts of a pass that takes one second, each lane in order of time."""
    launch, turns = bucket.launch[stage], bucket.turns[stage]
    order = decode(launch.backward if backward else launch.forward)
    passes = turns.backward if backward else turns.forward
    layers = turns.layers[:: -1 if backward else 1]
    timeline = simulate([p.chain(layers, layers) for p in passes], order, turns.share)
    # Mostly the loss head: behind the layers forward, before them backward.
    outside = sum(p.outside for p in passes)
    whole, before = outside + timeline.seconds or 1.0, outside if backward else 0.0
    halves = 2 if bucket.halves else 1

    def part(span: Span, message: str) -> TimedPart:
        label = "+".join(bucket.hybrid_tasks[span.chain // halves].tasks)
        start, stop = ((before + moment) / whole for moment in (span.start, span.end))
        return TimedPart(span.chain, span.piece, start, stop, label, message)

    return [
        *(part(span, "") for span in timeline.compute if span.end > span.start),
        *(part(span, "message") for span in timeline.messages),
    ]


def _stretched(parts: list[TimedPart], timed: TimedAction) -> tuple[TimedPart, ...]:
    scale = timed.stop - timed.start
    return tuple(
        replace(part, start=timed.start + scale * part.start, stop=timed.start + scale * part.stop)
        for part in parts
    )
