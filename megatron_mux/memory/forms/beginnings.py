"""Where gradients begin in a layer: at its first part with an adapter. Parts below it keep nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from megatron_mux.base_ops import BaseOpName

First = BaseOpName | Literal["core_attention"]
"""The first part of a layer that has an adapter."""
FIRSTS: tuple[First, ...] = (
    "linear_qkv",
    "linear_kv_up",
    "core_attention",
    "linear_proj",
    "linear_fc1",
    "linear_fc2",
)
"""Parts in the order of the forward pass. In latent attention `linear_qkv` stands for what makes latents,
`linear_kv_up` for what is made of them; experts are where other layers have their MLP."""
BEGINS: Mapping[First, int] = {part: place for place, part in enumerate(FIRSTS, start=1)}
"""The number of each part; 0 is below the layer."""
