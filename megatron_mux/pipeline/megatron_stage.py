"""One stage of a Megatron model, computed as Megatron-Core's own schedules compute it: callbacks, scaling, timers.

It works on what a training loop hands to a schedule, so it needs nothing of Megatron-Core itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_mux.pipeline.action import Action, Unit

Batches = Iterator[Any] | None
"""What Megatron calls a data iterator; None on ranks that read no data."""


@dataclass(frozen=True)
class BucketInput:
    """What a stage needs to know of a bucket.

    Attributes:
        name: For messages.
        shape: `[rows, sequences, H]`, what travels between stages for one of its micro-batches.
        divisor: What the loss of each of its micro-batches is divided by.
        batches: Where its micro-batches come from, one after the other.
    """

    name: str
    shape: tuple[int, int, int]
    divisor: int
    batches: Batches


@dataclass(frozen=True)
class StepFunctions:
    """How a training loop wants a micro-batch computed.

    Attributes:
        forward_step: `(batches, model)` to the stage's output and a loss function, Megatron's `forward_step_func`.
        collect_non_loss_data: Keep what the loss function makes of the output with `non_loss_data=True`.
        tell_first: Let the model know which micro-batch is the first, for what it caches of its weights.
    """

    forward_step: Callable[..., tuple[Any, Callable[..., Any] | None]]
    collect_non_loss_data: bool
    tell_first: bool


def of_wrapped(model: Any, name: str) -> Any:
    """An attribute of a model or of what it wraps (as `Float16Module` and `DistributedDataParallel` wrap).

    Raises:
        ValueError: None of them has it.
    """
    module = model
    while getattr(module, name, None) is None:
        if not hasattr(module, "module"):
            raise ValueError(f"the model has no {name!r}: it must be a Megatron module, wrapped or not")
        module = module.module
    return getattr(module, name)


class GradientSync:
    """Data-parallel reduction of gradients: held back until a stage's last backward pass, as Megatron does.

    Args:
        config: The model's configuration.
        parameters: What is reduced.
        is_first_stage: There the last backward pass itself sets the reduction off, even with `grad_sync_func`: the
            pipeline ends with it. On later stages it runs while the stages before them finish.
    """

    def __init__(self, config: Any, parameters: Callable[[], Any], is_first_stage: bool) -> None:
        self._start = config.grad_sync_func
        self._parameters = parameters
        self._within_backward = self._start is None or is_first_stage
        self._held = True
        self._holding = ExitStack()
        self._holding.enter_context((config.no_sync_func or nullcontext)())

    def before_last_backward(self) -> None:
        """Right before the stage's last backward pass."""
        if self._within_backward:
            self._release()

    def finish(self, has_gradients: bool) -> None:
        """After all passes."""
        if self._held:
            self._release()
            if has_gradients and self._start is not None:
                self._start(self._parameters())

    def _release(self) -> None:
        self._held = False
        self._holding.close()


class MegatronStage:
    """A `StageCompute` of one Megatron model chunk.

    Args:
        model: The chunk, wrapped or not.
        functions: How the training loop wants it computed.
        buckets: In the order in which they enter.
        backwards: Backward passes that the stage will make.
        is_last_stage: Whether the loss is computed here.
        sync: Reduction of gradients.

    Attributes:
        data: What the loss function reported (or made) of each micro-batch; of the last stage alone.
        tokens: Sum of the tokens that the loss function counted: an integer on the model's device.
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
        self.data: dict[Unit, Any] = {}
        self.tokens = torch.zeros((), dtype=torch.int, device=self.device)
        self._left = backwards
        self._is_first = functions.tell_first

    def shape(self, action: Action) -> tuple[int, ...]:
        """`[rows, sequences, H]` of hidden states and of their gradient."""
        return self.buckets[action.bucket].shape

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
                output = self._finish(action.unit, output, loss_function, bucket.divisor)
        if not self.is_last_stage and (not isinstance(output, Tensor) or tuple(output.shape) != bucket.shape):
            found = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(
                f"bucket {bucket.name!r} is said to send {list(bucket.shape)} to the next stage, but its micro-batch "
                f"{action.micro_batch} made {found}: its seq_length or micro_batch_size is not that of its data"
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
        """Never asked for: the training loop has an optimizer of its own."""
        raise RuntimeError(f"{action}: a training loop of Megatron's clips and steps by itself")

    def update(self, action: Action, whole: Tensor | None) -> Tensor:
        """Never asked for either."""
        raise RuntimeError(f"{action}: a training loop of Megatron's clips and steps by itself")

    def label(self, action: Action) -> str:
        """The bucket's name."""
        return self.buckets[action.bucket].name

    def _finish(self, unit: Unit, output: Any, loss_function: Any, divisor: int) -> Any:
        """What the loss function makes of the last stage's output, scaled as Megatron scales it.

        A loss function that also counts tokens gives a sum; it becomes a mean over the micro-batch's tokens here
        unless the loop divides by all tokens of its batch in the end (`calculate_per_token_loss`).
        """
        if loss_function is None:
            self.data[unit] = output
            return output
        if self.functions.collect_non_loss_data:
            self.data[unit] = loss_function(output, non_loss_data=True)
            return output
        loss, *tokens, self.data[unit] = loss_function(output)
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
