"""Validation of templates: complete, in order, with matching transfers, and free of deadlock."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from megatron_mux.pipeline.action import Action, ChunkId, Kind, Pass
from megatron_mux.pipeline.bucket import Sizes, forward_order
from megatron_mux.pipeline.template import Template


class TemplateError(ValueError):
    """Raised for a template that cannot run; the message shows the grid with the offending cells marked."""


def check(template: Template, sizes: Sizes, stages: int, period: int | None = None, virtual: int = 1) -> None:
    """Check that a template runs these buckets to the end.

    A template may consist of forward passes only (evaluation), and may leave out all `N` and `U` actions.

    Args:
        period: Number of buckets in a step; None if there is only one step.

    Raises:
        TemplateError: An action is on the wrong rank, is missing or duplicated, breaks the order of a pack's chunks,
            or runs backward before forward; a bucket's step ends before its passes or its next step starts too early;
            two neighbours order their transfers differently; or actions wait for each other in a circle.
    """
    if len(template) * virtual != stages:
        raise _refuse(
            template, f"it is for {len(template)} rank(s) of {virtual} stage(s) each: not {stages} stages"
        )
    wanted = set(forward_order(sizes))
    _check_places(template, stages, wanted, len(sizes))
    has_backward = any(action.kind == "B" for actions in template for action in actions)
    kinds: tuple[Pass, ...] = ("F", "B") if has_backward else ("F",)
    for kind in kinds:
        for stage in range(stages):
            _check_passes(template, stage, kind, sizes, wanted)
    for actions in template:
        _check_forward_first(template, actions, sizes)
    steps = len(sizes) > (period or len(sizes))
    if (has_backward and steps) or any(not action.is_pass for actions in template for action in actions):
        for rank in range(len(template)):
            _check_ends(template, rank, virtual, sizes, period or len(sizes))
    _check_links(template, stages)
    _check_progress(template, stages)


def _refuse(template: Template, problem: str, *cells: Action) -> TemplateError:
    """The problem, and the template as a grid with one row per rank; actions in `cells` are marked as `>action<`."""
    texts = [[f">{a}<" if a in cells else f" {a} " for a in actions] for actions in template]
    width = max((len(text) for row in texts for text in row), default=0)
    rows = (f"rank {i}: {''.join(text.ljust(width) for text in row)}" for i, row in enumerate(texts))
    return TemplateError("\n".join((problem, *rows)))


def _check_places(template: Template, stages: int, wanted: Collection[ChunkId], buckets: int) -> None:
    seen: set[Action] = set()
    for rank, actions in enumerate(template):
        for action in actions:
            last = stages if action.is_pass else len(template)
            if action.stage >= last or action.stage % len(template) != rank:
                raise _refuse(template, f"{action} is not for a stage of rank {rank}", action)
            end = Action(action.stage, action.kind, action.bucket)
            if not (
                action.chunk_id in wanted if action.is_pass else action == end and action.bucket < buckets
            ):
                raise _refuse(template, f"{action} is for a micro-batch or chunk that no bucket has", action)
            if action in seen:
                raise _refuse(template, f"{action} is there twice", action)
            seen.add(action)


def _passes(template: Template, stage: int, kind: Kind) -> list[Action]:
    rank = template[stage % len(template)]
    return [action for action in rank if action.stage == stage and action.kind == kind]


def _check_passes(
    template: Template, stage: int, kind: Pass, sizes: Sizes, wanted: Collection[ChunkId]
) -> None:
    """Check one stage's passes of one kind: complete, and chunks in order."""
    passes = _passes(template, stage, kind)
    missing = sorted(set(wanted) - {action.chunk_id for action in passes})
    if missing:
        raise _refuse(template, f"{Action.of(stage, kind, missing[0])} is missing")
    for action, chunk in _chunks_out_of_order(passes, kind, sizes):
        raise _refuse(template, f"{action} comes before chunk {chunk} of its micro-batch", action)


