"""The operators of a backbone that adapters attach to, and the Hugging Face modules inside them.

Shared by `backbone` and `adapters`, which do not import each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # memory is estimated without torch, which takes seconds to import
    from torch import Tensor, nn

BaseOpName = Literal[
    "linear_qkv",
    "linear_q",
    "linear_q_down",
    "linear_q_up",
    "linear_kv_down",
    "linear_kv_up",
    "linear_proj",
    "linear_fc1",
    "linear_fc2",
    "shared_fc1",
    "shared_fc2",
    "experts_fc1",
    "experts_fc2",
]

ATTENTION_OPS: tuple[BaseOpName, ...] = ("linear_qkv", "linear_proj")
LATENT_OPS: tuple[BaseOpName, ...] = (
    "linear_q",
    "linear_q_down",
    "linear_q_up",
    "linear_kv_down",
    "linear_kv_up",
)
"""What makes queries, keys and values in multi-head latent attention, in the place of `linear_qkv`."""
REPLICATED: tuple[BaseOpName, ...] = ("linear_q_down", "linear_kv_down")
"""Column-parallel BaseOps that every tensor rank has whole: all of them make the whole latent, and each is given its
part of the gradient, which is summed where the input was spread."""
MLP_OPS: tuple[BaseOpName, ...] = ("linear_fc1", "linear_fc2")
SHARED_OPS: tuple[BaseOpName, ...] = ("shared_fc1", "shared_fc2")
"""The MLP of a layer with experts that every row passes."""
EXPERT_OPS: tuple[BaseOpName, ...] = ("experts_fc1", "experts_fc2")
"""The MLPs of which each row passes a few, as its router decides; all of a rank's experts are one BaseOp."""

BASE_OPS: tuple[BaseOpName, ...] = (*ATTENTION_OPS, *MLP_OPS)
"""Those of a layer without experts; `BackboneShape.ops` says which ones a layer has."""

COLUMN_PARALLEL: tuple[BaseOpName, ...] = (
    "linear_qkv",
    *LATENT_OPS,
    "linear_fc1",
    "shared_fc1",
    "experts_fc1",
)
"""BaseOps whose output is divided over tensor ranks (or replicated); the input of the others is divided."""


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
        name: Which of the BaseOps.
        module: Megatron's `ColumnParallelLinear` or `RowParallelLinear`; `GroupedLinear` for routed experts.
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
    def experts(self) -> tuple[int, ...]:
        """Of `EXPERT_OPS`: the experts that this rank holds by now. Widths and columns are one expert's."""
        held: tuple[int, ...] = getattr(self.module, "held", ())
        return held

    @cached_property
    def column_parallel(self) -> bool:
        """Whether tensor ranks divide its output; else they divide its input."""
        return self.name in COLUMN_PARALLEL
