"""The backbone: a frozen Megatron-Core model built and filled from a Hugging Face directory.

`read_shape` and `read_backbone_info` need no weights and no Megatron-Core; `Backbone` imports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_mux.backbone.registry import BackboneInfo, read_backbone_info, read_shape
from megatron_mux.backbone.shape import BackboneShape

if TYPE_CHECKING:
    from megatron_mux.backbone.model import Backbone

__all__ = ["Backbone", "BackboneInfo", "BackboneShape", "read_backbone_info", "read_shape"]


def __getattr__(name: str) -> Any:
    # Importing Megatron-Core takes seconds: only when the model itself is asked for.
    if name == "Backbone":
        from megatron_mux.backbone.model import Backbone

        return Backbone
    raise AttributeError(name)
