"""The interface of a PEFT method: what it adds at a BaseOp, which parameters it has, how it is saved.

MuxTune section 3.2 divides the PEFT workflow into BaseOp, Adapter, Dispatch and Aggregate. Here an `Adapter` is one
task's method at one BaseOp and says at which *stages* of that BaseOp it acts; `base_op.AttachedBaseOp` dispatches
the task's rows to it and aggregates what it returns. A `TaskAdapter` is the whole of one task's method on this rank.

Shapes: n rows of the task, K and N the BaseOp's input and output width on this rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from megatron_mux.adapters.targets import Sizes, targets_of
from megatron_mux.layout import MicroBatch

if TYPE_CHECKING:
    from megatron_mux.adapters.host import Host


@dataclass(eq=False)
class AdapterParameter:
    """A trainable tensor of a task, or the part of it that this rank holds.

    Attributes:
        key: Its exact name in `adapter_model.safetensors`.
        value: The local part.
        full_shape: Shape of the whole tensor, independent of ranks.
        dim: The dimension that is divided over ranks, None if this rank holds everything.
        index: `[local size of dim]` int64 global positions along `dim` of what is held here; None without `dim`.
        partial: Whether the local gradient must be summed over tensor ranks to be the gradient.
        owner: Whether this rank counts the part in norms and saves it: each element of the full tensor has exactly
            one owner over tensor and pipeline ranks.
        decay: Whether weight decay applies (not to biases and masks).
    """

    key: str
    value: nn.Parameter
    full_shape: tuple[int, ...]
    dim: int | None = None
    index: Tensor | None = None
    partial: bool = False
    owner: bool = True
    decay: bool = True

    def slice_of(self, full: Tensor) -> Tensor:
        """The part of `full` that this rank holds, a copy.

        Args:
            full: A tensor of `full_shape`: the value itself, an optimizer moment, a mask.
        """
        if tuple(full.shape) != self.full_shape:
            raise ValueError(f"{self.key}: expected shape {self.full_shape}, got {tuple(full.shape)}")
        if self.dim is None or self.index is None:
            return full.clone()
        return full.index_select(self.dim, self.index.to(full.device))

    def assemble(self, full: Tensor, local: Tensor) -> None:
        """Write this rank's part into `full`, in place: the inverse of `slice_of`.

        Args:
            full: A tensor of `full_shape`.
            local: A tensor of the local shape.
        """
        if self.dim is None or self.index is None:
            full.copy_(local)
        else:
            full.index_copy_(self.dim, self.index.to(full.device), local.to(full))


@dataclass(frozen=True)
class LowRankTerm:
    """A product `scale * x A^T B^T` on some columns of the BaseOp's output, computed with all others at once.

    Attributes:
        down: `[R, K]` A on this rank.
        up: `[n columns, R]` B on this rank.
        columns: `[n columns]` int64 output columns, or None for all of them in order.
        scale: The factor.
        keep: `[n, K]` bool of the input entries that dropout keeps, or None without dropout.
        keep_scale: Factor on the kept entries, `1 / (1 - p)`.
    """

    down: Tensor
    up: Tensor
    columns: Tensor | None
    scale: float
    keep: Tensor | None = None
    keep_scale: float = 1.0


class Adapter:
    """One task's method at one BaseOp. The stages it names in `stages` are called, in this order:

    1. `extend(batch)`: leave something for core attention (prefix tuning);
    2. `before(x)`: replace the BaseOp's input, row-parallel BaseOps only;
    3. `low_rank(batch, rows)`: terms fused into the product itself;
    4. `product(x, y, batch)`: change the product before it is summed over tensor ranks;
    5. `after(y)`: change the BaseOp's finished output, bias included.

    All tensors are the task's own rows.
    """

    stages: frozenset[str] = frozenset()

    def extend(self, batch: MicroBatch) -> None:
        """Side effect on the micro-batch."""
        raise NotImplementedError

    def before(self, x: Tensor) -> Tensor:
        """`[n, K]` input of the BaseOp to `[n, K]`."""
        raise NotImplementedError

    def low_rank(self, batch: MicroBatch, rows: tuple[int, int]) -> Sequence[LowRankTerm]:
        """Low-rank terms for the task's rows."""
        raise NotImplementedError

    def product(self, x: Tensor, y: Tensor, batch: MicroBatch) -> Tensor:
        """`[n, K]` input and `[n, N]` product, bias of column-parallel BaseOps included unless skipped, to `[n, N]`."""
        raise NotImplementedError

    def after(self, y: Tensor) -> Tensor:
        """`[n, N]` output to `[n, N]`."""
        raise NotImplementedError