def _chunks_out_of_order(passes: Sequence[Action], kind: Pass, sizes: Sizes) -> Iterator[tuple[Action, int]]:
    """Yield each action whose chunk is out of order, with the chunk expected in its place."""
    following: dict[tuple[int, int], int] = {}
    for action in passes:
        key = (action.bucket, action.micro_batch)
        first = 0 if kind == "F" else sizes[action.bucket][action.micro_batch] - 1
        due = following.get(key, first)
        if action.chunk != due:
            yield action, due
        following[key] = due + (1 if kind == "F" else -1)


def _check_forward_first(template: Template, actions: Sequence[Action], sizes: Sizes) -> None:
    """A pack's backward needs its forward, all chunks of it: later ones hold gradients of earlier ones' KV."""
    forwards: set[Action] = set()
    for action in actions:
        if action.kind == "F":
            forwards.add(action)
            continue
        if action.kind != "B":
            continue
        last = ChunkId(action.bucket, action.micro_batch, sizes[action.bucket][action.micro_batch] - 1)
        if Action.of(action.stage, "F", last) not in forwards:
            raise _refuse(template, f"{action} comes before the forward of its last chunk", action)


def _check_ends(template: Template, rank: int, each: int, sizes: Sizes, period: int) -> None:
    """On one rank: every bucket's step ends once, after its backward passes and before its next step begins."""
    left = [sum(chunks) * each for chunks in sizes]
    normed = updated = 0  # buckets end in their order
    for action in template[rank]:
        if action.kind in ("F", "N") and action.bucket - period >= updated:
            before = Action(rank, "U", action.bucket - period)
            raise _refuse(template, f"{action} comes before {before}: its tasks have not stepped", action)
        if action.kind == "B":
            left[action.bucket] -= 1
        elif action.kind == "N":
            if action.bucket != normed or left[action.bucket]:
                raise _refuse(
                    template, f"{action} comes before the last backward pass or out of turn", action
                )
            normed += 1
        elif action.kind == "U":
            if action.bucket != updated or normed <= updated:
                raise _refuse(
                    template, f"{action} comes before {Action(rank, 'N', updated)} or out of turn", action
                )
            updated += 1
    for kind, count in (("N", normed), ("U", updated)):
        if count < len(sizes):
            raise _refuse(template, f"{rank}{kind}{count} is missing")


def _check_links(template: Template, stages: int) -> None:
    """What a stage sends its neighbour is taken in the order in which it is sent.

    Of ranks with several stages, passes alone are compared: what ends a bucket's step is received in the sender's
    order, whatever it is used for first.
    """
    ranks = len(template)
    for stage in range(stages - 1):
        for backward in (False, True):
            first, second = (stage + 1, stage) if backward else (stage, stage + 1)
            sent, taken = (
                [
                    action
                    for action in template[stage % ranks]
                    if action.stage == stage
                    and action.is_backward == backward
                    and (action.is_pass or stages == ranks)
                ]
                for stage in (first, second)
            )
            for theirs, ours in zip(sent, taken, strict=True):
                if (theirs.kind, theirs.chunk_id) != (ours.kind, ours.chunk_id):
                    problem = f"stages {first} and {second} order their transfers differently"
                    raise _refuse(template, f"{problem}: {theirs} stands against {ours}", ours, theirs)


def _check_progress(template: Template, stages: int) -> None:
    """A dry run: every rank computes its actions in order, each as soon as its neighbour's part of it is done."""
    done: set[Action] = set()
    rows = [iter(actions) for actions in template]
    due = [next(row, None) for row in rows]
    free = list(range(len(template)))
    waiting: dict[Action, int] = {}  # for what which rank waits
    while free:
        rank = free.pop()
        while (action := due[rank]) is not None:
            needed = action.before(stages, len(template))
            if needed is not None and needed not in done:
                waiting[needed] = rank
                break
            done.add(action)
            due[rank] = next(rows[rank], None)
            if action in waiting:
                free.append(waiting.pop(action))
    if waiting:
        stuck = [action for action in due if action is not None]
        raise _refuse(template, "deadlock: these wait for each other", *stuck)
