"""The memory of a session before it joins: its passes are counted on tensors without values, in a process beside."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import torch

from megatron_mux.attributes import replaced
from megatron_mux.backbone.checkpoint import NoWeights
from megatron_mux.backbone.model import Backbone
from megatron_mux.backbone.registry import BackboneInfo
from megatron_mux.backbone.split import even_split, stage_layers
from megatron_mux.dry_run.process import kept_worker
from megatron_mux.errors import UserError
from megatron_mux.gpus import Gpu, assumed
from megatron_mux.memory.fake_gpu.recorder import Recorder
from megatron_mux.memory.worker import LostProcess, Worker, WorkerError
from megatron_mux.optimizers.registry import OPTIMIZERS
from megatron_mux.split.protocol.agreement import Proposal
from megatron_mux.split.server.body import Body
from megatron_mux.split.server.session_memory import Memory, Peak, profile

_KEPT = 256
"""Answers that are remembered: sessions come again."""
_SECONDS = 120.0
"""Time limit of a prediction: other clients wait for it."""
_BLOCK = 512
"""Bytes that a GPU's allocator rounds up to."""


@dataclass(frozen=True)
class BodyPlace:
    """A server's body without its weights: what the memory of sessions depends on.

    Attributes:
        info: Of the whole backbone.
        dtype: It computes in.
        device: Type of the device.
        gpu: Its kernels, on a GPU.
        tensor: Ranks that share each layer.
        stages: Layers of each pipeline rank.
    """

    info: BackboneInfo
    dtype: torch.dtype
    device: Literal["cuda", "cpu"]
    gpu: Gpu
    tensor: int
    stages: tuple[range, ...]

    @classmethod
    def of(cls, body: Body, layers: range) -> BodyPlace:
        """Of a server.

        Args:
            body: Its body, or a rank's part of it.
        """
        backbone, parallel = body.backbone, body.parallel
        on_gpu = backbone.device.type == "cuda"
        gpu = assumed(torch.cuda.get_device_name(backbone.device))[0].gpu if on_gpu else Gpu()
        split = (layers.start, *even_split(len(layers), parallel.pp_size))
        stages = tuple(stage_layers(split)[1:])
        return cls(backbone.info, backbone.dtype, "cuda" if on_gpu else "cpu", gpu, parallel.tp_size, stages)


class SessionPredictor:
    """Predicts the memory of sessions that want to join a server. One process does so for all of them, in turn."""

    def __init__(self, place: BodyPlace) -> None:
        self._place = place
        self._known: OrderedDict[str, Memory] = OrderedDict()

    async def __call__(self, proposal: Proposal) -> Memory:
        """A session's memory before anything is allocated, of the rank that needs most: in seconds, or not at all
        after a minute.

        Raises:
            UserError: The adapter does not fit the backbone, the cut leaves no layer, or it cannot be computed.
            LostProcess: The process was ended.
        """
        proposal.body(self._place.info.shape)
        nobody = {"task": "task", "run": "0" * 16, "incarnation": "0" * 16, "fingerprint": "", "step": 0}
        anonymous = proposal.model_copy(update=nobody)
        asked = anonymous.model_dump_json()
        if asked not in self._known:
            # Without a thread that waits: a client that goes takes its call back, unless that has begun.
            future = prediction_worker().submit(predict, self._place, anonymous)
            try:
                self._known[asked] = await asyncio.wrap_future(future)
            except LostProcess:
                raise
            except WorkerError as error:
                raise UserError(f"the task cannot be computed: {error}") from error
        self._known.move_to_end(asked)
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return self._known[asked]


def prediction_worker() -> Worker:
    """The process that predicts."""
    return kept_worker(seconds=_SECONDS)


