"""A process of `expert_placement.py`: takes steps with experts placed in one way or another, as it is told.

It reads one JSON object a line from standard input and answers each with one on standard output.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.backbone.model import Backbone
from megatron_mux.engine import Engine, Task
from megatron_mux.expert_shape import Placement, serving_rank
from megatron_mux.moe.measure_links import LinkMeter, measure_links
from megatron_mux.moe.profile_tasks import profile_tasks
from megatron_mux.runtime import Parallel, initialize, shutdown
from megatron_mux.tasks import TaskSpec
from tests.reference.records import Records
from tests.traffic import counted

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


def enter(namespace: str) -> None:
    """Move this process into a network namespace; before it has threads."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    if libc.setns(handle, _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
    os.close(handle)


@dataclass
class Worker:
    """This process.

    Attributes:
        parallel: Where it stands.
        nodes: [P] node of each process.
        methods: By name, an engine that trains one task.
    """

    parallel: Parallel
    nodes: Sequence[str]
    methods: dict[str, Engine] = field(default_factory=dict)

    def load(self, backbone: str, records: str, batch: int, placements: Mapping[str, Any]) -> dict[str, Any]:
        """Build an engine for each placement; all share the weights of everything but their experts.

        Args:
            backbone: Hugging Face directory.
            records: File with token ids, `[records, length]`.
            batch: Sequences of a step.
            placements: Method to [L][E] workers.
        """
        self.methods.clear()
        shared: dict[str, Tensor] = {}
        for name, workers in placements.items():
            engine = self._engine(backbone, records, batch, self._placement(workers))
            for key, parameter in engine.backbone.model.named_parameters():
                if "experts_fc" not in key:
                    parameter.data = shared.setdefault(key, parameter.data)
            self.methods[name] = engine
        return {}

    def _engine(self, backbone: str, records: str, batch: int, placement: Placement | None = None) -> Engine:
        _release()
        tokens, pairs = _read(records)
        loaded = Backbone.load(backbone, self.parallel, torch.bfloat16, placement=placement)
        engine = Engine(loaded, self.parallel)
        engine.register_tasks([Task(_spec(batch, tokens.shape[1]), Records(pairs).as_dataset())])
        return engine

    def _placement(self, workers: Sequence[Sequence[Sequence[int]]]) -> Placement:
        """With a master, worker n is expert rank n + 1."""
        first = self.parallel.experts.first_worker
        ranks = tuple(tuple(tuple(first + n for n in own) for own in row) for row in workers)
        return Placement(self.parallel.world_size, dict(enumerate(ranks)), tuple(self.nodes))

    def step(self, method: str) -> dict[str, Any]:
        """Take a step; returns when it began and ended, and bytes.

        `sent` are those of rows and results that this process has sent to each, by the counters of the exchange;
        `routed` what its rows and their results must have taken from and to each, by the experts that the rows
        selected; `summed` those of what all processes have summed, such as adapters' gradients.
        """
        engine = self.methods[method]
        backbone = engine.backbone
        assert backbone.placement is not None
        routed, summed, all_reduce = np.zeros(self.parallel.world_size, np.int64), 0, dist.all_reduce

        def summing(data: Tensor, *others: Any, **more: Any) -> Any:
            nonlocal summed
            summed += data.numel() * data.element_size()
            return all_reduce(data, *others, **more)

        dist.barrier()
        start = time.monotonic()
        with ExitStack() as hooks:
            dist.all_reduce = summing
            hooks.callback(setattr, dist, "all_reduce", all_reduce)
            for layer, router in _routers(backbone):
                serving = np.array(backbone.placement.serving(layer, self.parallel.experts.rank))
                hooks.callback(router.register_forward_hook(self._routed(routed, serving)).remove)
            traffic = hooks.enter_context(counted(backbone))
            engine.step()
        end = time.monotonic()
        sent = np.sum([sizes for own in traffic.values() for sizes in own.sent.values()], axis=0)
        found = {"start": start, "end": end, "summed": summed}
        return {**found, "sent": sent.tolist(), "routed": routed.tolist()}

    def _routed(self, routed: np.ndarray, serving: np.ndarray) -> Any:
        def hook(router: Any, inputs: tuple[Any, ...], routes: Any) -> None:
            experts = routes.experts.numpy()
            routed[:] += _reached(serving[experts], len(routed)).sum(0) * _bytes_of_row(inputs[0], routes)

        return hook

    def profile(self, backbone: str, records: str) -> dict[str, Any]:
        """Count which experts the records select; for a team of one."""
        _release()
        tokens, pairs = _read(records)
        loaded = Backbone.load(backbone, self.parallel, torch.bfloat16)
        found = profile_tasks(loaded, {"task": Records(pairs).as_dataset()}, tokens.numel())
        return found.model_dump(mode="json")

    def trace(
        self,
        backbone: str,
        records: str,
        batch: int,
        steps: int,
        masters: Mapping[str, bool],
        placements: Mapping[str, Any],
        nodes: Sequence[str],
    ) -> dict[str, list[float]]:
        """Train in this process alone; returns, for each method, what each step would send between nodes.

        Args:
            backbone, records, batch: As for `load`.
            steps: Number of steps.
            masters: Method to whether a master on the first worker's node has all rows; else all workers have some.
            placements: Method to [L][E] workers.
            nodes: Of each worker.
        """
        engine = self._engine(backbone, records, batch)
        crossing = {
            name: [_crossing(row, nodes, masters[name]) for row in placement]
            for name, placement in placements.items()
        }
        found: dict[str, list[float]] = {name: [] for name in placements}
        with ExitStack() as hooks:
            for layer, router in _routers(engine.backbone):

                def count(router: Any, inputs: tuple[Any, ...], routes: Any, layer: int = layer) -> None:
                    experts = routes.experts.numpy()
                    size = _bytes_of_row(inputs[0], routes)
                    for name, by_layer in crossing.items():
                        found[name][-1] += size * _rows_crossing(experts, *by_layer[layer])

                hooks.callback(router.register_forward_hook(count).remove)
            for _ in range(steps):
                for sizes in found.values():
                    sizes.append(0.0)
                engine.step()
        return found

    def links(self, seconds: float) -> dict[str, Any]:
        """Measure the links between all processes."""
        found = measure_links(LinkMeter(self.parallel, seconds), self.nodes, all_pairs=False)
        return {
            "bandwidth": found.bandwidth.tolist(),
            "latency": found.latency.tolist(),
            "up": found.up,
            "down": found.down,
        }


