"""A way to divide a training step among GPUs: what leaves its results alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_mux.memory.optimizers import Zero

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Method:
    """A way to divide a step: what leaves results alone.

    Attributes:
        data: Data-parallel ranks.
        tensor: Ranks that share each layer.
        pipeline: Stages.
        expert: Data-parallel ranks that share a layer's experts.
        sequence_parallel: Whether tensor ranks divide the rows outside the products.
        zero: What data-parallel ranks divide: nothing, the optimizer's states (1), gradients too (2), weights too (3:
            FSDP). Of a frozen backbone there are weights alone to divide.
        recompute: What is computed again in the backward pass.
        offload: Whether host memory keeps what is not in use: a frozen backbone's weights; else the optimizer's
            states, which are stepped there.
        parts: Micro-batches of a step on each pipeline; None for the usual number.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    sequence_parallel: bool = False
    zero: Zero = 0
    recompute: Recompute = "none"
    offload: bool = False
    parts: int | None = None

    @property
    def gpus(self) -> int:
        """How many GPUs it takes."""
        return self.data * self.tensor * self.pipeline

    @property
    def micro_batches(self) -> int:
        """Of a step on each pipeline; usually one, or four for each stage, so that its bubble is below a fifth."""
        return self.parts or (4 * self.pipeline if self.pipeline > 1 else 1)

    @property
    def name(self) -> str:
        """Its degrees, such as `2DP+2TP`."""
        degrees = ((self.data, "DP"), (self.tensor, "TP"), (self.pipeline, "PP"), (self.expert, "EP"))
        return "+".join(f"{size}{kind}" for size, kind in degrees if size > 1) or "1DP"

    @property
    def details(self) -> str:
        """The rest, in words; empty for the plainest."""
        words = [
            f"ZeRO-{self.zero}" if self.zero else "",
            "sequence parallel" if self.sequence_parallel else "",
            f"{self.recompute} recomputation" if self.recompute != "none" else "",
            "offload" if self.offload else "",
        ]
        return ", ".join(filter(None, words))
