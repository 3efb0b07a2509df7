"""Measure a profile: the operators of a layer, entry, loss head, adapters of each kind, collectives, on this device.

Every probe is a forward and a backward pass of the real module, half layers whole. Machines are noisy, so all probes
take turns, several rounds of them, and each one's figure is the median of its rounds; short ones are repeated within a
turn.

All ranks of the world run the same probes at the same time, as the ranks of a training run are busy at the same time:
on a host's CPU, each of them is slower than it would be alone.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from operator import lt
from typing import Any

import torch
import torch.distributed as dist

from megatron_mux.backbone.latent_attention import LatentAttention
from megatron_mux.backbone.model import Backbone
from megatron_mux.backbone.pieces import without_collectives
from megatron_mux.base_ops import EXPERT_OPS
from megatron_mux.fusion.profiler.layer_operators import layer_operators
from megatron_mux.fusion.profiler.measured_curves import profile_curves
from megatron_mux.fusion.profiler.probed_stage import SEGMENT, Probe, Run
from megatron_mux.fusion.profiler.probes import Probes
from megatron_mux.fusion.profiler.profile import Curve, Profile, points
from megatron_mux.fusion.profiler.roofline import roofline
from megatron_mux.fusion.profiler.updates import measured_updates

_MOST_TAKEN = 0.5
"""A message never takes more of the processor."""

Progress = Callable[[int, int], None]
"""Told how many measurements are done, of how many."""

_TURN_SECONDS = 4e-3
"""A probe shorter than this is repeated within its turn for as long."""

_MOST_REPEATS = 20
"""Within a turn."""

_LONGEST_PASS = 1.0
"""Seconds of the longest probe of attention. Beyond, its seconds grow as its work."""

_SEQUENCE = 8
"""Rows of the longest sequence for each row of the largest other probe: it has the memory of attention alone."""


def measure(
    backbone: Backbone,
    about: dict[str, Any],
    most_tokens: int,
    rounds: int = 7,
    progress: Progress | None = None,
) -> Profile:
    """The profile of a backbone on this device; every rank of the world calls it.

    Args:
        backbone: One without adapters; its first layer stands for all.
        about: What names the profile.
        rounds: Turns that each probe gets.
        progress: Told how far it is.
    """
    bench = _Bench(backbone, most_tokens, rounds)
    # The cost model adds messages by itself, so that it can tell which of them other hybrid tasks hide.
    silent = [info.module for info in backbone.base_ops() if info.name not in EXPERT_OPS]
    attentions = [layer.self_attention for layer in backbone.model.decoder.layers]
    silent += [a for a in attentions if isinstance(a, LatentAttention)]
    with ExitStack() as stack:
        stack.enter_context(without_collectives(*silent))
        bench.place_weights(stack)
        bench.choose_kernels()
        probes = bench.probes.all(bench.longest_sequence())
        bench.measure_in_rounds(probes, progress)
    timed: dict[str, dict[float, tuple[float, float]]] = {}
    for probe in probes:
        timed.setdefault(probe.name, {})[probe.size] = probe.seconds
    return bench.profile(about, {name: points(curve) for name, curve in timed.items()})


class _Bench:
    """Times probes of a backbone, and makes curves of their seconds."""

    def __init__(self, backbone: Backbone, most_tokens: int, rounds: int) -> None:
        self.backbone = backbone
        self.rounds = rounds
        self.device, self.dtype = backbone.device, backbone.dtype
        self.probes = Probes(backbone, most_tokens)

    def place_weights(self, stack: ExitStack) -> None:
        """Have the weights in place of the layers that are probed, if they are not there anyway."""
        for layers in self.probes.stage.stacks.values():
            for layer in layers:
                stack.enter_context(self.backbone.offload.using(self.probes.stage.layers.index(layer)))

    # -- timing

    def measure_in_rounds(self, probes: Sequence[Probe], progress: Progress | None = None) -> None:
        """Time all probes, in several rounds."""
        for turn in range(self.rounds + 1):  # the first one warms up
            for i, probe in enumerate(probes if turn % 2 == 0 else reversed(probes)):
                timed = self.time(probe)
                if turn:
                    probe.rounds.append(timed)
                if progress is not None:
                    progress(turn * len(probes) + i + 1, len(probes) * (self.rounds + 1))

    def choose_kernels(self) -> None:
        """Choose the kernels of each BaseOp, by their seconds on the slowest rank."""
        probes = self.probes.adapters.kernels()
        self.measure_in_rounds(probes)
        taken = self.backbone.parallel.most([sum(probe.seconds) for probe in probes])
        by_op: dict[str, dict[str, list[float]]] = {}
        for probe, seconds in zip(probes, taken, strict=True):
            op, _, name = probe.name.partition(":")
            by_op.setdefault(op, {}).setdefault(name, []).append(seconds)
        self.probes.adapters.chosen = tuple((op, _fastest(of_op)) for op, of_op in by_op.items())  # type: ignore[misc]

    def longest_sequence(self) -> int:
        """The longest one whose core attention is measured: twice as long would take longer than a probe may."""
        stage, length = self.probes.stage, SEGMENT
        while length < _SEQUENCE * stage.most_tokens:
            taken = self.backbone.parallel.most([sum(self.time(self.probes.attention(length)))])[0]
            if 4 * taken > _LONGEST_PASS:
                break
            length *= 2
        return length

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def now(self) -> float | torch.Event:
        """A moment of the device's: on a GPU an event behind what it was given to compute, which nobody awaits."""
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def time(self, probe: Probe) -> tuple[float, float]:
        """Median forward and backward seconds of one turn.

        The host waits at the end of a turn only, as a step does: what counts is whatever takes longer, to launch a pass
        or to compute it. Ranks agree on how often a probe is repeated: it may have collectives inside, and they stay in
        step.
        """
        runs = [probe.make(), *([] if probe.base is None else [probe.base()])]
        passes: list[list[tuple[Any, ...]]] = []
        repeats = 1
        while len(passes) < repeats:
            passes.append([self._pass(run, probe.cold) for run in runs])
            if len(passes) == 1:
                self.synchronize()
                longest = self.backbone.parallel.most([sum(sum(_seconds(run)) for run in passes[0])])[0]
                repeats = max(1, min(_MOST_REPEATS, math.ceil(_TURN_SECONDS / longest)))
        self.synchronize()
        medians = []
        for way in range(2):
            measured = [[_seconds(run)[way] for run in runs] for runs in passes]
            medians.append(statistics.median(row[0] - sum(row[1:]) for row in measured))
        return medians[0], medians[1]

    def _pass(self, run: Run, cold: bool) -> tuple[Any, ...]:
        """The moments before and behind a forward pass, then those of its backward pass, if it has one."""
        if cold:
            self.probes.stage.read_other_layers()
        start = self.now()
        output, wanted = run()
        moments = (start, self.now())
        if not wanted:
            return moments
        gradient = torch.ones_like(output)
        start = self.now()
        torch.autograd.grad(output, wanted, gradient, allow_unused=True)
        return (*moments, start, self.now())

    # -- what was found

    def profile(self, about: dict[str, Any], timed: Mapping[str, Curve]) -> Profile:
        """Tell what probes took apart into operators; fill in what cannot be measured here."""
        stage, tp = self.probes.stage, self.backbone.parallel.tp_size
        estimated = roofline(stage.shape, about, self.dtype.itemsize, tp, stage.most_tokens)
        depths = {half: len(layers) for half, layers in stage.stacks.items()}
        curves = profile_curves(timed, depths, stage.divided)
        for name, curve in estimated.curves.items():
            # A rank that is neither first nor last has no entry or head; one alone has nobody to send to.
            if name in ("entry", "head", "transfer", "all_reduce"):
                curves.setdefault(name, curve)
        assert set(layer_operators(stage.shape)) <= set(curves)
        group = self.backbone.offload.groups.get(0)
        if group is not None:
            seconds = (self._median(group.wait, after=group.drop),)
            curves["dequantise"] = Curve((1,), seconds, seconds)
        updates = measured_updates(self.device, self.dtype, self.rounds, self.synchronize)
        return Profile(
            source="measured",
            about=about,
            curves=curves,
            message_share=self._message_share(),
            links=self.backbone.parallel.world_size > 1,
            kernels=self.probes.adapters.chosen,
            updates={**estimated.updates, **updates},  # of what is not installed here, an estimate
            sequence_seconds=self._median(lambda: stage.batch(32 * SEGMENT)) / 32,
            step_seconds=estimated.step_seconds,
        )

    def _median(self, run: Callable[[], object], after: Callable[[], object] | None = None) -> float:
        """Seconds of something that the host awaits; `after` cleans up."""
        rounds = []
        for _ in range(self.rounds + 1):
            self.synchronize()
            start = time.perf_counter()
            run()
            self.synchronize()
            rounds.append(time.perf_counter() - start)
            if after is not None:
                after()
        return statistics.median(rounds[1:])

    def _message_share(self) -> float:
        """Part of the processor's time that messages take while they are on their way; of the slowest rank."""
        most, begin = self.backbone.parallel.most, self._message()
        if begin is None:
            return 0.0
        stage = self.probes.stage
        x = torch.zeros(stage.rows[-1], self.backbone.shape.hidden, dtype=self.dtype, device=self.device)
        weight: torch.Tensor = self.backbone.base_ops()[0].module.weight  # type: ignore[assignment]

        def seconds(messages: int, products: int) -> float:
            """A message's seconds, or those of products that it may be beside."""
            most([0.0])  # a barrier
            start = time.perf_counter()
            sent = [begin() for _ in range(messages)]
            for _ in range(products):
                x @ weight.t()
            if not products:
                for message in sent:
                    message.wait()
            self.synchronize()
            taken = time.perf_counter() - start
            for message in sent:
                message.wait()
            return most([taken])[0]

        rounds = []
        for _ in range(self.rounds + 1):
            message, product = seconds(1, 0), seconds(0, 1)
            # So many that the message is there before the last of them.
            count = 1 + math.ceil(2 * message / product)
            together, alone = seconds(1, count), seconds(0, count)
            rounds.append((together - alone) / message)
        return min(_MOST_TAKEN, max(0.0, statistics.median(rounds[1:])))

    def _message(self) -> Callable[[], Any] | None:
        """Begins a message of tensor ranks, or of expert ranks where there are no others; None without either."""
        parallel, rows = self.backbone.parallel, self.probes.stage.rows[-1]
        if parallel.tp_size > 1:
            x = torch.zeros(rows, self.backbone.shape.hidden, dtype=self.dtype, device=self.device)
            return lambda: dist.all_reduce(x, group=parallel.tp_group, async_op=True)
        if self.probes.experts is not None and parallel.experts.group.size() > 1:
            return self.probes.experts.message(rows)
        return None


def _seconds(moments: Sequence[Any]) -> tuple[float, float]:
    """Of a forward and a backward pass between moments that have all come."""
    spans = [
        end - start if isinstance(end, float) else start.elapsed_time(end) / 1e3
        for start, end in zip(moments[::2], moments[1::2], strict=True)
    ]
    return spans[0], sum(spans[1:])


def _fastest(kernels: Mapping[str, Sequence[float]]) -> str:
    """The first kernels, the default, unless others are faster in every case."""
    default = next(iter(kernels))
    better = [name for name, each in kernels.items() if all(map(lt, each, kernels[default]))]
    return min(better, key=lambda name: sum(kernels[name]), default=default)
