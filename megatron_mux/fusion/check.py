"""Reads a plan file, and refuses a plan that is not for this backbone, these ranks and these tasks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_mux.errors import UserError
from megatron_mux.fusion.graphs.launch_order import decode
from megatron_mux.fusion.mesh import Mesh
from megatron_mux.fusion.plan import Bucket, Plan

_MOST_UNITS = 100_000
"""Chunks of a step: many more than any real step has."""

ALSO_PRINTED = ("alternatives", "padding", "planning_s", "mesh", "flags")
"""Entries that `megatron-mux plan --json` prints beside the plan; a file with them is still a plan."""


def read_plan(path: str | Path) -> Plan:
    """A plan file.

    Raises:
        UserError: The file cannot be read or is not a plan; every wrong entry is named by its place.
    """
    try:
        value: Any = json.loads(Path(path).read_text())
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"{path}: is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: is no plan: it must be one JSON object")
    try:
        return Plan.from_json({key: entry for key, entry in value.items() if key not in ALSO_PRINTED})
    except UserError as error:
        raise UserError(*(f"{path}: {problem}" for problem in error.problems)) from error


def check_plan(plan: Plan, backbone: str, mesh: Mesh, tasks: Sequence[str]) -> None:
    """Refuse a plan that is not for this run.

    Args:
        backbone: The backbone's fingerprint.

    Raises:
        UserError: With all problems; each wrong entry is named by its place.
    """
    problems = [*_wrong_place(plan, backbone, mesh), *_wrong_tasks(plan, tasks), *_wrong_buckets(plan)]
    if problems:
        raise UserError(*problems)


def _wrong_place(plan: Plan, backbone: str, mesh: Mesh) -> Iterator[str]:
    if plan.backbone != backbone:
        theirs = plan.backbone[:12] or "none"
        yield f"backbone: the plan is for another backbone ({theirs}, not {backbone[:12]}): plan anew"
    for name, planned, there in (
        ("tensor", plan.tensor, mesh.tensor),
        ("stages", plan.stages, mesh.stages),
        ("virtual", plan.virtual, mesh.virtual),
        ("split", plan.split, mesh.split),
        ("data", plan.data, mesh.data),
        ("expert", plan.expert, mesh.expert),
        ("expert_tensor", plan.expert_tensor, mesh.expert_tensor),
        ("managers", plan.managers, mesh.managers),
    ):
        if planned != there:
            yield f"{name}: the plan is for {planned}, this run has {there}: start it as planned, or plan anew"


def _wrong_tasks(plan: Plan, tasks: Sequence[str]) -> Iterator[str]:
    seen: dict[str, str] = {}
    for b, bucket in enumerate(plan.buckets):
        for h, hybrid in enumerate(bucket.hybrid_tasks):
            for t, name in enumerate(hybrid.tasks):
                place = f"buckets[{b}].hybrid_tasks[{h}].tasks[{t}]"
                if name in seen:
                    yield f"{place}: task {name!r} is at {seen[name]} already"
                elif name not in tasks:
                    yield f"{place}: there is no task {name!r} in this run"
                seen.setdefault(name, place)
    missing = [name for name in tasks if name not in seen]
    if missing:
        yield f"buckets: {', '.join(map(repr, missing))} of this run {'is' if len(missing) == 1 else 'are'} in none"


def _wrong_orders(bucket: Bucket, place: str) -> Iterator[str]:
    """Launch orders in which not every batch has equally many pieces, or that were chosen by other batches."""
    for stage, launch in enumerate(bucket.launch):
        for name, order in (("forward", launch.forward), ("backward", launch.backward)):
            counts = Counter(decode(order))
            if set(counts) != set(range(bucket.batches)) or len(set(counts.values())) > 1:
                wanted = f"0 to {bucket.batches - 1}, each as often as the others"
                yield f"{place}.launch[{stage}].{name}: must name {wanted}, got {order[:20]!r}"
    for stage, (turns, launch) in enumerate(zip(bucket.turns, bucket.launch, strict=False)):
        for name, passes in (("forward", turns.forward), ("backward", turns.backward)):
            if len(passes) != bucket.batches:
                yield f"{place}.turns[{stage}].{name}: has {len(passes)} entries, {bucket.batches} are needed"
            pieces = len(getattr(launch, name)) // bucket.batches
            for p, c in enumerate(passes):
                if any(kind >= len(c.kinds) for kind in turns.layers):
                    yield f"{place}.turns[{stage}].{name}[{p}].kinds: has {len(c.kinds)} entries, too few for layers"
                elif 1 + sum(len(c.kinds[kind].pieces) for kind in turns.layers) != pieces:
                    yield f"{place}.turns[{stage}].{name}[{p}]: has pieces that are not those of the launch order"


def _wrong_buckets(plan: Plan) -> Iterator[str]:
    for b, bucket in enumerate(plan.buckets):
        place = f"buckets[{b}]"
        for name, values, wanted in (
            ("forward", bucket.forward, plan.stages),
            ("backward", bucket.backward, plan.stages),
            ("memory", bucket.memory, plan.stages),
            ("launch", bucket.launch, plan.stages),
            ("turns", bucket.turns, plan.stages),
            ("transfer", bucket.transfer, plan.stages - 1),
        ):
            if values and len(values) != wanted:
                yield f"{place}.{name}: has {len(values)} entries, {wanted} are needed for {plan.stages} stage(s)"
        if bool(bucket.forward) != bool(bucket.backward) or (plan.policy == "auto" and not bucket.forward):
            yield f"{place}: has no predicted seconds: plan anew"
        if len(bucket.chunks) > bucket.micro_batches:
            yield f"{place}.chunks: is for {len(bucket.chunks)} micro-batches, the bucket has {bucket.micro_batches}"
        if bucket.chunk is None and any(count != 1 for count in bucket.chunks):
            yield f"{place}.chunks: its packs are not cut, yet a micro-batch has {max(bucket.chunks)} chunks"
        if bucket.halves and bucket.chunk is not None:
            yield f"{place}.halves: its packs are cut into chunks of {bucket.chunk}: halves are for whole packs"
        yield from _wrong_orders(bucket, place)
    if sum(sum(bucket.chunks) for bucket in plan.buckets) > _MOST_UNITS:
        yield f"buckets: have more than {_MOST_UNITS} chunks together"
    if plan.activation_limit and len(plan.activation_limit) != plan.ranks:
        yield f"activation_limit: has {len(plan.activation_limit)} entries for {plan.ranks} rank(s)"
