"""The operators of a backbone that adapters attach to, and the Hugging Face modules inside them.

Shared by `backbone` and `adapters`, which do not import each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # memory is estimated without torch, which takes seconds to import
    from torch import Tensor, nn

BaseOpName = Literal["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]

BASE_OPS: tuple[BaseOpName, ...] = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")

COLUMN_PARALLEL: tuple[BaseOpName, ...] = ("linear_qkv", "linear_fc1")
"""BaseOps whose output is divided over tensor ranks; the input of the others is."""


@dataclass(frozen=True)
class ModuleColumns:
    """The columns of a BaseOp's output on this rank that hold one Hugging Face module.

    Attributes:
        columns: `[n]` int64, positions in this rank's output of the BaseOp (may be empty).
        features: `[n]` int64, which output features of the Hugging Face module those columns hold.
        out_features: Output width of the whole Hugging Face module.
    """

    columns: Tensor
    features: Tensor
    out_features: int


@dataclass(frozen=True)
class BaseOpInfo:
    """A backbone operator that an adapter may attach to (MuxTune section 3.2), as found on this rank.

    Attributes:
        layer: Global index of the transformer layer, from 0.
        name: Which of the four BaseOps.
        module: Megatron's `ColumnParallelLinear` or `RowParallelLinear`.
        inputs: The input features that this rank holds (all of them when column-parallel).
        parts: Hugging Face path within the layer (`self_attn.q_proj`) to its columns of the output.
        hf_prefix: Path of the layer in the Hugging Face model (`model.layers.3`).
    """

    layer: int
    name: BaseOpName
    module: nn.Module
    inputs: range
    parts: Mapping[str, ModuleColumns]
    hf_prefix: str

    @property
    def column_parallel(self) -> bool:
        """Whether tensor ranks divide its output; else they divide its input."""
        return self.name in COLUMN_PARALLEL
