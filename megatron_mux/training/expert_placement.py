"""The placement of experts that a run asks for: on expert-parallel ranks, or on expert managers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_mux.arguments import MuxArguments
from megatron_mux.backbone.registry import BackboneInfo
from megatron_mux.errors import UserError
from megatron_mux.expert_shape import Placement
from megatron_mux.moe.entries import Ints
from megatron_mux.moe.placement import WorkerKind, from_owners, has_replicas, held, read_placement
from megatron_mux.moe.profile_tasks import identity


def expert_placement(
    file: Path | None, info: BackboneInfo, ranks: int, capacities: Ints | None = None
) -> Placement | None:
    """Which expert ranks hold which experts.

    Args:
        file: Of `--mux-expert-placement`, if given.
        capacities: `[ranks]` experts that each can hold over all layers; None: any number.

    Returns:
        The file's placement; None for the backbone's default.

    Raises:
        UserError: The file is unreadable, for another backbone, another number of ranks or expert managers, leaves an
            expert out, or gives a rank more experts than it can hold.
    """
    experts = info.shape.experts
    if experts is None:
        if file is not None:
            raise UserError(f"--mux-expert-placement {file}: a {info.shape.family} has no experts: remove it")
        return None
    layers = experts.layers(info.shape.layers)
    if file is None:
        default = Placement.contiguous(experts.count, ranks, layers)
        if capacities is None or all(default.held_by(rank) <= capacities[rank] for rank in range(ranks)):
            return None
        wanted = [[first for (first,) in default.ranks[layer]] for layer in layers]
        rows = from_owners(np.array(_fitted(wanted, capacities)))
        return Placement(ranks, dict(zip(layers, rows, strict=True)))
    found = read_placement(file, identity(info), ranks, capacities, workers_are="expert ranks")
    return Placement(ranks, dict(zip(layers, found.placement, strict=True)), found.nodes or ())


PLACEMENT_FILE = "expert_placement.json"
"""In a run's directory: where its experts are, once they are not where they were asked to be."""


def kept_placement(
    arguments: MuxArguments, info: BackboneInfo, continued: bool, capacities: Ints | None = None
) -> tuple[Path | None, str]:
    """The placement that a continued run has moved its experts to, unless the command line asks for another one.

    Args:
        capacities: Experts that each worker can hold over all layers, if a topology says that.

    Returns:
        The file; None if there is none, or it is not for this run's workers: then experts are placed as in a run that
        begins. And what a user should know.

    Raises:
        UserError: The file is wrong.
    """
    asked = isinstance(arguments.mux_expert_placement, Path) and not arguments.replaces_experts
    if not continued or arguments.load is None or asked or info.shape.experts is None:
        return None, ""
    file = arguments.load / PLACEMENT_FILE
    if not file.exists():
        return None, ""
    found, managers = read_placement(file, identity(info)), arguments.expert_managers
    here = kind_of_workers(managers)
    workers = managers or arguments.expert_model_parallel_size
    fewer = bool(managers) and found.workers > workers
    problem = ""
    if found.workers_are not in (None, here) or (found.workers != workers and not fewer):
        problem = (
            f"is for {found.workers} {found.workers_are or 'workers'}, but this run has {workers} {here}"
        )
    elif managers and has_replicas(found.placement):
        problem = "holds replicas, which expert managers do not have"
    elif capacities is not None and not fewer and (held(found.placement, workers) > capacities).any():
        problem = f"does not fit the capacities in --mux-expert-topology {arguments.mux_expert_topology}"
    if problem:
        return None, f"{file}: {problem}: experts are placed anew"
    return file, f"experts are where {file} has them"


def kind_of_workers(managers: int) -> WorkerKind:
    """What holds the experts of a run with so many expert managers."""
    return "expert managers" if managers else "expert ranks"


