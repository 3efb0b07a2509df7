"""How long a step takes on each method: a roofline of the device and of its links.

Good enough to rank methods; seconds may be far off. It assumes that a device reaches its peak, which is not true, but
the error is alike for every method. Ranks fill one node after another: tensor ranks first, then data-parallel ranks,
then stages. A group within a node has the node's links, one that spans more the network.

Shapes: T rows (tokens) of a micro-batch.
"""

from __future__ import annotations

from megatron_mux.fusion.device import Device
from megatron_mux.memory.forms.architecture import Architecture, ParamCounts
from megatron_mux.memory.forms.method import ParallelConfig
from megatron_mux.memory.forms.phases import StepMemory
from megatron_mux.memory.forms.recipe import Recipe
from megatron_mux.memory.forms.stages import Stage, on_rank, stages

HOST_LINK = 25e9
"""Bytes a second between a GPU and host memory: what PCIe 4.0 with sixteen lanes reaches."""
HOST_MEMORY = 100e9
"""Bytes a second of host memory, for an optimizer's step there."""
_OPERATORS = 12
"""Operators of a layer's pass, each with the device's overhead."""


def step_seconds(memory: StepMemory, rows: float, micro_batches: int, device: Device) -> float:
    """Seconds of a step.

    Args:
        rows: Mean rows of a micro-batch.
    """
    passes = _Passes(memory.architecture, memory.recipe, memory.method, rows, device)
    of_stages = stages(memory.architecture, memory.method)
    times = [passes.stage(stage) for stage in of_stages]
    each = [forward + backward for forward, backward in times]
    seconds = sum(each) + (micro_batches - 1) * max(each) + 2 * (len(of_stages) - 1) * passes.transfer()
    # A step's sums of gradients hide behind the last backward pass as far as that goes.
    ends = (
        max(0.0, passes.gradients(stage) - backward) + passes.optimizer(stage)
        for stage, (_, backward) in zip(of_stages, times, strict=True)
    )
    return seconds + max(ends)


