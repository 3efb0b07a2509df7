"""Random runs of a pipeline on played GPUs: plans, what goes wrong in them, and what happens between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_mux.backbone.exchange import Course, interleave
from megatron_mux.engine.out_of_memory import FailedBuckets
from megatron_mux.fusion.graphs.launch_order import PieceCost, kahn
from megatron_mux.fusion.plan import Bucket, HybridTask, Plan, Policy
from megatron_mux.fusion.schedules import PIPELINE_SCHEDULES, Schedule
from megatron_mux.fusion.step import step_template
from megatron_mux.pipeline.action import Action, ChunkId, TimedAction
from megatron_mux.pipeline.bucket import forward_order
from megatron_mux.pipeline.check import check
from megatron_mux.pipeline.communicate import Communicator
from megatron_mux.pipeline.execute import execute
from megatron_mux.pipeline.template import Template, forward_only, plain
from tests.unit.pipeline.nccl import Queues, Work, World, installed

MESSAGES = 2
"""Of tensor ranks in a pass."""
DEVICE_WAITS = ("cudaFree", "pinned allocation", "first launch of a kernel")


@dataclass(frozen=True)
class Part:
    """A template that runs from one flush to the next.

    Attributes:
        templates: Of each pipeline.
        sizes: Chunks of each pipeline's micro-batches, by bucket; those of all steps.
        period: Buckets of a step.
        lowest: For each bucket of a step, the lowest stage that trains.
    """

    templates: tuple[Template, ...]
    sizes: tuple[list[list[int]], ...]
    period: int
    lowest: tuple[int, ...]


@dataclass(frozen=True)
class Run:
    """A run: its parts, and everything that may make a rank wait.

    Attributes:
        ranks, stages, pipelines: Ranks of a pipeline, their stages, and how many pipelines sum their gradients.
        queues: See `Queues`.
        parts: What is executed, one after the other.
        seed: For what happens at each action.
        waits: How likely a rank waits for its device at an action.
        copies: How likely it waits for its own stream.
        failures: How likely an action runs out of memory.
        timed: Whether actions are timed.
        tensor: Ranks that share each stage. Several exchange messages in each pass, in turns of its hybrid tasks.
        hybrid_tasks: Of each bucket.
    """

    ranks: int
    stages: int
    pipelines: int
    queues: Queues
    parts: tuple[Part, ...]
    seed: int = 0
    waits: float = 0.0
    copies: float = 0.0
    failures: float = 0.0
    timed: bool = False
    tensor: int = 1
    hybrid_tasks: int = 1


def in_turns(run: Run) -> Run:
    """The run with two tensor ranks to a stage. These leave out no pass that has run out of memory."""
    random = Random(f"in turns {run.seed}")
    return replace(run, failures=0.0, tensor=2, hybrid_tasks=random.randint(2, 3))


def random_run(seed: int) -> Run:
    """A random run; the same seed gives the same."""
    random = Random(seed)
    ranks, virtual = random.choice([2, 2, 3, 4]), random.choice([1, 1, 2])
    pipelines = random.choice([1, 1, 2])
    parts = tuple(random_part(random, ranks, virtual, pipelines) for _ in range(random.choice([1, 1, 2])))
    queues: Queues = random.choice(["many", "one", "serial"])
    waits, copies = random.choice([0.0, 0.1, 0.5]), random.choice([0.0, 0.1])
    failures, timed = random.choice([0.0, 0.0, 0.05]), random.random() < 0.5
    return Run(ranks, ranks * virtual, pipelines, queues, parts, seed, waits, copies, failures, timed)


def random_part(random: Random, ranks: int, virtual: int, pipelines: int) -> Part:
    """An evaluation, or some steps of a plan; with several stages to a rank all pipelines have equal sizes."""
    stages = ranks * virtual
    if random.random() < 0.2:
        counts = (
            [random.randint(1, 8)] * pipelines
            if virtual > 1
            else [random.randint(1, 8) for _ in range(pipelines)]
        )
        templates = tuple(forward_only(ranks, count, virtual) for count in counts)
        return Part(templates, tuple(plain([count]) for count in counts), 1, (stages,))
    plan = random_plan(random, ranks, virtual)
    period = len(plan.buckets)
    steps = random.randint(1, 3) if PIPELINE_SCHEDULES[plan.schedule].rolls else 1

    def sizes() -> list[list[int]]:
        most = 3 if random.random() < 0.3 else 1
        least = 1 if pipelines == 1 else 0
        return [
            [random.randint(1, most) for _ in range(random.randint(least, 3))] for _ in range(period * steps)
        ]

    own = tuple([sizes()] * pipelines if virtual > 1 else [sizes() for _ in range(pipelines)])
    templates = tuple(step_template(plan, each) for each in own)
    lowest = tuple(random.choice([0, 0, random.randrange(stages)]) for _ in range(period))
    return Part(templates, own, period, lowest)


def random_plan(random: Random, ranks: int, virtual: int) -> Plan:
    """A plan with any schedule; with costs that differ tenfold, and in one of two cases a limit of memory."""
    stages = ranks * virtual
    schedules: list[Schedule] = (
        ["planned", "planned", "interleaved"] if virtual > 1 else ["planned", "1f1b", "gpipe"]
    )
    policy: Policy = random.choice(["auto", "auto", "spatial"])

    def costs(count: int, least: float = 1.0) -> tuple[float, ...]:
        return tuple(random.uniform(least, 10.0) for _ in range(count))

    buckets = tuple(
        Bucket(
            (HybridTask((name,)),),
            micro_batches=3,
            forward=costs(stages),
            backward=costs(stages),
            memory=costs(stages),
            transfer=costs(stages - 1, 0.0),
        )
        for name in "abcd"[: random.randint(1, 4)]
    )
    limit: tuple[float, ...] = ()
    if random.random() < 0.5:
        limit = tuple(
            random.uniform(3.0, 9.0) * max(sum(b.memory[s] for s in range(r, stages, ranks)) for b in buckets)
            for r in range(ranks)
        )
    split = (1,) * stages if virtual > 1 else ()
    schedule = random.choice(schedules)
    return Plan(policy, stages, buckets, virtual, split=split, activation_limit=limit, schedule=schedule)


@dataclass
class Stub:
    """A rank of a part: it computes nothing, but waits as computations do.

    Attributes:
        run, part: What it is in.
        world: The played GPUs.
        random: Decides what happens at each action.
        failed: Buckets that ran out of memory.
        done: Actions computed.
    """

    run: Run
    part: Part
    pipeline: int
    rank: int
    tensor_rank: int
    world: World
    random: Random
    failed: FailedBuckets
    done: list[Action] = field(default_factory=list)

    def __post_init__(self) -> None:
        order = forward_order(self.part.sizes[self.pipeline])
        self._number: dict[ChunkId, int] = {chunk_id: i for i, chunk_id in enumerate(order)}

    def shape(self, action: Action) -> tuple[int, ...]:
        """No two chunks have the same, so that a transfer that meets another one is noticed."""
        if not action.is_pass:
            return action.bucket + 1, 2
        if action.kind == "B" and self._lowest(action) > action.stage:
            return 0, 1
        return self._number[action.chunk_id] + 1, 1

    def needs_gradient(self, action: Action) -> bool:
        return self._lowest(action) < action.stage

    def label(self, action: Action) -> str:
        return str(action)

    def forward(self, action: Action, hidden: Tensor | None) -> Tensor:
        assert (hidden is None) == (action.stage == 0)
        self._compute(action)
        output = torch.empty(self._number[action.chunk_id] + 1, 1, device="meta")
        return output.requires_grad_(self._lowest(action) <= action.stage)

    def backward(self, action: Action, output: Tensor, gradient: Tensor | None) -> None:
        assert (gradient is None) == (action.stage == self.run.stages - 1)
        assert output.requires_grad == (self._lowest(action) <= action.stage)
        self._compute(action)

    def norm(self, action: Action, others: Tensor | None) -> Tensor:
        self._compute(action)
        if self.run.pipelines > 1:
            group = "gradients", self.rank, self.tensor_rank
            self.world.meet(group, self.run.pipelines, f"sum of gradients {action}")
        return torch.empty(action.bucket + 1, 2, dtype=torch.float64, device="meta")

    def update(self, action: Action, whole: Tensor | None) -> Tensor:
        self._compute(action)
        return torch.empty(action.bucket + 1, 2, dtype=torch.float64, device="meta")

    def _lowest(self, action: Action) -> int:
        return self.part.lowest[action.bucket % self.part.period]

    def _compute(self, action: Action) -> None:
        """Launch kernels; now and then something waits."""
        self.done.append(action)
        if self.random.random() < self.run.copies:
            self.world.wait_for_stream(f"blocking copy at {action}")
        if self.random.random() < self.run.waits:
            self.world.wait_for_device(f"{self.random.choice(DEVICE_WAITS)} at {action}")
        self.failed.attempt(action, lambda: self._kernels(action))

    def _kernels(self, action: Action) -> None:
        if action.is_pass and self.run.tensor > 1:
            self._in_turns(action)
        self.world.issue(str(action))
        if self.random.random() < self.run.failures:
            raise torch.OutOfMemoryError("played")

    def _in_turns(self, action: Action) -> None:
        """A pass of each hybrid task, piece by piece; now and then something waits between two pieces."""
        chains = [[PieceCost(1.0, 1.0)] * MESSAGES + [PieceCost(1.0)]] * self.run.hybrid_tasks
        courses: list[Any] = [Course(self._pieces(action, i), None) for i in range(len(chains))]  # type: ignore[arg-type]
        interleave(courses, kahn(chains), self)  # type: ignore[arg-type]

    def _pieces(self, action: Action, index: int) -> Iterator[str]:
        for message in range(MESSAGES):
            self.world.issue(f"{action} {index}.{message}")
            if self.random.random() < self.run.waits / MESSAGES:
                self.world.wait_for_device(f"{self.random.choice(DEVICE_WAITS)} in {action}")
            yield f"{action} {index}.{message}"

    def issue(self, message: str) -> Work:
        """See `Exchange.issue`."""
        group = "tensor", self.pipeline, self.rank
        name = f"message {message}"
        meeting = group, self.run.tensor
        return Work(self.world, self.world.issue(name, ("tensor", group), meeting=meeting, about=message))


def play(run: Run) -> list[str]:
    """Play a run on all ranks; returns what waited, in the order of ranks.

    Raises:
        Hang: It does not end.
    """
    world = World(run.ranks * run.pipelines * run.tensor, run.queues)
    told: list[list[str]] = [[] for _ in range(world.ranks)]

    def host(process: int) -> None:
        place, tensor_rank = divmod(process, run.tensor)
        pipeline, rank = divmod(place, run.ranks)
        parallel = _parallel(run, pipeline, rank, tensor_rank)
        communicator = Communicator(parallel, closes_ring=run.stages > run.ranks)
        random = Random(f"{run.seed} {process}")
        for number, part in enumerate(run.parts):
            failed = FailedBuckets(part.period, (), parallel)
            stub = Stub(run, part, pipeline, rank, tensor_rank, world, random, failed)
            template, times = part.templates[pipeline], list[TimedAction]()
            timer = times.append if run.timed else None
            execute(template, rank, stub, communicator, torch.float32, timer, run.stages)
            assert stub.done == list(template[rank])
            assert not run.timed or [timed.action for timed in times] == stub.done
            # All ranks agree on what follows: another task joins, one is evaluated.
            world.meet("world", world.ranks, f"agreement {number}")
            world.wait_for_stream(f"agreement {number}")
            told[process] += [f"part {number}: {len(stub.done)} actions", *sorted(map(str, failed._reasons))]

    with pytest.MonkeyPatch.context() as patch:
        installed(world, patch)
        world.run(host)
    return [*(text for own in told for text in own), str(sorted(world.waits.items()))]


def checked(run: Run) -> Run:
    """The same, its templates validated as the engine's are."""
    for part in run.parts:
        for template, sizes in zip(part.templates, part.sizes, strict=True):
            check(template, sizes, run.stages, part.period, run.stages // run.ranks)
    return run


def _parallel(run: Run, pipeline: int, rank: int, tensor_rank: int) -> Any:
    first = pipeline * run.ranks
    ranks = [place * run.tensor + tensor_rank for place in range(first, first + run.ranks)]
    return SimpleNamespace(
        rank=ranks[rank],
        pp_rank=rank,
        pp_size=run.ranks,
        dp_size=run.pipelines,
        tp_size=run.tensor,
        pp_group=SimpleNamespace(ranks=tuple(ranks)),
        pipeline_ranks=ranks,
        device=torch.device("cuda"),
        heartbeat=SimpleNamespace(at=lambda action: None),
    )