def placement_on_managers(
    file: Path | None,
    capacity: Sequence[int],
    info: BackboneInfo,
    managers: int,
    continued: bool,
    kept: bool = False,
) -> tuple[Placement, list[str]]:
    """Which expert managers hold which experts: manager n is expert rank n, and worker n - 1 of a placement file.

    Args:
        file: Of `--mux-expert-placement`; by default experts go to one manager after the other.
        capacity: Experts that each manager can hold over all layers; one number for all of them; none: any number.
        continued: Whether the run continues a save: then the file and the capacities may be for more managers, of
            which the first are left, and the experts of those that are gone go where there is most room.
        kept: Whether the run itself has kept the file: then experts that no longer fit go there, too.

    Returns:
        The placement, and what a user should know.

    Raises:
        UserError: The managers have no room for all experts, the file is wrong, or the backbone has no experts.
    """
    experts = info.shape.experts
    if experts is None:
        raise UserError(f"--mux-expert-managers: a {info.shape.family} has no experts: remove it")
    layers, log_lines = experts.layers(info.shape.layers), []
    if continued and len(capacity) > managers:
        given, capacity = capacity, capacity[:managers]
        log_lines.append(
            f"--mux-expert-capacity {','.join(map(str, given))}: is for {len(given)} expert managers, and there are "
            f"{managers}: its first {managers} count (if others are left, give theirs)"
        )
    room = _room(capacity, managers, len(layers), experts.count)
    if file is None:
        wanted: Sequence[Sequence[int]] = [[e % managers for e in range(experts.count)] for _ in layers]
        owners = _fitted(wanted, room)
    else:
        found = read_placement(file, identity(info), replicas=False, workers_are="expert managers")
        gone = continued and found.workers > managers
        if not gone and not kept:
            read_placement(file, workers=managers, capacities=np.array(room))
        wanted = [[one for (one,) in row] for row in found.placement]
        owners = _fitted(wanted, room)
        if gone:
            log_lines.append(_moved(file, found.workers, wanted, owners, managers))
        elif wanted != owners:
            log_lines.append(
                f"{file}: some experts no longer fit where it has them, and go where there is most room"
            )
    counts = Counter(owner for row in owners for owner in row)
    held_ = ", ".join(str(counts[manager]) for manager in range(managers))
    who = "the expert manager holds" if managers == 1 else f"{managers} expert managers hold"
    log_lines.append(f"{who} {held_} of the backbone's {counts.total()} experts")
    ranks = {layer: tuple((1 + n,) for n in row) for layer, row in zip(layers, owners, strict=True)}
    return Placement(managers + 1, ranks), log_lines


def _room(capacity: Sequence[int], managers: int, layers: int, experts: int) -> list[int]:
    """Experts that each manager can hold; more than there are where nothing limits them."""
    needed = layers * experts
    if not capacity:
        return [needed] * managers
    flag = f"--mux-expert-capacity {','.join(map(str, capacity))}"
    if len(capacity) not in (1, managers):
        raise UserError(
            f"{flag}: is for {len(capacity)} expert managers, but there are {managers}: give one number for all of "
            "them, or one for each"
        )
    room = [*capacity] * (managers if len(capacity) == 1 else 1)
    if sum(room) < needed:
        have = "expert manager has" if managers == 1 else f"{managers} expert managers have"
        raise UserError(
            f"{flag}: {have} room for {sum(room)} experts, but the backbone has {layers} layers x {experts} experts = "
            f"{needed}: start more managers, or raise it"
        )
    return room


def _fitted(wanted: Sequence[Sequence[int]], room: Sequence[int] | Ints) -> list[list[int]]:
    """A placement that fits: experts are where they are wanted, as far as there is room; others where most room is."""
    left = list(room)
    owners = [[-1] * len(row) for row in wanted]
    for layer, row in enumerate(wanted):
        for expert, manager in enumerate(row):
            if manager < len(left) and left[manager]:
                owners[layer][expert] = manager
                left[manager] -= 1
    for row in owners:
        for expert, owner in enumerate(row):
            if owner < 0:
                row[expert] = max(range(len(left)), key=left.__getitem__)
                left[row[expert]] -= 1
    return owners


def _moved(
    file: Path,
    workers: int,
    wanted: Sequence[Sequence[int]],
    owners: Sequence[Sequence[int]],
    managers: int,
) -> str:
    """Where the experts of managers that are gone went."""
    rows = zip(wanted, owners, strict=True)
    moved = Counter(now for row in rows for before, now in zip(*row, strict=True) if before != now)
    places = ", ".join(f"{moved[n]} to manager {n + 1}" for n in sorted(moved))
    return (
        f"{file} is for {workers} ranks with experts, and expert managers there are {managers}: of the experts of "
        f"those that are gone, {places}"
    )
