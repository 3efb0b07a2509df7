"""A backbone's layers, by what tells their memory apart: an MLP or experts, and what a rank computes of these.

Shapes: B micro-batches, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megatron_mux.memory.assumed_routes import ExpertLoad
from megatron_mux.memory.forms.engine_layer import EngineLayer
from megatron_mux.memory.forms.method import Method

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LayerKinds:
    """The layers of a backbone.

    Attributes:
        kinds: Layers that differ.
        of_layer: `[L]` which of them each layer is like.
    """

    kinds: Sequence[EngineLayer]
    of_layer: npt.NDArray[np.int64]

    @classmethod
    def of(cls, layer: EngineLayer, method: Method) -> LayerKinds:
        """The layers of a backbone, on a rank that in each of them computes as much as any.

        Args:
            layer: One of them, without experts.
            method: How ranks divide the backbone.
        """
        loads = [_load(layer, index, method) for index in range(len(layer.architecture.layers))]
        different = list(dict.fromkeys(loads))
        kinds = [replace(layer, load=load) for load in different]
        return cls(kinds, np.array([different.index(load) for load in loads], dtype=np.int64))

    def each(self, of: Callable[[EngineLayer], float], experts: bool | None = None) -> Array:
        """`[L]` a number of every layer.

        Args:
            of: The number of a layer.
            experts: Only layers with experts, or without, the others 0; None: all.
        """
        asked = [experts is None or experts == (layer.load is not None) for layer in self.kinds]
        found = [of(layer) if own else 0.0 for layer, own in zip(self.kinds, asked, strict=True)]
        return np.array(found)[self.of_layer]

    def spread(self, of_kinds: Sequence[Array]) -> Array:
        """`[B, L]` numbers of every layer, from `[B]` numbers of each kind."""
        spread: Array = np.stack(of_kinds)[self.of_layer].T
        return spread


def _load(layer: EngineLayer, index: int, method: Method) -> ExpertLoad | None:
    """What a rank does of the experts of a layer; None if that has none."""
    a = layer.architecture
    if a.moe is None or not a.has_experts(index):
        return None
    return ExpertLoad.most(ExpertLoad.of(a.moe, index, method.expert, method.tensor, a.placement, a.access))
