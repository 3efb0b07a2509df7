"""The planner: from tasks and a profile to a plan (MuxTune sections 3.3 to 3.5).

Fusion, grouping and the number of micro-batches come from `search.py`, on costs by equations 3 and 5. Its answer and
the plain policies are then worked out on the chunk grid of a step of typical lengths, cut and uncut, and the best is
taken: a plan is not predicted to be slower than one task after another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from megatron_mux.errors import UserError
from megatron_mux.fusion.alignment import padding_of, paper_chunk
from megatron_mux.fusion.desk import Desk, Premises, WorkedOut
from megatron_mux.fusion.judge import Layout
from megatron_mux.fusion.load import TaskLoad
from megatron_mux.fusion.plan import Plan
from megatron_mux.fusion.search import DoesNotFitError, search
from megatron_mux.memory.sizes import show_size

_WORTH = 0.06
"""How much better than a plain policy another layout must be predicted to be: predictions of two layouts of the same
tasks err differently by about so much (the last line of `benchmarks/policies.py --stages 2`)."""

_MOST_ACTIONS = 8_000
"""Passes simulated while numbers of micro-batches and chunk sizes are compared: a fifth of a second."""

_MOST_COUNTS = 6
"""Numbers of micro-batches that are tried."""

_MANY = 32
"""Micro-batches a stage of all tasks: more of them fill no more of a pipeline's bubble."""

_PLAIN: tuple[Literal["spatial", "temporal"], ...] = ("spatial", "temporal")


