"""Whether a template can be run at all: complete, in order, and neighbours of one mind about their transfers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from megatron_mux.pipeline.action import Action, Kind, Unit
from megatron_mux.pipeline.bucket import Sizes, forward_order
from megatron_mux.pipeline.template import Template


class TemplateError(ValueError):
    """A template that cannot be run; its text has the grid with the offending cells marked."""


def check(template: Template, sizes: Sizes, stages: int) -> None:
    """Refuse a template that is not one for these buckets.

    Forward passes alone are a template too, if there is no backward pass at all.

    Args:
        template: Actions per rank.
        sizes: Of the buckets.
        stages: Number of stages, virtual ones included.

    Raises:
        TemplateError: An action is on another rank than its stage's, is there twice or not at all, breaks the order of
            a pack's chunks, runs backward before forward, or is sent in another order than it is taken.
    """
    wanted = set(forward_order(sizes))
    _check_places(template, stages, wanted)
    has_backward = any(action.kind == "B" for actions in template for action in actions)
    kinds: tuple[Kind, ...] = ("F", "B") if has_backward else ("F",)
    for kind in kinds:
        for stage in range(stages):
            _check_passes(template, stage, kind, sizes, wanted)
    for actions in template:
        _check_forward_first(template, actions, sizes)


def marked(template: Template, cells: Collection[Action] = ()) -> str:
    """The grid: a row per rank, its actions in order; `cells` stand between `>` and `<`."""
    texts = [[f">{a}<" if a in cells else f" {a} " for a in actions] for actions in template]
    width = max((len(text) for row in texts for text in row), default=0)
    return "\n".join(f"rank {i}: {''.join(text.ljust(width) for text in row)}" for i, row in enumerate(texts))


def _refuse(template: Template, problem: str, *cells: Action) -> TemplateError:
    return TemplateError(f"{problem}\n{marked(template, cells)}")


def _check_places(template: Template, stages: int, wanted: Collection[Unit]) -> None:
    seen: set[Action] = set()
    for rank, actions in enumerate(template):
        for action in actions:
            if action.stage >= stages or action.stage % len(template) != rank:
                raise _refuse(template, f"{action} is not for a stage of rank {rank}", action)
            if action.unit not in wanted:
                raise _refuse(template, f"{action} is for a micro-batch or chunk that no bucket has", action)
            if action in seen:
                raise _refuse(template, f"{action} is there twice", action)
            seen.add(action)


def _passes(template: Template, stage: int, kind: Kind) -> list[Action]:
    rank = template[stage % len(template)]
    return [action for action in rank if action.stage == stage and action.kind == kind]


def _check_passes(template: Template, stage: int, kind: Kind, sizes: Sizes, wanted: Collection[Unit]) -> None:
    """One stage's passes of one kind: all there, chunks in order, and in the order of the stage before."""
    passes = _passes(template, stage, kind)
    missing = sorted(set(wanted) - {action.unit for action in passes})
    if missing:
        raise _refuse(template, f"{Action.of(stage, kind, missing[0])} is missing")
    for action, chunk in _chunks_out_of_order(passes, kind, sizes):
        raise _refuse(template, f"{action} comes before chunk {chunk} of its micro-batch", action)
    if stage == 0:
        return
    for ours, theirs in zip(passes, _passes(template, stage - 1, kind), strict=False):
        if ours.unit != theirs.unit:
            problem = f"stages {stage - 1} and {stage} order their transfers differently"
            raise _refuse(template, f"{problem}: {theirs} stands against {ours}", ours, theirs)


def _chunks_out_of_order(passes: Sequence[Action], kind: Kind, sizes: Sizes) -> Iterator[tuple[Action, int]]:
    """Actions whose chunk is not the next of its micro-batch, with the chunk that should be."""
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
        last = Unit(action.bucket, action.micro_batch, sizes[action.bucket][action.micro_batch] - 1)
        if Action.of(action.stage, "F", last) not in forwards:
            raise _refuse(template, f"{action} comes before the forward of its last chunk", action)
