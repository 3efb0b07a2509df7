"""The memory of a run's tasks for its planner: tables, made where no file has them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from threading import current_thread

from megatron_mux.dry_run.process import dry_runs, kept_worker
from megatron_mux.dry_run.run_spec import Dtype, RunSpec
from megatron_mux.errors import UserError
from megatron_mux.estimate.solve import NotLinear
from megatron_mux.estimate.tables import Tables, make
from megatron_mux.files import cache_directory
from megatron_mux.footprint.memory import Memory
from megatron_mux.footprint.signature import Signature
from megatron_mux.fusion.mesh import Mesh
from megatron_mux.fusion.plan import Plan
from megatron_mux.fusion.planner.planning_context import PlanningContext
from megatron_mux.fusion.planner.step_memory import are_short
from megatron_mux.gpus import assumed
from megatron_mux.memory.forms.method import Recompute
from megatron_mux.memory.worker import WorkerError
from megatron_mux.quantised.scheme import QuantMethod

Share = Callable[[Callable[[], Memory]], Memory]

_DTYPES: dict[int, Dtype] = {2: "bfloat16", 4: "float32", 8: "float64"}


class RunTables:
    """A `MemorySource`. What was asked for once is remembered, and serves those who ask for some of it.

    Args:
        context: Of the plans; ranks and recomputation may differ. Whoever asks for some of its tasks is given all.
        quantise: How the backbone's weights are quantised on load; None: as its config says.
        say: Told before tables are made, which takes seconds.
        share: Gets the first rank's answer to all ranks; every rank asks for what is new in the same order.
    """

    def __init__(
        self,
        context: PlanningContext,
        quantise: QuantMethod | None,
        say: Callable[[str], None],
        share: Share = lambda made: made(),
        leads: bool = True,
    ) -> None:
        about = context.profile.about
        self._context, self._say, self._share, self._leads = context, say, share, leads
        self._base = RunSpec(
            context.info.shape.config,
            (),
            Plan("auto", 1, ()),
            dtype=_DTYPES[context.itemsize],
            residence=context.residence,
            device="cpu" if about.get("kind", "cpu") == "cpu" else "cuda",
            gpu=assumed(str(about.get("device", "")))[0].gpu,
            quantise=quantise,
        )
        self._thread = current_thread()
        self._known: dict[tuple[Mesh, Recompute], list[tuple[bool, Memory]]] = defaultdict(list)
        self._coming: dict[tuple[Mesh, Recompute], tuple[bool, Sequence[Signature]]] = {}

    def memory(
        self, mesh: Mesh, recompute: Recompute, signatures: Sequence[Signature], short: bool
    ) -> Memory:
        """See `MemorySource`.

        Raises:
            UserError: It cannot be predicted.
        """
        short = short and self._base.device == "cpu"
        if (memory := self._found(mesh, recompute, signatures, short)) is not None:
            return memory
        if current_thread() is not self._thread:  # other ranks ask in theirs, where all plan together
            raise UserError("the memory of these tasks together has not been predicted yet")
        loads = self._context.tasks.values()
        first = {load.signature(self._context.info.shape) for load in loads}
        if first.issuperset(signatures) and (not short or are_short(loads)):
            signatures = sorted(first)
        of_short, coming = self._coming.get((mesh, recompute), (True, ()))
        if short >= of_short and set(signatures) <= set(coming):
            try:
                return self._shared(mesh, recompute, coming, of_short)
            except UserError:  # on every rank; it may be due to others of them
                del self._coming[mesh, recompute]
        return self._shared(mesh, recompute, signatures, short)

    def _shared(
        self, mesh: Mesh, recompute: Recompute, signatures: Sequence[Signature], short: bool
    ) -> Memory:
        made = self._share(partial(self._made, mesh, recompute, signatures, short))
        self._known[mesh, recompute].append((short, made))
        return made

    def prepare(
        self, mesh: Mesh, recompute: Recompute, signatures: Sequence[Signature], short: bool
    ) -> Future[None] | None:
        """See `MemorySource`."""
        short = short and self._base.device == "cpu"
        if self._found(mesh, recompute, signatures, short) is not None:
            return None
        self._coming[mesh, recompute] = short, signatures
        if not self._leads:
            return None
        run, directory = self._run(mesh, recompute), cache_directory("tables")
        return kept_worker().submit(make, run, signatures, short, directory)

    def _found(
        self, mesh: Mesh, recompute: Recompute, signatures: Sequence[Signature], short: bool
    ) -> Memory | None:
        for only_short, memory in self._known[mesh, recompute]:
            if short >= only_short and set(signatures) <= set(memory.signatures):
                return memory
        return None

    def _run(self, mesh: Mesh, recompute: Recompute) -> RunSpec:
        plan = Plan("auto", mesh.stages, (), mesh.virtual, mesh.split, tensor=mesh.tensor, data=mesh.data)
        return replace(
            self._base,
            plan=plan,
            tensor=mesh.tensor,
            sequence_parallel=mesh.tensor > 1 and self._divides_rows,
            recompute=recompute,
            expert=mesh.expert,
            expert_tensor=mesh.expert_tensor or 1,
        )

    def _made(self, mesh: Mesh, recompute: Recompute, signatures: Sequence[Signature], short: bool) -> Memory:
        runs = partial(dry_runs, whole=True, worker=kept_worker())
        try:
            run = self._run(mesh, recompute)
            return Tables(run, runs=runs, say=self._say, short=short).memory(signatures)
        except (NotLinear, WorkerError) as error:
            raise UserError(
                f"the memory of these tasks cannot be predicted ({error}): plan without a memory limit"
            ) from error

    @property
    def _divides_rows(self) -> bool:
        return self._context.sequence_parallel or self._context.info.shape.experts is not None
