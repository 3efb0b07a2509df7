"""Split fine-tuning (Menos): private data and the model's ends on clients, its body on a server that they share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_mux.split.client.trainer import SplitTrainer as SplitTrainer


def __getattr__(name: str) -> Any:
    """Import `SplitTrainer` when it is first asked for: certificates are made without torch."""
    if name != "SplitTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megatron_mux.split.client.trainer import SplitTrainer

    return SplitTrainer
