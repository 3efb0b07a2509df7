"""Follows the engine through a step and tells the recorder the phase, layer and purpose of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from megatron_mux.adapters.adapter import AdapterParameter
from megatron_mux.adapters.attach import Host, Site
from megatron_mux.backbone.model import Backbone
from megatron_mux.backbone.residence import Layers, Residence
from megatron_mux.backbone.weights import Reading
from megatron_mux.dry_run.run_spec import Mark
from megatron_mux.engine import Engine
from megatron_mux.liveness import Heartbeat
from megatron_mux.memory.fake_gpu.place import BACKWARD, FORWARD, LOAD, OPTIMIZER, Place
from megatron_mux.memory.fake_gpu.recorder import Recorder
from megatron_mux.memory.stream.events import Category
from megatron_mux.pipeline.action import Action
from megatron_mux.shape import Module

_PHASES = {"F": FORWARD, "B": BACKWARD, "N": OPTIMIZER, "U": OPTIMIZER}


class StepTracker(Heartbeat):
    """Hooks into the engine's progress reports and a stage's layers.

    Args:
        place: Updated with the current phase and layer.
        recorder: Records events.

    Attributes:
        marks: See `Recording`.
        within: Prefix for the names of actions that are not part of a step.
    """

    def __init__(self, place: Place, recorder: Recorder) -> None:
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
            residence, first = stage.residence, stage.layers.start

            def layers(
                hidden: Tensor, trained_from: int, residence: Residence = residence, first: int = first
            ) -> Layers:
                return _Followed(self._place, first, residence, hidden, trained_from)

            setattr(residence, "layers", layers)  # noqa: B010 (on the instance)

    def follow_adapters(self, host: Host) -> None:
        """Track the layer on which each adapter is created."""
        find = host.sites

        def sites(modules: Sequence[Module]) -> Iterator[tuple[int, list[Site]]]:
            for op, found in find(modules):
                self._place.layer = host.base_ops[op].layer
                yield op, found
            self._place.layer = None

        setattr(host, "sites", sites)  # noqa: B010 (on the instance)

    def label(self, engine: Engine) -> None:
        """Label the tasks' tensors by purpose, now and at the end of each bucket's step."""
        prefixes = {f".{info.hf_prefix}.": info.layer for info in engine.adapters.host.base_ops}
        trained = [
            (parameter, engine.optimizer(name), _layer_of(parameter, prefixes))
            for name, adapter in engine.adapters.tasks.items()
            for parameter in adapter.parameters
        ]

        fixed = [record.value for adapter in engine.adapters.tasks.values() for record in adapter.fixed]

        def label() -> None:
            for value in fixed:
                self._recorder.label(value, Category.ADAPTERS)
            for parameter, optimizer, layer in trained:
                own = [(parameter.value, Category.ADAPTERS), (parameter.value.grad, Category.GRADIENTS)]
                own += [(kept, Category.OPTIMIZER) for kept in optimizer.kept_of(parameter)]
                for tensor, category in own:
                    if tensor is not None:
                        self._recorder.label(tensor, category)
                        self._recorder.label_layer(tensor, layer)

        self._label = label
        label()


class _Followed(Layers):
    """A pass through layers that reports the current layer."""

    def __init__(
        self, place: Place, first: int, residence: Residence, hidden: Tensor, trained_from: int
    ) -> None:
        super().__init__(residence, hidden, trained_from)
        self._place = place
        self._first = first

    def through(self, key: int, compute: Callable[[Tensor], Tensor]) -> None:
        """See `Layers.through`."""
        self._place.arrive(self._first + key, self.hidden, lowest=key == 0)
        super().through(key, compute)
        self._place.leave(self._first + key, self.hidden)


def _layer_of(parameter: AdapterParameter, prefixes: Mapping[str, int]) -> int | None:
    """Layer of an adapter's parameter, from its name; None if layers share it."""
    return next((layer for prefix, layer in prefixes.items() if prefix in parameter.key), None)
