"""Subgraphs of a backbone's layers from its config.json: traced with fake tensors, as one rank of a fake world."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_mux import runtime
from megatron_mux.adapters.attach import AdapterSet
from megatron_mux.adapters.host import Host
from megatron_mux.backbone.checkpoint import NoWeights
from megatron_mux.backbone.model import Backbone
from megatron_mux.backbone.registry import BackboneInfo
from megatron_mux.batch.pack import PackedSequence, pack
from megatron_mux.dry_run.real_host import RealHostMode
from megatron_mux.errors import UserError
from megatron_mux.fusion.graphs.layer_graph import trace_layer
from megatron_mux.fusion.graphs.operators import layer_subgraphs
from megatron_mux.fusion.graphs.subgraphs import LayerSubgraphs
from megatron_mux.fusion.plan import Plan
from megatron_mux.fusion.planner.planning_context import PlanningContext
from megatron_mux.fusion.profiler.profile import Profile
from megatron_mux.memory.fake_gpu.fake_tensors import FakeTensors
from megatron_mux.memory.worker import Worker
from megatron_mux.tasks import TaskSpec

_SECONDS = 600.0
_LORA_RANK = 16


@dataclass(frozen=True)
class SubgraphQuestion:
    """What to trace.

    Attributes:
        info: The backbone; weights are not read.
        profile: Predicts seconds, at the tensor-parallel degree that is traced.
        rows: Of the micro-batch: one sequence.
        rank: Of a LoRA adapter on every linear module.
    """

    info: BackboneInfo
    profile: Profile
    dtype: torch.dtype
    sequence_parallel: bool
    rows: int
    rank: int

    @property
    def tensor(self) -> int:
        """Ranks that share each layer."""
        return int(self.profile.about["tensor_parallel"])


def subgraphs_of(question: SubgraphQuestion) -> list[LayerSubgraphs]:
    """Trace one layer of each kind, in a process of its own. Layers of a kind have the same rotary angles and windows.

    Raises:
        UserError: The backbone or the rows cannot be divided so.
        WorkerError: Tracing failed.
    """
    question.info.shape.refuse("The tracing of subgraphs", "latent", "experts")
    question.info.check_parallel(question.tensor, 1)
    if question.sequence_parallel and question.rows % question.tensor:
        raise UserError(f"{question.rows} rows cannot be divided among {question.tensor} tensor ranks")
    with Worker(_SECONDS) as worker:
        return worker.submit(_traced, question).result()


def with_subgraphs(plan: Plan, context: PlanningContext, tokens: float) -> Plan:
    """The plan with the subgraphs of its layers, with LoRA of rank 16 on every linear module.

    Args:
        plan: Of at least two tensor ranks.
        context: What it was made from.
        tokens: Of a step of all its tasks: the subgraphs are those of an average batch.

    Raises:
        UserError: The plan has one tensor rank, or its layers cannot be divided.
    """
    if plan.tensor == 1:
        raise UserError("--subgraphs: this plan has one tensor rank, so its layers send no messages")
    batches = plan.data * sum(bucket.micro_batches * bucket.batches for bucket in plan.buckets)
    rows = plan.tensor * max(1, round(tokens / batches / plan.tensor))
    dtype = {4: torch.float32, 2: torch.bfloat16}[context.itemsize]
    question = SubgraphQuestion(
        context.info, context.profile, dtype, context.sequence_parallel, rows, _LORA_RANK
    )
    return replace(plan, layers=tuple(subgraphs_of(question)))


def _traced(question: SubgraphQuestion) -> list[LayerSubgraphs]:
    shape = question.info.shape
    kinds: dict[object, list[int]] = {}
    for layer in range(shape.layers):
        kinds.setdefault((shape.ropes[layer], shape.windows[layer], shape.scales[layer]), []).append(layer)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=question.tensor)
    try:
        return [_of_kind(question, layers) for layers in kinds.values()]
    finally:
        runtime.shutdown()


def _of_kind(question: SubgraphQuestion, layers: list[int]) -> LayerSubgraphs:
    rows, divided = question.rows, question.sequence_parallel
    parallel = runtime.initialize(question.tensor, 1, divided, device="cpu")
    sequence = PackedSequence("lora", 0, np.zeros(rows, np.int64), np.ones(rows, np.bool_), 1.0)
    batch = pack([sequence], ("lora",), {"lora": 0}).to()
    with ExitStack() as stack:
        stack.enter_context(FakeTensors())
        with RealHostMode():
            one = range(layers[0], layers[0] + 1)
            backbone = Backbone(question.info, parallel, one, question.dtype, "none", "resident", NoWeights())
            adapters = AdapterSet(Host(backbone.base_ops(), parallel, question.dtype, backbone.shape))
            adapters.add(_task(question.rank), 1)
            hidden = torch.empty(backbone.hidden_shape(batch), dtype=question.dtype, requires_grad=True)
        traced = trace_layer(backbone, 0, adapters, batch, hidden)
    return layer_subgraphs(traced, question.profile, backbone.shape.hidden, layers, rows, divided)


def _task(rank: int) -> TaskSpec:
    adapter = {"peft_type": "LORA", "r": rank, "target_modules": "all-linear"}
    return TaskSpec.model_validate(
        {
            "name": "lora",
            "adapter": adapter,
            "data": {"path": "none", "max_length": 2},
            "training": {"max_steps": 1},
        }
    )
