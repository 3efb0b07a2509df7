"""A family of Hugging Face checkpoints: how its config.json is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_mux.backbone.shape import BackboneShape


@dataclass(frozen=True)
class Fields:
    """How a family's config fields are treated; a field named nowhere is refused unless it is empty.

    Attributes:
        used: Read by the family's `shape`.
        ignored: Without effect on what we compute (dropout of the backbone, caching, other heads).
        fixed: Fields that must have one of the values given.
    """

    used: frozenset[str]
    ignored: frozenset[str] = frozenset()
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """A family: one file in `families/` each, which says all that is particular to it.

    Attributes:
        model_type: As in config.json.
        fields: How its config fields are treated.
        shape: Reads the config (defaults filled in); raises `UserError` by `config.refuse`.
    """

    model_type: str
    fields: Fields
    shape: Callable[[Mapping[str, Any]], BackboneShape]