def predict(place: BodyPlace, proposal: Proposal) -> Memory:
    """In the process for dry runs: a session's memory, of the rank that needs most.

    Raises:
        UserError: The adapter does not fit the backbone.
    """
    from megatron_mux.dry_run.stand_ins import fewer_bits_
    from megatron_mux.kernels import dropout

    whole = proposal.body(place.info.shape)
    with replaced(dropout, "_mix_", fewer_bits_):
        each = [
            _of_stage(place, proposal, stage, part)
            for stage, layers in enumerate(place.stages)
            if (part := range(max(layers.start, whole.start), min(layers.stop, whole.stop)))
        ]
    return _combined(each, max)


def _of_stage(place: BodyPlace, proposal: Proposal, stage: int, layers: range) -> Memory:
    """Memory on a rank of a stage that has some of the body's layers.

    Where layers are alike, two of them are run: what they take more than one is what a further one takes.
    """
    shape, counted = place.info.shape, partial(_counted, place, proposal, stage)
    alike = shape.layers_are_alike and proposal.adapter_spec().is_alike(shape, layers)
    if not alike or len(layers) <= 2:
        return counted(layers)
    one, two = counted(layers[:1]), counted(layers[:2])
    deep = _combined([one, two], lambda figures: figures[1] + (figures[1] - figures[0]) * (len(layers) - 2))
    # Without a graph, nothing of a layer stays.
    deep = replace(deep, forward=two.forward, few_forward=two.few_forward)
    if OPTIMIZERS[proposal.training.optim].at_once:  # it has buffers of a size that layers do not add to
        deep = replace(deep, lasting=counted(layers, passes=False).lasting)
    return deep


def _counted(place: BodyPlace, proposal: Proposal, stage: int, layers: range, passes: bool = True) -> Memory:
    """Memory of a rank that has these layers of the body and no others; without passes, only what lasts."""
    from megatron_mux.dry_run.fake_world import fake_rank
    from megatron_mux.dry_run.real_host import read_fake_value
    from megatron_mux.memory.fake_gpu.step_position import StepPosition
    from megatron_mux.memory.kernel_scratch import scratch_of
    from megatron_mux.split.server.ranks import StagedBody

    pipeline = len(place.stages)
    world, rank = place.tensor * pipeline, stage * place.tensor
    on_gpu = place.device == "cuda"
    with fake_rank(rank, world, place.device, place.gpu, place.tensor, pipeline) as (parallel, _):
        recorder = Recorder(StepPosition(), place.device, 0, read_fake_value, scratch_of if on_gpu else None)
        with recorder:
            backbone = Backbone(
                place.info, parallel, layers, place.dtype, "none", "resident", NoWeights(), ends=False
            )
            body = (StagedBody if world > 1 else Body)(backbone, parallel)
            whole = proposal.body(place.info.shape)
            body.add("session", proposal.adapter_spec(), proposal.training, whole, proposal.total_steps)
            if not passes:
                return Memory(proposal.train_rows, 0, 0, 0, 0, body.bytes_of("session"))
            meter = partial(count, recorder, _BLOCK if on_gpu else 1)
            return profile(body, "session", proposal, whole, meter)


def count(recorder: Recorder, block: int, compute: Callable[[], object]) -> Peak:
    """Run a computation while a recorder is entered, and count its memory. Scratch memory of a CPU is left out.

    Args:
        recorder: Sees the tensors that are made; it may have seen others before.
        block: Bytes that the allocator rounds up to.
    """
    before = recorder.events
    result = compute()
    stream = recorder.done()
    del result  # until here: what it holds counts
    codes, sizes = np.array(stream.codes, np.int64), np.array(stream.sizes, np.int64)
    rounded = -(-sizes // block) * block
    changes = np.where(codes >= 0, rounded[codes], -rounded[~codes])[before:] if len(codes) else codes
    taken = np.append(0, np.cumsum(changes))
    return Peak(int(taken.max()), int(taken[-1]))


def _combined(each: Sequence[Memory], how: Callable[[Sequence[int]], int]) -> Memory:
    """One figure of each kind from those of several."""
    figures = [asdict(memory) for memory in each]
    return Memory(**{name: how([f[name] for f in figures]) for name in figures[0]})