class _Passes:
    """Seconds of one rank's work."""

    def __init__(
        self, architecture: Architecture, recipe: Recipe, method: ParallelConfig, rows: float, device: Device
    ) -> None:
        self._a, self._recipe, self._method, self._device = architecture, recipe, method, device
        self._rows = rows
        self._size = recipe.size
        self._known: dict[ParamCounts, tuple[float, float]] = {}
        self._data_link = device.link_over(method.tensor * method.data)

    def stage(self, stage: Stage) -> tuple[float, float]:
        """Seconds of a micro-batch's forward and of its backward pass."""
        forward = backward = 0.0
        for part in (self._a.layers[layer] for layer in stage.layers):
            mine, other = self._known.get(part) or self._known.setdefault(part, self._layer(part))
            forward, backward = forward + mine, backward + other
        if stage.last:
            ahead, behind = self._head()
            forward, backward = forward + ahead, backward + behind
        return forward, backward

    def _layer(self, part: ParamCounts) -> tuple[float, float]:
        a, method = self._a, self._method
        dense = part.divided + part.experts * a.experts_per_token / a.experts
        products = 2 * self._rows * dense / method.tensor
        scores = (
            2 * self._rows * self._recipe.mean_length * a.queries / method.tensor
        )  # half of them are masked
        weights = self._size * (part.divided + part.experts / method.expert) / method.tensor
        width = 6 * a.hidden + 2 * (2 * a.queries + 2 * a.keys + a.inner + a.ffn) / method.tensor
        traffic = weights + self._size * self._rows * width
        if self._recipe.attention == "eager":
            traffic += 12 * self._rows * self._recipe.length * a.heads / method.tensor
        forward = self._compute(products + scores, traffic)
        core = self._compute(scores, 0.0)
        times = 1 if self._recipe.frozen else 2
        # Attention goes backward with its scores computed again.
        backward = self._compute(times * products + 2.5 * scores, 2 * traffic) + self._adapters()
        exchange = self._exchange()
        again = {"none": 0.0, "selective": core, "full": forward + exchange}[method.recompute]
        share = on_rank(part, method, 1 / method.expert)
        brought = self._brought(share)
        return max(forward + exchange, brought), max(
            backward + exchange + again, brought + self._reduced(share)
        )

    def _compute(self, flops: float, traffic: float) -> float:
        launches = (_OPERATORS - 1) * self._device.overhead
        return self._device.seconds(flops, traffic, self._size) + launches

    def _adapters(self) -> float:
        """Seconds of a layer's adapters, forward and backward."""
        tasks, a = self._recipe.adapters, self._a
        if not tasks:
            return 0.0
        values = sum(task.values(range(len(a.layers)), self._method.tensor) for task in tasks)
        return self._compute(6 * self._rows * values / len(a.layers) / len(tasks), 0.0)

    def _exchange(self) -> float:
        """Seconds of a pass's two all-reduces among tensor ranks, and of the exchange among expert ranks.

        With sequence parallelism, gathers and scatters move as many bytes as the all-reduces.
        """
        a, method, device = self._a, self._method, self._device
        seconds = 0.0
        if method.tensor > 1:
            size = 2 * self._rows * a.hidden * self._size * _rest(method.tensor)
            seconds += 2 * (size / device.link_over(method.tensor) + device.latency)
        if method.expert > 1:
            size = self._rows * a.experts_per_token * a.hidden * self._size * _rest(method.expert)
            seconds += 2 * (
                size / method.tensor / device.link_over(method.tensor * method.expert) + device.latency
            )
        return seconds

    def _brought(self, share: ParamCounts) -> float:
        """Seconds to bring a rank's weights of a layer into place for a pass."""
        method, device, held = self._method, self._device, share.bytes(self._size)
        seconds = 0.0
        if method.zero == 3:
            seconds += self._others(held.copied, held.experts) / self._data_link + device.latency
        if method.offload and self._recipe.frozen:
            shares = method.data if method.zero == 3 else 1
            kept = held.copied + held.experts * min(method.expert, shares)
            seconds += kept / shares / HOST_LINK
        return seconds

    def _others(self, dense: float, experts: float) -> float:
        """Number of a rank's values held by the other ranks once replicas shard them."""
        method = self._method
        return dense * _rest(method.data) + experts * _rest(method.data // method.expert)

    def _reduced(self, share: ParamCounts) -> float:
        """Seconds to reduce a rank's gradients of a layer over the ranks that shard its weights."""
        if self._method.zero != 3 or self._recipe.frozen:
            return 0.0
        return self._recipe.gradient_size * self._others(share.copied, share.experts) / self._data_link

    def _head(self) -> tuple[float, float]:
        flops = 2 * self._rows * self._a.hidden * self._a.vocabulary / self._method.tensor
        traffic = (self._size + 8) * self._rows * self._a.vocabulary / self._method.tensor
        times = 1 if self._recipe.frozen else 2
        return self._compute(flops, traffic), self._compute(times * flops, traffic)

    def transfer(self) -> float:
        """Seconds to send a micro-batch's hidden states to the next stage."""
        rows = self._rows / (self._method.tensor if self._method.sequence_parallel else 1)
        return self._device.latency + rows * self._a.hidden * self._size / self._device.link_over(
            self._method.gpus
        )

    def gradients(self, stage: Stage) -> float:
        """Seconds to reduce a step's gradients over data-parallel ranks."""
        method, recipe = self._method, self._recipe
        if method.data == 1 or (method.zero == 3 and not recipe.frozen):
            return 0.0
        experts = 0 if recipe.frozen else sum(part.experts for part in stage.counts)
        values = self._others(self._trained(stage) - experts, experts)
        return 2 * values * recipe.gradient_size / self._data_link + self._device.latency

    def optimizer(self, stage: Stage) -> float:
        """Seconds of the optimizer's step."""
        recipe, method = self._recipe, self._method
        values = self._trained(stage)
        if method.zero and not recipe.frozen:
            values = stage.divided(method)
        states = recipe.master_size + recipe.keeps.state_size(recipe.gradient_size)
        size = values * (2 * states + 2 * recipe.weight_size + recipe.gradient_size)
        if not method.offload or recipe.frozen:
            return size / self._device.bandwidth
        moved = values * (recipe.gradient_size + recipe.size)
        return moved / HOST_LINK + size / HOST_MEMORY

    def _trained(self, stage: Stage) -> float:
        """Values that a rank trains."""
        if not self._recipe.frozen:
            return stage.values
        return sum(task.values(stage.layers, self._method.tensor) for task in self._recipe.adapters)


def _rest(ranks: int) -> float:
    """The share of a tensor that the other ranks hold."""
    return (ranks - 1) / ranks
