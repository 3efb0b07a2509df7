"""The memory of a run's tasks for its planner: tables, made where no file has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from megatron_mux.dry_run.run_spec import Dtype, RunSpec
from megatron_mux.errors import UserError
from megatron_mux.estimate.solve import TOLERANCE, NotLinear
from megatron_mux.estimate.tables import Tables
from megatron_mux.footprint.memory import Memory
from megatron_mux.footprint.signature import Signature
from megatron_mux.fusion.mesh import Mesh
from megatron_mux.fusion.plan import Plan
from megatron_mux.fusion.planner.planning_context import PlanningContext
from megatron_mux.gpus import assumed
from megatron_mux.memory.forms.method import Recompute
from megatron_mux.memory.worker import Worker, WorkerError
from megatron_mux.quantised.scheme import Method

Share = Callable[[Callable[[], Memory]], Memory]

_SECONDS = 600.0
"""Time limit of the dry runs for one answer."""
_ON_CPU = 0.05
"""What lines may be off on a CPU: plans need bounds from above, and lines that are too low are raised."""
_DTYPES: dict[int, Dtype] = {2: "bfloat16", 4: "float32", 8: "float64"}


class RunTables:
    """A `MemorySource`. What was asked for once is remembered.

    Args:
        context: Of the plans; ranks and recomputation may differ.
        quantise: How the backbone's weights are quantised on load; None: as its config says.
        say: Told before tables are made, which takes seconds.
        share: Gets the first rank's answer to all ranks; every rank asks in the same order.
    """

    def __init__(
        self,
        context: PlanningContext,
        quantise: Method | None,
        say: Callable[[str], None],
        share: Share = lambda made: made(),
    ) -> None:
        about = context.profile.about
        self._context, self._say, self._share = context, say, share
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
        self._worker: Worker | None = None
        self._known: dict[tuple[Mesh, Recompute, tuple[Signature, ...], bool], Memory] = {}

    def memory(
        self, mesh: Mesh, recompute: Recompute, signatures: Sequence[Signature], short: bool
    ) -> Memory:
        """See `MemorySource`.

        Raises:
            UserError: It cannot be predicted.
        """
        asked = mesh, recompute, tuple(signatures), short and self._base.device == "cpu"
        if asked not in self._known:
            self._known[asked] = self._share(partial(self._made, *asked))
        return self._known[asked]

    def _made(self, mesh: Mesh, recompute: Recompute, signatures: Sequence[Signature], short: bool) -> Memory:
        plan = Plan("auto", mesh.stages, (), mesh.virtual, mesh.split, tensor=mesh.tensor, data=mesh.data)
        run = replace(
            self._base,
            plan=plan,
            tensor=mesh.tensor,
            sequence_parallel=mesh.tensor > 1 and self._divides_rows,
            recompute=recompute,
            expert=mesh.expert,
            expert_tensor=mesh.expert_tensor or 1,
        )
        # It is kept: what dry runs import takes seconds. It ends with this process.
        self._worker = self._worker or Worker(_SECONDS)
        try:
            return Tables(
                run,
                worker=self._worker,
                say=self._say,
                short=short,
                tolerance=_ON_CPU if run.device == "cpu" else TOLERANCE,
            ).memory(signatures)
        except (NotLinear, WorkerError) as error:
            raise UserError(
                f"the memory of these tasks cannot be predicted ({error}): plan without a memory limit"
            ) from error

    @property
    def _divides_rows(self) -> bool:
        return self._context.sequence_parallel or self._context.info.shape.experts is not None
