"""One task's optimizer, schedule and clipping; the sum of gradients over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.adapters.adapter import AdapterParameter
from megatron_mux.runtime import GRADIENTS_AT_ONCE, Parallel
from megatron_mux.tasks import TrainingSpec

_MOMENTS = ("exp_avg", "exp_avg_sq")


class TaskOptimizer:
    """A task's optimizer over its local adapter parameters, with the options and defaults of `transformers`.

    Args:
        parameters: The adapter's parameters on this rank (may be empty).
        spec: The task's `training`.
        total_steps: Steps its schedule spans.
    """

    def __init__(self, parameters: Sequence[AdapterParameter], spec: TrainingSpec, total_steps: int) -> None:
        self.parameters = list(parameters)
        self.spec = spec
        groups = [
            {"params": [p.value for p in parameters if p.decay], "weight_decay": spec.weight_decay},
            {"params": [p.value for p in parameters if not p.decay], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        self._optimizer: torch.optim.Optimizer | None = None
        if groups and spec.optim == "sgd":
            self._optimizer = torch.optim.SGD(groups, lr=spec.learning_rate, fused=True)
        elif groups:
            self._optimizer = torch.optim.AdamW(
                groups,
                lr=spec.learning_rate,
                betas=(spec.adam_beta1, spec.adam_beta2),
                eps=spec.adam_epsilon,
                fused=True,
            )
        if spec.optim != "sgd":  # now, not in the first step: the task is refused if they do not fit
            for p in self.parameters:
                self._moments_of(p, {name: torch.zeros_like(p.value) for name in _MOMENTS}, 0)
        self._factor = _schedule(spec, total_steps)

    def _moments_of(self, p: AdapterParameter, moments: Mapping[str, Tensor], step: int) -> None:
        assert self._optimizer is not None
        count = torch.tensor(float(step), device=p.value.device)
        self._optimizer.state[p.value] = {"step": count, **moments}

    def learning_rate(self, step: int) -> float:
        """The rate that optimizer step `step` (from 0) uses."""
        return self.spec.learning_rate * self._factor(step)

    def clip(self, norm: Tensor) -> None:
        """Scale the gradients so that their norm, the scalar `norm` over all ranks, is at most `max_grad_norm`."""
        limit = self.spec.max_grad_norm
        gradients = [p.value.grad for p in self.parameters if p.value.grad is not None]
        if limit > 0 and gradients:
            # The same expression as torch.nn.utils.clip_grad_norm_.
            scale = (limit / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(gradients, scale.to(gradients[0].dtype))

    def step(self, step: int, skip: Tensor) -> None:
        """Update the parameters as optimizer step `step` (from 0), and drop the gradients.

        Args:
            step: Sets the learning rate.
            skip: Scalar fp32 on the device: unless it is zero, parameters and moments stay as they are.
        """
        if self._optimizer is None:
            return
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        # torch's fused optimizers look here for what a gradient scaler has found.
        self._optimizer.found_inf = skip  # type: ignore[attr-defined]
        self._optimizer.step()
        self.zero()

    def zero(self) -> None:
        """Drop the gradients."""
        for parameter in self.parameters:
            parameter.value.grad = None

    def kept_of(self, p: AdapterParameter) -> list[Tensor]:
        """The optimizer's state of a parameter: moments and the number of steps."""
        return [] if self._optimizer is None else list(self._optimizer.state.get(p.value, {}).values())

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Local moments by parameter key; empty for SGD."""
        if self._optimizer is None:
            return {}
        state = self._optimizer.state
        return {
            p.key: {name: state[p.value][name] for name in _MOMENTS}
            for p in self.parameters
            if p.value in state and _MOMENTS[0] in state[p.value]
        }

    def load_state(self, moments: Mapping[str, Mapping[str, Tensor]], step: int) -> None:
        """Restore `state()` of full tensors by key, cut to this rank's shards."""
        if self._optimizer is None or not moments:
            return
        for p in self.parameters:
            self._moments_of(
                p, {name: p.slice_of(moments[p.key][name]).to(p.value) for name in _MOMENTS}, step
            )


def _schedule(spec: TrainingSpec, total_steps: int) -> Callable[[int], float]:
    from transformers.optimization import get_scheduler

    # The schedule is a pure function of the step; a throw-away optimizer is what its constructor asks for.
    throw_away = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_scheduler(
        spec.lr_scheduler_type,
        throw_away,
        num_warmup_steps=spec.warmup(total_steps),
        num_training_steps=total_steps,
    )
    factor: Callable[[int], float] = scheduler.lr_lambdas[0]
    return factor


def gradient_buffer_size(parameters: Sequence[AdapterParameter], parallel: Parallel) -> int:
    """Bytes of the buffer in which these parameters' gradients are summed over ranks; 0 on a single rank."""
    if parallel.tp_size * parallel.dp_size == 1 or not parameters:
        return 0
    sizes = [p.value.numel() for p in parameters]
    return max([*sizes, min(sum(sizes), GRADIENTS_AT_ONCE)]) * parameters[0].value.dtype.itemsize


def reduce_gradients(
    parameters: Iterable[AdapterParameter], parallel: Parallel, flags: Tensor, buffer: Tensor
) -> None:
    """Sum gradients over ranks: partial ones over tensor ranks, all of them over data-parallel ranks.

    Few collectives for all tasks together, in a buffer that is there already. A sum never mixes elements, so a task's
    NaN stays its own.

    Args:
        parameters: Local parameters of every task of the bucket; a missing gradient counts as zero and stays missing.
        parallel: Where this rank stands.
        flags: Summed over data-parallel ranks along with them.
        buffer: `[n]` uint8, as long on every rank; `gradient_buffer_size` of these parameters or more.
    """
    parameters = list(parameters)
    if parameters and buffer.numel():
        part = buffer.view(parameters[0].value.dtype)
        if parallel.tp_size > 1:
            _all_reduce([p.value for p in parameters if p.partial], part, parallel.tp_group)
        if parallel.dp_size > 1:
            _all_reduce([p.value for p in parameters], part, parallel.dp_group)
    if parallel.dp_size > 1:
        dist.all_reduce(flags, group=parallel.dp_group)


def squared_norm(parameters: Sequence[AdapterParameter], device: torch.device) -> Tensor:
    """This rank's share of the squared norm of a task's gradient: parameters it owns, each element counted once."""
    gradients = [p.value.grad for p in parameters if p.owner and p.value.grad is not None]
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(gradients)).double().square().sum()


def _all_reduce(values: Sequence[Tensor], buffer: Tensor, group: dist.ProcessGroup | None) -> None:
    """Sum gradients, as many at once as the buffer holds: the same ones on every rank."""
    start = 0
    while start < len(values):
        stop, size = start, 0
        while stop < len(values) and size + values[stop].numel() <= buffer.numel():
            size += values[stop].numel()
            stop += 1
        together = values[start:stop]
        pieces = buffer[:size].split([value.numel() for value in together])
        for value, piece in zip(together, pieces, strict=True):
            if value.grad is None:
                piece.zero_()
            else:
                piece.view_as(value).copy_(value.grad)
        dist.all_reduce(buffer[:size], group=group)
        for value, piece in zip(together, pieces, strict=True):
            if value.grad is not None:
                value.grad.copy_(piece.view_as(value))
        start = stop
