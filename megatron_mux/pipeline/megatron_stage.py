"""One stage of a Megatron model, computed as Megatron-Core's own schedules do: callbacks, loss scaling, timers.

It uses only what a training loop passes to a schedule and imports nothing from Megatron-Core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_mux.pipeline.action import Action, ChunkId

DataIterator = Iterator[Any] | None
"""What Megatron calls a data iterator; None on ranks that read no data."""


@dataclass(frozen=True)
class BucketInput:
    """A bucket as a stage sees it.

    Attributes:
        shape: `[rows, sequences, H]` of the tensor sent between stages for one micro-batch.
        divisor: Divisor of each micro-batch's loss.
        batches: Data iterator of its micro-batches.
    """

    name: str
    shape: tuple[int, int, int]
    divisor: int
    batches: DataIterator


@dataclass(frozen=True)
class StepFunctions:
    """How the training loop computes a micro-batch.

    Attributes:
        forward_step: Megatron's `forward_step_func`: `(batches, model)` to the stage's output and a loss function.
        collect_non_loss_data: Keep the result of the loss function called with `non_loss_data=True`.
        tell_first: Tell the model which micro-batch is the first of a step, for its weight caches.
    """

    forward_step: Callable[..., tuple[Any, Callable[..., Any] | None]]
    collect_non_loss_data: bool
    tell_first: bool


def of_wrapped(model: Any, name: str) -> Any:
    """An attribute of a model, looked up through its wrappers (`Float16Module`, `DistributedDataParallel`).

    Raises:
        ValueError: Neither the model nor a wrapped one has it.
    """
    module = model
    while getattr(module, name, None) is None:
        if not hasattr(module, "module"):
            raise ValueError(f"the model has no {name!r}: it must be a Megatron module, wrapped or not")
        module = module.module
    return getattr(module, name)


class GradientSync:
    """Delays the data-parallel reduction of gradients until a stage's last backward pass, as Megatron does.

    Args:
        parameters: Returns the parameters whose gradients are reduced.
        is_first_stage: On the first stage the last backward pass itself triggers the reduction, even with
            `grad_sync_func`, since the pipeline ends with it. On later stages the reduction overlaps with the stages
            before them.
    """

    def __init__(self, config: Any, parameters: Callable[[], Any], is_first_stage: bool) -> None:
        self._start = config.grad_sync_func
        self._parameters = parameters
        self._within_backward = self._start is None or is_first_stage
        self._held = True
        self._holding = ExitStack()
        self._holding.enter_context((config.no_sync_func or nullcontext)())

    def before_last_backward(self) -> None:
        """Call right before the stage's last backward pass."""
        if self._within_backward:
            self._release()

    def finish(self, has_gradients: bool) -> None:
        """Call after all passes."""
        if self._held:
            self._release()
            if has_gradients and self._start is not None:
                self._start(self._parameters())

    def _release(self) -> None:
        self._held = False
        self._holding.close()


class MegatronStage:
    """Implements `StageCompute` for one Megatron model chunk.

    Args:
        model: The model chunk, wrapped or not.
        functions: How the training loop computes a micro-batch.
        buckets: Buckets in the order in which they enter.
        backwards: Number of backward passes that the stage will run.
        is_last_stage: Whether the loss is computed here.
        sync: Gradient reduction.

    Attributes:
        data: What the loss function reported for each micro-batch; empty except on the last stage.
        tokens: Integer tensor on the model's device: the tokens counted by the loss function.
    """

    def __init__(
        self,
        model: Any,
        functions: StepFunctions,
        buckets: Sequence[BucketInput],
        backwards: int,
        is_last_stage: bool,
        sync: GradientSync,
    ) -> None:
        self.model = model
        self.config = of_wrapped(model, "config")
        self.functions = functions
        self.buckets = buckets
        self.is_last_stage = is_last_stage
        self.sync = sync
        self.device = next(model.parameters()).device
        self.data: dict[ChunkId, Any] = {}
        self.tokens = torch.zeros((), dtype=torch.int, device=self.device)
        self._left = backwards
        self._is_first = functions.tell_first

    def shape(self, action: Action) -> tuple[int, ...]:
        """`[rows, sequences, H]` of hidden states and of their gradient."""
        return self.buckets[action.bucket].shape

    def needs_gradient(self, action: Action) -> bool:
        """Every stage trains."""
        return True

    def forward(self, action: Action, hidden: Tensor | None) -> Tensor:
        """Hidden states for the next stage; on the last stage the loss to back-propagate.

        Raises:
            ValueError: The output is not what the next stage expects.
        """
        bucket = self.buckets[action.bucket]
        with self._timed("forward-compute"):
            if self._is_first and hasattr(self.model, "set_is_first_microbatch"):
                self.model.set_is_first_microbatch()
            self._is_first = False
            of_wrapped(self.model, "set_input_tensor")([hidden])
            with self._autocast():
                output, loss_function = self.functions.forward_step(bucket.batches, self.model)
            if self.is_last_stage:
                output = self._finish(action.chunk_id, output, loss_function, bucket.divisor)
        if not self.is_last_stage and (not isinstance(output, Tensor) or tuple(output.shape) != bucket.shape):
            described = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(
                f"bucket {bucket.name!r} is said to send {list(bucket.shape)} to the next stage, but its micro-batch "
                f"{action.micro_batch} made {described}: its seq_length or micro_batch_size is not that of its data"
            )
        result: Tensor = output
        return result

    def backward(self, action: Action, output: Tensor, gradient: Tensor | None) -> None:
        """Back-propagate `gradient` (on the last stage the loss itself, scaled) through `output`."""
        self._left -= 1
        if not self._left:
            self.sync.before_last_backward()
        with self._timed("backward-compute"):
            if gradient is None and self.config.grad_scale_func is not None:
                output = self.config.grad_scale_func(output)
            if output.requires_grad:
                torch.autograd.backward(output, gradient)

    def norm(self, action: Action, others: Tensor | None) -> Tensor:
        """Not used: the training loop has an optimizer of its own."""
        raise RuntimeError(f"{action}: Megatron's training loop clips and steps by itself")

    def update(self, action: Action, whole: Tensor | None) -> Tensor:
        """Not used either."""
        raise RuntimeError(f"{action}: Megatron's training loop clips and steps by itself")

    def label(self, action: Action) -> str:
        """The bucket's name."""
        return self.buckets[action.bucket].name

    def _finish(self, chunk_id: ChunkId, output: Any, loss_function: Any, divisor: int) -> Any:
        """Apply the loss function to the last stage's output and scale the loss as Megatron does.

        A loss function that also counts tokens returns a sum. It becomes a mean over the micro-batch's tokens here,
        unless the loop divides by all tokens of its batch in the end (`calculate_per_token_loss`).
        """
        if loss_function is None:
            self.data[chunk_id] = output
            return output
        if self.functions.collect_non_loss_data:
            self.data[chunk_id] = loss_function(output, non_loss_data=True)
            return output
        loss, *tokens, self.data[chunk_id] = loss_function(output)
        if not tokens:
            return loss / divisor
        self.tokens += tokens[0]
        if self.config.calculate_per_token_loss:
            return loss
        return loss / torch.clamp(tokens[0], min=1) / divisor

    def _autocast(self) -> AbstractContextManager[Any]:
        if not self.config.enable_autocast:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.config.autocast_dtype)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        timers = self.config.timers
        if timers is not None:
            timers(name, log_level=2).start()
        yield
        if timers is not None:
            timers(name).stop()