class Planner:
    """Makes plans for a backbone on a mesh.

    Args:
        premises: What they are made on.
    """

    def __init__(self, premises: Premises) -> None:
        self.premises = premises
        self.mesh = premises.mesh
        self.info = premises.info

    @property
    def memory_limit(self) -> float | None:
        """Bytes that a rank may use."""
        return self.premises.memory_limit

    def plan(self, loads: Mapping[str, TaskLoad]) -> Plan:
        """The best plan found for these tasks; a function of them alone.

        Raises:
            UserError: Some task does not fit into memory; says which, and what would make it fit.
        """
        ordered = [loads[name] for name in sorted(loads)]
        if not ordered:
            return self._finished(
                Plan("auto", self.mesh.stages, (), self.mesh.virtual, self.mesh.split), None
            )
        desk = Desk(self.premises, ordered, self.premises.alignment)
        best = self._best(desk)
        return self._finished(best, desk)

    def check(self, loads: Mapping[str, TaskLoad]) -> None:
        """Refuse tasks of which some cannot fit into memory however they are laid out; quick.

        Raises:
            UserError: Says which, and what would make it fit.
        """
        if self.memory_limit is None or not loads:
            return
        desk = Desk(self.premises, [loads[name] for name in sorted(loads)], self.premises.alignment)
        if desk.too_large:
            raise UserError(*self._too_large(desk))

    def priced(self, plan: Plan, loads: Mapping[str, TaskLoad]) -> Plan:
        """A plan with what is predicted of it for these tasks, its buckets in the order that follows from that."""
        found = Desk(self.premises, [loads[name] for name in sorted(plan.tasks)], plan.alignment).worked_out(
            plan
        )
        return replace(
            found.plan,
            **self._named,
            predicted_latency_s=found.latency,
            memory_bytes=found.memory,
        )

    def fixed(self, policy: Literal["temporal", "spatial"], loads: Mapping[str, TaskLoad]) -> Plan:
        """What a plain policy means for these tasks, with predicted figures."""
        ordered = [loads[name] for name in sorted(loads)]
        desk = Desk(self.premises, ordered, self.premises.alignment)
        return self._finished(desk.worked_out(desk.of_policy(policy)), desk)

    def _best(self, desk: Desk) -> WorkedOut:
        """The search's layout if it is worth it, else the best plain policy that fits."""
        plans = [desk.of_policy(policy) for policy in _PLAIN]
        # As `serial` fills a pipeline with each task, but without a flush between them.
        plans.append(
            desk.of_policy("temporal", micro_batches=max(2 * self.mesh.pipeline, self._counts(desk)[0]))
        )
        plain = [found for plan in plans if (found := desk.worked_out(plan)).fits]
        if desk.too_large:
            raise UserError(*self._too_large(desk))
        candidates: list[WorkedOut] = []
        try:
            counts = self._counts(desk)
            layout = search(desk.costs, desk.tokens, counts, desk.stage_limit, self.mesh.virtual)
            candidates = [found for found in self._variants(desk, layout) if found.fits]
        except DoesNotFitError:
            pass  # at these numbers of micro-batches
        if not candidates and not plain:
            return desk.worked_out(desk.smallest())
        best = min(candidates, key=lambda found: found.latency, default=None)
        known = min(plain, key=lambda found: found.latency, default=None)
        if best is None or (known is not None and known.latency <= best.latency * (1 + _WORTH)):
            assert known is not None
            return known
        return best

    def _counts(self, desk: Desk) -> list[int]:
        """Numbers of micro-batches to try: the fewest that users count on, doubled while it divides anything more."""
        if self.premises.micro_batches is not None:
            return [self.premises.micro_batches]
        least = max(load.accumulation for load in desk.loads)
        most = max(least, sum(len(load.tokens) for load in desk.loads) // self.mesh.data)
        counts = [least]
        while counts[-1] < most and len(counts) < _MOST_COUNTS:
            if self.memory_limit is None and counts[-1] * len(desk.loads) >= _MANY * self.mesh.pipeline:
                break  # a pipeline that is full does not get fuller
            counts.append(counts[-1] * 2)
        return counts

    def _variants(self, desk: Desk, layout: Layout) -> Iterator[WorkedOut]:
        """The layout with other numbers of micro-batches and with chunks: pipelines like them short and many."""
        spent = 0
        counts = [layout.micro_batches, *(c for c in self._counts(desk) if c != layout.micro_batches)]
        for count in counts if self.mesh.pipeline > 1 else counts[:1]:
            for chunk in self._chunks(desk):
                if spent > _MOST_ACTIONS:
                    return
                found = desk.worked_out(desk.of_layout(layout, count, chunk))
                spent += found.actions
                yield found

    def _chunks(self, desk: Desk) -> list[int | None]:
        if self.premises.chunk != "auto":
            return [self.premises.chunk]
        if self.mesh.pipeline == 1:
            return [None]  # nobody waits for a shorter pass
        longest = max(max(load.tokens, default=1) for load in desk.loads)
        sizes = {paper_chunk([load.max_length for load in desk.loads]), 64, 128, 256, 512, 1024}
        return [None, *sorted(size for size in sizes if size < longest)]

    @property
    def _named(self) -> dict[str, Any]:
        """What every plan of this planner says."""
        return {
            "tensor": self.mesh.tensor,
            "data": self.mesh.data,
            "backbone": self.info.fingerprint,
            "costs": self.premises.profile.said,
            "memory_limit_bytes": self.memory_limit,
        }

    def _finished(self, found: WorkedOut | Plan, desk: Desk | None) -> Plan:
        """A plan with all that is to be said of it."""
        named = self._named
        if isinstance(found, Plan) or desk is None:
            assert isinstance(found, Plan)
            return replace(found, **named)
        raw = {load.name: load.tokens for load in desk.raw}
        padding = padding_of(raw, desk.pad_to)
        return replace(
            found.plan,
            **named,
            policy="auto",
            predicted_latency_s=found.latency,
            memory_bytes=found.memory,
            alternatives=self._alternatives(desk),
            padding={
                "plan": padding.share,
                "within_tasks": padding.share_within_tasks,
                "zero_padded": padding.share_zero_padded,
            },
        )

    def _alternatives(self, desk: Desk) -> dict[str, float | None]:
        """Predicted seconds of a step of every task by the plain policies; None: does not fit into memory."""
        found: dict[str, float | None] = {}
        alone = [desk.worked_out(desk.of_policy("spatial", [load])) for load in desk.loads]
        found["serial"] = sum(a.latency for a in alone) if all(a.fits for a in alone) else None
        for policy in _PLAIN:
            known = desk.worked_out(desk.of_policy(policy))
            found[policy] = known.latency if known.fits else None
        padded = Desk(self.premises, desk.raw, "longest")
        known = padded.worked_out(padded.of_policy("spatial"))
        found["padded"] = known.latency if known.fits else None
        return found

    def _too_large(self, desk: Desk) -> list[str]:
        """Which tasks do not fit, and what would make them fit."""
        assert self.memory_limit is not None
        resident = desk.resident
        if max(resident) > self.memory_limit:
            rank = max(range(len(resident)), key=lambda r: resident[r])
            held = f"{show_size(resident[rank])} that stage {rank} holds of the backbone and the adapters"
            more = "give more memory, more stages or tensor ranks, or bf16"
            return [f"the memory limit of {show_size(self.memory_limit)} is less than the {held}: {more}"]
        said = []
        for task in desk.too_large:
            load, ranks = desk.loads[task], self.mesh.pipeline
            kept = [sum(desk.costs.longest(task)[rank::ranks]) for rank in range(ranks)]
            longest = load.longest_sequence
            needed = max(r + k for r, k in zip(resident, kept, strict=True))
            length = desk.longest_that_fits(task)
            advice = f"lower its data.max_length to {length}, " if length >= 2 else ""
            if desk.alignment == "longest":
                advice = "do not pad to the longest of all tasks (--mux-align dense), "
            more = (
                ""
                if self.premises.recompute == "full"
                else "recompute layers (--recompute-granularity full), "
            )
            said.append(
                f"task {load.name!r}: one sequence of {longest} tokens needs {show_size(needed)} on a rank, the limit "
                f"is {show_size(self.memory_limit)}: {advice}{more}or give more memory, stages or tensor ranks"
            )
        return said
