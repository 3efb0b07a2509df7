"""Whether a plan from a file may be run: for this backbone, these ranks and these tasks, complete and in order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_mux.errors import UserError
from megatron_mux.fusion.desk import Mesh
from megatron_mux.fusion.plan import Plan
from megatron_mux.fusion.step import step_template
from megatron_mux.pipeline.action import Action
from megatron_mux.pipeline.check import TemplateError, check, marked
from megatron_mux.pipeline.template import Template

_MOST_UNITS = 100_000
"""Chunks of a step: many more than any step has."""

ALSO_PRINTED = ("planning_s", "mesh", "flags")
"""What `tools/plan.py --json` prints beside a plan; a file that holds them is still a plan."""


def read_plan(path: Path) -> Plan:
    """A plan file.

    Raises:
        UserError: It cannot be read, or is no plan: every wrong entry is named by its place.
    """
    try:
        value: Any = json.loads(path.read_text())
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
        plan: The plan.
        backbone: The backbone's fingerprint.
        mesh: The ranks there are.
        tasks: The tasks to be trained.

    Raises:
        UserError: With all that is wrong; the offending entry is named by its place, or marked in the grid.
    """
    problems = [*_wrong_place(plan, backbone, mesh), *_wrong_tasks(plan, tasks), *_wrong_buckets(plan)]
    if not problems:  # else its template is wrong because of them
        problems += _wrong_template(plan)
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


def _wrong_buckets(plan: Plan) -> Iterator[str]:
    longest = None
    for b, bucket in enumerate(plan.buckets):
        place = f"buckets[{b}]"
        for name, found, wanted in (
            ("forward", bucket.forward, plan.stages),
            ("backward", bucket.backward, plan.stages),
            ("memory", bucket.memory, plan.stages),
            ("transfer", bucket.transfer, plan.stages - 1),
        ):
            if found and len(found) != wanted:
                yield f"{place}.{name}: has {len(found)} entries, {wanted} are needed for {plan.stages} stage(s)"
        if bool(bucket.forward) != bool(bucket.backward) or (plan.policy == "auto" and not bucket.forward):
            yield f"{place}: has no predicted seconds: plan anew"
        if len(bucket.chunks) > bucket.micro_batches:
            yield f"{place}.chunks: is for {len(bucket.chunks)} micro-batches, the bucket has {bucket.micro_batches}"
        if bucket.chunk is None and any(count != 1 for count in bucket.chunks):
            yield f"{place}.chunks: its packs are not cut, yet a micro-batch has {max(bucket.chunks)} chunks"
        latency = bucket.forward[0] * max(bucket.chunks, default=1) if bucket.forward else None
        if latency is not None and longest is not None and latency > longest * (1 + 1e-9):
            yield (
                f"{place}: takes longer on the first stage ({latency:.4g} s) than the bucket before it "
                f"({longest:.4g} s): buckets enter in descending order"
            )
        longest = latency if latency is not None else longest
    if sum(sum(bucket.chunks) for bucket in plan.buckets) > _MOST_UNITS:
        yield f"buckets: have more than {_MOST_UNITS} chunks together"
    if plan.activation_limit and len(plan.activation_limit) != plan.ranks:
        yield f"activation_limit: has {len(plan.activation_limit)} entries for {plan.ranks} rank(s)"


def _wrong_template(plan: Plan) -> Iterator[str]:
    sizes = [bucket.chunks for bucket in plan.buckets]
    try:
        made = step_template(plan, sizes)
    except ValueError as error:  # a micro-batch is larger than the plan's own limit
        yield f"activation_limit: {error}"
        return
    if not plan.template:
        return
    if len(plan.template) != plan.ranks:
        yield f"template: has {len(plan.template)} rows for {plan.ranks} rank(s)"
        return
    rows: list[tuple[Action, ...]] = []
    for s, texts in enumerate(plan.template):
        actions = []
        for i, text in enumerate(texts):
            try:
                actions.append(Action.parse(text))
            except ValueError as error:
                yield f"template[{s}][{i}]: {error}"
                return
        rows.append(tuple(actions))
    template: Template = tuple(rows)
    try:
        check(template, sizes, plan.stages, virtual=plan.virtual)
    except TemplateError as error:
        yield f"template: {error}"
        return
    for s, (ours, theirs) in enumerate(zip(made, template, strict=True)):
        if len(ours) != len(theirs):
            yield f"template[{s}]: has {len(theirs)} actions, the plan's buckets make it {len(ours)}"
            return
        for i, (wanted, found) in enumerate(zip(ours, theirs, strict=True)):
            if wanted != found:
                yield (
                    f"template[{s}][{i}]: the plan's buckets make it {wanted}, not {found}\n"
                    f"{marked(template, [found])}"
                )
                return