def _release() -> None:
    """Free models of earlier cases: engines are in reference cycles, and few objects are made that would start it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _read(records: str) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Token ids, `[records, length]`, and records of which every token is labelled."""
    tokens = torch.load(records, weights_only=True)
    return tokens, [(row, torch.ones(len(row), dtype=torch.bool)) for row in tokens]


def _routers(backbone: Backbone) -> list[tuple[int, Any]]:
    """Each layer with its router; a manager has none."""
    routers = [(layer, experts.router) for layer, experts in backbone.expert_layers()]
    return [(layer, router) for layer, router in routers if router is not None]


def _bytes_of_row(x: Tensor, routes: Any) -> int:
    """Bytes of a row that visits a process: four times its features, and what travels beside them."""
    weights, numbers = (
        routes.weights.element_size() * routes.weights.shape[1],
        4 * (routes.experts.shape[1] + 1),
    )
    return 4 * x.shape[-1] * x.element_size() + 2 * weights + numbers


def _crossing(
    row: Sequence[Sequence[int]], nodes: Sequence[str], master: bool
) -> tuple[np.ndarray, np.ndarray]:
    """[S][E] the worker that serves each sender's rows of each expert, and [S][N] whether that is on another node."""
    senders = [(None, nodes[0])] if master else list(enumerate(nodes))
    serving = [[serving_rank(own, sender, node, nodes) for own in row] for sender, node in senders]
    away = [[node != other for other in nodes] for _, node in senders]
    return np.array(serving), np.array(away)


def _rows_crossing(experts: np.ndarray, serving: np.ndarray, away: np.ndarray) -> float:
    """Rows that leave their node, if each sender has as many of the rows; `experts` is [rows][K]."""
    total = 0.0
    for own, elsewhere in zip(serving, away, strict=True):
        total += float((_reached(own[experts], len(elsewhere)) & elsewhere).sum()) / len(serving)
    return total


def _reached(served: np.ndarray, count: int) -> np.ndarray:
    """[rows][count] whether a row is sent to each process; `served` is [rows][K], those that compute its experts."""
    reached = np.zeros((len(served), count), bool)
    np.put_along_axis(reached, served, True, axis=1)
    return reached


def _spec(batch: int, length: int) -> TaskSpec:
    return TaskSpec.model_validate(
        {
            "name": "task",
            "adapter": {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
            "data": {"path": "made-up", "max_length": length, "shuffle": False},
            "training": {"per_device_train_batch_size": batch, "learning_rate": 1e-3, "max_steps": 10**6},
        }
    )


def main() -> None:
    """Join the others and do what is asked until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    enter(os.environ["MUX_NAMESPACE"])
    torch.set_num_threads(1)
    nodes = os.environ["MUX_NODES"].split(",")
    if os.environ["MUX_MODE"] == "broker":
        parallel = initialize(device="cpu", expert_managers=len(nodes) - 1)
    else:
        parallel = initialize(device="cpu", expert_parallel=len(nodes))
    worker = Worker(parallel, nodes)
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(worker, command.pop("do"))(**command)
        answers.write(json.dumps(answer) + "\n")
    shutdown()


if __name__ == "__main__":
    main()
