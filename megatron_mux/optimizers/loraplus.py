"""LoRA+ (Hayou et al., 2024): which parameters have a learning rate of their own, grouped as `peft` groups them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Group = Literal["A", "B"]


def group_of(key: str, shape: Sequence[int]) -> Group:
    """The group of a parameter in `peft.optimizers.create_loraplus_optimizer`.

    Args:
        key: Its name in `adapter_model.safetensors`.

    Returns:
        `B` for `lora_B` and vectors, else `A`. LoRA of embeddings, peft's third group, is refused elsewhere.
    """
    return "B" if "lora_B" in key or len(shape) == 1 else "A"
