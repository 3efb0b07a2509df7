"""The backbone: a frozen Megatron-Core model built and filled from a Hugging Face directory.

Its names are imported on first use: `Backbone` imports Megatron-Core and the others torch, which takes seconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_mux.backbone.model import Backbone
    from megatron_mux.backbone.registry import BackboneInfo, read_backbone_info, read_shape
    from megatron_mux.backbone.shape import BackboneShape

__all__ = ["Backbone", "BackboneInfo", "BackboneShape", "read_backbone_info", "read_shape"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(name)
    module = {"Backbone": "model", "BackboneShape": "shape"}.get(name, "registry")
    return getattr(import_module(f"{__name__}.{module}"), name)