class TaskAdapter(ABC):
    """One task's PEFT method on this rank: its parameters and what it does at each BaseOp.

    Args:
        host: The backbone's stage that it attaches to.
        spec: The task's `adapter` fields (spellings of peft), and its name and seed.
        total_steps: Optimizer steps that the task will run.
        initial: Full tensors to start from, by key, already checked to be `tensor_shapes`; None makes a fresh adapter
            from the task's seed.

    Attributes:
        parameters: Local parameters, in the order of layers.
        at: Index of a BaseOp in `host.base_ops` to the method there.
        acts_after_steps: Whether `after_step` does anything; the device is waited for before it.
    """

    peft_type: ClassVar[str]
    acts_after_steps: ClassVar[bool] = False

    def __init__(self, host: Host, spec: Any, total_steps: int, initial: Mapping[str, Tensor] | None) -> None:
        self.host = host
        self.name: str = spec.name
        self.spec = spec.adapter
        self.targets = targets_of(spec.adapter, host.shape)
        self.seed: int = spec.training.seed
        self.total_steps = total_steps
        self.initial = initial
        self.parameters: list[AdapterParameter] = []
        self.at: dict[int, Adapter] = {}
        self.build()
        self.initial = None

    @abstractmethod
    def build(self) -> None:
        """Make `parameters` and `at`."""

    @staticmethod
    @abstractmethod
    def tensor_shapes(spec: Any, paths: Sequence[str], sizes: Sizes) -> dict[str, tuple[int, ...]]:
        """Every tensor of the whole adapter with its full shape: what a file must hold to start from it.

        Args:
            spec: The `adapter` section.
            paths: The modules it targets, of all layers.
            sizes: Of the backbone.
        """

    @abstractmethod
    def config_dict(self) -> dict[str, Any]:
        """The content of `adapter_config.json`; the same on every rank."""

    def penalty(self, step: int) -> Tensor | float:
        """Add the gradients of a regulariser, once per optimizer step, after gradients were summed over ranks.

        Args:
            step: Optimizer steps done so far.

        Returns:
            The regulariser over the elements that this rank owns.
        """
        return 0.0

    def after_step(self, step: int) -> None:
        """Called after each optimizer step, on every rank, where `acts_after_steps`.

        Args:
            step: Optimizer steps done, this one included.
        """

    def state(self) -> dict[str, Tensor]:
        """What must be saved besides parameters, by the key of the parameter whose layout it shares; local parts."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore `state()` from full tensors (parts of other ranks are ignored)."""

    def parameter(
        self,
        key: str,
        shape: tuple[int, ...],
        init: Callable[[Tensor, torch.Generator], Any],
        *,
        dim: int | None = None,
        index: Tensor | None = None,
        partial: bool = False,
        owner: bool = True,
        decay: bool = True,
    ) -> nn.Parameter:
        """Make a parameter and note it in `parameters`.

        Args:
            key: Name in `adapter_model.safetensors`.
            shape: Of the full tensor.
            init: Fills the full fp32 tensor in place; used without initial tensors. Its generator depends on the
                task's seed and the key alone.
            dim, index, partial, owner, decay: See `AdapterParameter`.
        """
        record = AdapterParameter(key, nn.Parameter(torch.empty(0)), shape, dim, index, partial, owner, decay)
        if self.initial is None:
            full = torch.empty(shape, dtype=torch.float32)
            init(full, self.host.generator(self.seed, key))
        else:
            full = self.initial[key]
        local = record.slice_of(full).to(device=self.host.device, dtype=self.host.parameter_dtype)
        record.value = nn.Parameter(local.contiguous())
        self.parameters.append(record)
        return record.value


def tensor_key(path: str, suffix: str) -> str:
    """Name of a tensor of the adapter at the module `path`, as peft spells it."""
    return f"base_model.model.{path}.{suffix}"


KINDS: dict[str, type[TaskAdapter]] = {}


def register(kind: type[TaskAdapter]) -> type[TaskAdapter]:
    """Class decorator: make a method known under its `peft_type`.

    Raises:
        ValueError: The name is taken.
    """
    if kind.peft_type in KINDS:
        raise ValueError(f"two adapter kinds are called {kind.peft_type}: {KINDS[kind.peft_type]} and {kind}")
    KINDS[kind.peft_type] = kind
    return kind
