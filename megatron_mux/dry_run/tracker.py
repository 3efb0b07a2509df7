"""Follows the engine through a step and tells the recorder the phase, layer and purpose of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megatron_mux.adapters.attach import AdapterSet
from megatron_mux.adapters.host import Site
from megatron_mux.backbone.layer import LayersPass
from megatron_mux.backbone.model import Backbone
from megatron_mux.backbone.weights import Reading
from megatron_mux.dry_run.run_spec import Mark
from megatron_mux.engine import Engine
from megatron_mux.liveness import Heartbeat
from megatron_mux.memory.fake_gpu.recorder import Recorder
from megatron_mux.memory.fake_gpu.step_position import BACKWARD, FORWARD, LOAD, OPTIMIZER, StepPosition
from megatron_mux.memory.stream.events import Category
from megatron_mux.pipeline.action import Action
from megatron_mux.pipeline.communicate import Communicator, PendingReceive
from megatron_mux.shape import Module

_PHASES = {"F": FORWARD, "B": BACKWARD, "N": OPTIMIZER, "U": OPTIMIZER}


class StepTracker(Heartbeat):
    """Hooks into the engine's progress reports and a stage's layers.

    Attributes:
        marks: See `Recording`.
        within: Prefix for the names of actions that are not part of a step.
    """

    def __init__(self, place: StepPosition, recorder: Recorder) -> None:
        self.marks: list[Mark] = []
        self.within = ""
        self._place = place
        self._recorder = recorder
        self._label: Callable[[], None] = lambda: None

    def at(self, what: object, long: bool = False) -> None:
        """See `Heartbeat.at`."""
        if isinstance(what, Reading):
            self._place.enter(LOAD)
            self._place.layer = what.layer
        if isinstance(what, Action):
            self.mark(", ".join(filter(None, (self.within, str(what)))))
            if not what.is_pass:
                self._label()
            self._place.enter(_PHASES[what.kind])

    def mark(self, what: str) -> None:
        """Mark the start of something."""
        self.marks.append((self._recorder.events, what))

    def follow(self, stages: Sequence[Backbone]) -> None:
        """Track the layers of loaded stages."""
        for stage in stages:
            setattr(stage, "begin_layers", self._followed(stage))  # noqa: B010 (on the instance)

    def _followed(self, stage: Backbone) -> Callable[[Tensor, int], LayersPass]:
        begin = stage.begin_layers
        return lambda hidden, trained_from: _Followed(
            self._place, stage.layers.start, begin(hidden, trained_from)
        )

    def follow_adapters(self, adapters: AdapterSet) -> None:
        """Track the layer on which each adapter is created, and tables of adapters are made."""
        host = adapters.host
        find = host.sites

        def sites(modules: Sequence[Module]) -> Iterator[tuple[int, list[Site]]]:
            for op, found in find(modules):
                self._place.layer = host.base_ops[op].layer
                yield op, found
            self._place.layer = None

        setattr(host, "sites", sites)  # noqa: B010 (on the instance)
        for op in adapters.ops:
            setattr(op, "prepare", self._on_layer(op.info.layer, op.prepare))  # noqa: B010 (likewise)

    def follow_sums(self, engine: Engine) -> None:
        """Label the buffer in which gradients are summed over ranks."""
        reserve = engine.reserve_gradient_buffer

        def reserving() -> Tensor:
            buffer = reserve()
            self._recorder.label(buffer, Category.COMMUNICATION)
            return buffer

        setattr(engine, "reserve_gradient_buffer", reserving)  # noqa: B010 (on the instance)

    def follow_transfers(self, communicator: Communicator) -> None:
        """Label what is sent to other stages and received from them."""
        receive, send = communicator.receive, communicator.send

        def receiving(shape: tuple[int, ...], dtype: torch.dtype, backward: bool) -> PendingReceive:
            pending_receives = receive(shape, dtype, backward)
            self._recorder.label(pending_receives.tensor, Category.COMMUNICATION)
            return pending_receives

        def sending(tensor: Tensor, backward: bool) -> None:
            self._recorder.label(tensor, Category.COMMUNICATION)
            send(tensor, backward)

        setattr(communicator, "receive", receiving)  # noqa: B010 (on the instance)
        setattr(communicator, "send", sending)  # noqa: B010 (likewise)

    def _on_layer(self, layer: int, function: Callable[[], None]) -> Callable[[], None]:
        def tracked() -> None:
            self._place.layer = layer
            function()
            self._place.layer = None

        return tracked

    def label(self, engine: Engine) -> None:
        """Label the tasks' tensors by purpose, now and at the end of each bucket's step."""
        # The frozen copy of an adapter that is a reference has no optimizer.
        own = [
            (adapter, engine.optimizer(name) if name in engine.tasks else None)
            for name, adapter in engine.adapters.tasks.items()
        ]

        def label() -> None:
            for adapter, optimizer in own:
                flat_params = adapter.flat_params
                values = [flat_params.values, flat_params.copies, *(record.value for record in adapter.fixed)]
                for category, tensors in (
                    (Category.ADAPTERS, values),
                    (Category.GRADIENTS, [flat_params.gradients]),
                    (Category.OPTIMIZER, optimizer.tensors if optimizer else []),
                ):
                    for tensor in tensors:
                        self._recorder.label(tensor, category)

        self._label = label
        label()


class _Followed(LayersPass):
    """A pass through layers that reports the current layer."""

    def __init__(self, place: StepPosition, first: int, layers: LayersPass) -> None:
        super().__init__(layers.hidden)
        self._place, self._first, self._layers = place, first, layers

    def through(self, key: int, compute: Callable[[Tensor], Tensor]) -> None:
        """See `LayersPass.through`."""
        self._place.arrive(self._first + key, self.hidden, lowest=key == 0)
        self._layers.through(key, compute)
        self.hidden = self._layers.hidden
        self._place.leave(self._first + key, self.hidden)
