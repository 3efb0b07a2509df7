"""Adapters timed on their BaseOp, in turns with the BaseOp alone: what the two take more is theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from megatron_mux.adapters.base_op import AttachedBaseOp
from megatron_mux.adapters.expert_op import AttachedExperts
from megatron_mux.adapters.host import Host, no_weights
from megatron_mux.adapters.kind import AdapterSpec, Sample, accepted
from megatron_mux.adapters.registry import KINDS
from megatron_mux.base_ops import EXPERT_OPS, BaseOpName
from megatron_mux.batch.packed_batch import activate
from megatron_mux.fusion.profiler.expert_probes import ExpertProbes
from megatron_mux.fusion.profiler.probed_stage import Probe, ProbedStage, Run
from megatron_mux.kernels.low_rank.choice import KernelChoice, KernelName, alternatives
from megatron_mux.tasks import TaskSpec

_MANY_TASKS = 16
"""Tasks of a probe for which kernels that launch something for each task take long."""


def adapter_samples() -> list[Sample]:
    """The adapters of all kinds whose seconds make a profile."""
    return [sample for kind in KINDS.values() for sample in kind.samples()]


class AdapterProbes:
    """Makes the probes of adapters.

    Args:
        stage: What they attach to.
        experts: Gives the pairs of its experts; None where it has none.

    Attributes:
        chosen: Which kernels compute their low-rank terms.
    """

    def __init__(self, stage: ProbedStage, experts: ExpertProbes | None) -> None:
        self.stage, self._experts = stage, experts
        self.chosen: KernelChoice = ()

    def kernels(self) -> list[Probe]:
        """Low-rank terms at each BaseOp, by each of several kernels; empty where there is one.

        Of one task, and of many with dropout where that can be. The default kernels come first. Those of routed
        experts are always products one by one.
        """
        stage = self.stage
        here = alternatives(stage.device, stage.dtype)
        sample, probes = KINDS["LORA"].samples()[0], list[Probe]()
        for op in stage.ops if len(here) > 1 else ():
            if op in EXPERT_OPS:
                continue
            section = sample.section(op, list(stage.ops[op].parts))
            dropping = section.model_copy(update={"lora_dropout": 0.1})
            many = dropping if accepted(dropping, stage.shape) else section
            for specs, tasks in ((section, 1), (many, _MANY_TASKS)):
                for name in here:
                    probes += self._probes(specs, op, stage.coarse[-1:], tasks, name)
        return probes

    def all(self) -> list[Probe]:
        """Each kind wherever it can be; then two of a kind together."""
        probes, pairs = list[Probe](), list[Probe]()
        coarse = self.stage.coarse
        for sample in adapter_samples():
            at = [op for op in self.stage.ops if self._can_be(sample, op)]
            for op in at:
                probes += self.of(sample, op, coarse, tasks=1)
            for op in at[:1] if sample.paired else ():
                pairs += self.of(sample, op, coarse[1:3] or coarse, tasks=2)
        return probes + pairs

    def _can_be(self, sample: Sample, op: BaseOpName) -> bool:
        """Whether some task can have such adapters at a BaseOp."""
        if op in EXPERT_OPS and self.stage.parallel.experts.tensor_size > 1:
            return False
        return sample.at(op, self.stage.shape) is not None

    def of(self, sample: Sample, op: BaseOpName, rows: Sequence[int], tasks: int) -> list[Probe]:
        """A BaseOp with the adapters of so many tasks, which share the rows."""
        section = sample.section(op, list(self.stage.ops[op].parts))
        return self._probes(section, op, rows, tasks)

    def _probes(
        self,
        section: AdapterSpec,
        op: BaseOpName,
        rows: Sequence[int],
        tasks: int,
        kernels: KernelName | None = None,
    ) -> list[Probe]:
        """Of several numbers of rows with the same adapters: those of many experts take memory."""
        stage, info = self.stage, self.stage.ops[op]
        host = Host([info], stage.parallel, stage.dtype, stage.shape, weights=no_weights)
        specs = [_spec(f"probe-{i}", section) for i in range(tasks)]
        adapters = [spec.adapter.attach(host, spec, 10, None) for spec in specs]
        parameters = [p.value for adapter in adapters for p in adapter.parameters]
        attached = (AttachedExperts if op in EXPERT_OPS else AttachedBaseOp)(info, host)
        attached.kernels = kernels or dict(self.chosen).get(op)
        for slot, adapter in enumerate(adapters):
            adapter.slot = slot
            attached.add(adapter.name, adapter.at[0], slot)

        def make(count: int) -> Run:
            compute, x = self._pass(attached, count, tasks)
            return lambda: (compute(), (x, *parameters))

        if kernels is not None:
            return [Probe(f"{op}:{kernels}", count, partial(make, count)) for count in rows]
        name = _name(section, op, len(info.parts), tasks)
        return [
            Probe(name, count, partial(make, count), base=partial(self.alone, op, count)) for count in rows
        ]

    def alone(self, op: BaseOpName, rows: int) -> Run:
        """A pass of a BaseOp without adapters."""
        stage, module = self.stage, self.stage.ops[op].module
        if op not in EXPERT_OPS:
            return stage.of_module(module, rows, stage.width(op))
        assert self._experts is not None
        pairs = self._experts.pairs(self._experts.given(stage.batch(rows)))
        self._experts.layer.select(pairs)
        x = stage.input(len(pairs.rows), stage.width(op))
        return lambda: (module(x, pairs), (x,))

    def _pass(self, attached: AttachedBaseOp, rows: int, tasks: int) -> tuple[Callable[[], Tensor], Tensor]:
        """A forward pass, and its input."""
        stage, info = self.stage, attached.info
        batch = stage.batch(rows, tasks)
        if isinstance(attached, AttachedExperts):
            assert self._experts is not None
            experts = attached
            pairs = self._experts.pairs(self._experts.given(batch))
            of_pairs = stage.input(len(pairs.rows), stage.width(info.name))
            return lambda: experts.compute(of_pairs, pairs), of_pairs
        x = stage.input(rows, 1, stage.width(info.name))
        rows_of_rank = stage.own(rows)
        first = stage.parallel.tp_rank * rows_of_rank if stage.divided > 1 else 0

        def compute() -> Tensor:
            with activate(batch):
                y, _ = attached.forward(x)
                if not info.column_parallel:
                    y, _ = attached.finish(y[first : first + rows_of_rank])
                return y

        return compute, x


def _name(section: AdapterSpec, op: BaseOpName, modules: int, tasks: int) -> str:
    curve = section.curve(modules)
    if curve is None:
        raise ValueError(f"{section.peft_type}: a sample takes no seconds")
    return f"{curve.name}:{op}:{curve.size}" + (f":{tasks}-tasks" if tasks > 1 else "")


def _spec(name: str, section: AdapterSpec) -> TaskSpec:
    """A task with this adapter."""
    task: dict[str, Any] = {"name": name, "adapter": section.model_dump(), "data": {"path": "probe"}}
    return TaskSpec.model_validate({**task, "training": {"max_steps": 10}})
