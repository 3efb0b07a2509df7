"""The body and a client's ends compute what the whole backbone does, for many sessions over one set of parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_mux import runtime
from megatron_mux.adapters.adapter import TaskAdapter
from megatron_mux.adapters.attach import AdapterSet
from megatron_mux.adapters.host import Host
from megatron_mux.adapters.registry import KINDS
from megatron_mux.backbone.model import Backbone
from megatron_mux.batch.micro_batch import MicroBatch, activate
from megatron_mux.batch.pack import PackedSequence, pack
from megatron_mux.engine.optimize import TaskOptimizer
from megatron_mux.runtime import Parallel
from megatron_mux.split.server.body import Body, Rows, unique_bytes
from megatron_mux.tasks import TrainingSpec
from tests import tiny_models

LAYERS, STEPS = 6, 5
TRAINING = TrainingSpec(learning_rate=0.02, max_steps=STEPS, max_grad_norm=0.5, weight_decay=0.1, seed=3)
SECTIONS: dict[str, dict[str, Any]] = {
    "lora": {"peft_type": "LORA", "r": 4, "lora_dropout": 0.2, "target_modules": "all-linear"},
    "prefix": {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 3},
    "bottleneck": {"peft_type": "BOTTLENECK", "bottleneck_size": 5},
    "ia3": {"peft_type": "IA3"},
    "diff": {"peft_type": "DIFF_PRUNING", "l0_weight": 0.01},
    "vera": {"peft_type": "VERA", "r": 8},
    "loha": {"peft_type": "LOHA", "r": 3},
}
CUTS = {
    "lora": (1, 1),
    "prefix": (1, 0),
    "bottleneck": (2, 1),
    "ia3": (3, 2),
    "diff": (1, 1),
    "vera": (1, 1),
    "loha": (2, 1),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make(tmp_path_factory.mktemp("backbone"), "llama-biases", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def parallel() -> Iterator[Parallel]:
    yield runtime.initialize(device="cpu")


@pytest.fixture(scope="module")
def server(path: Path, parallel: Parallel) -> Backbone:
    return Backbone.load(path, parallel, torch.float64, split=(1, LAYERS - 1, 0), stage=1, ends=False)


@pytest.fixture
def body(server: Backbone, parallel: Parallel) -> Iterator[Body]:
    """A body that is as it was before when the test is over."""
    body = Body(server, parallel)
    yield body
    for name in list(body.adapters.tasks):
        body.remove(name)
    assert not any("forward" in vars(op.info.module) for op in body.adapters.ops)


def batch_of(name: str, step: int, slot: int = 0) -> MicroBatch:
    """A micro-batch of a task's step: two sequences, of which the second halves are labelled."""
    rng = np.random.default_rng([len(name), step])
    sequences = []
    for number, length in enumerate((5 + step, 7)):
        tokens = rng.integers(1, 60, length)
        sequences.append(PackedSequence(name, number, tokens, np.arange(length) > length // 2, 0.1))
    offset = {name: SECTIONS[name].get("num_virtual_tokens", 0)}
    return pack(sequences, (name,), {name: step}, offset, slots={name: slot}).to("cpu")


def task_of(name: str) -> Any:
    section = KINDS[SECTIONS[name]["peft_type"]].model_validate(SECTIONS[name])
    return SimpleNamespace(name=name, adapter=section, training=TRAINING)


@dataclass(frozen=True)
class Trained:
    """What training on the whole backbone has come to: losses, and trained tensors by key."""

    losses: list[float]
    values: dict[str, Tensor]


@pytest.fixture(scope="module")
def wholes(path: Path, parallel: Parallel) -> dict[str, Trained]:
    """Every task after three steps on the whole backbone, driven by hand."""
    backbone = Backbone.load(path, parallel, torch.float64)
    adapters = AdapterSet(Host(backbone.base_ops(), parallel, backbone.dtype, backbone.shape))
    found = {}
    for name in SECTIONS:
        adapter = adapters.add(task_of(name), STEPS)
        optimizer, losses = TaskOptimizer(adapter, TRAINING, STEPS), []
        for step in range(3):
            batch = batch_of(name, step)
            with activate(batch):
                loss, _ = backbone.loss(backbone.forward(batch, labelled_only=True), batch)
                loss.backward()
            losses.append(float(loss.detach()))
            adapter.penalty(step)
            optimizer.clip(torch.stack([own.square().sum() for own in optimizer.owned]).sum().sqrt())
            take_step(adapter, optimizer, step)
        found[name] = Trained(losses, {p.key: p.value.detach().clone() for p in adapter.parameters})
        adapters.remove(name)
    return found


def take_step(adapter: TaskAdapter, optimizer: TaskOptimizer, step: int) -> None:
    optimizer.step(step, torch.zeros(()))
    if adapter.spec.acts_in_steps:
        adapter.after_step(step + 1)
        adapter.flat_params.refresh()


@dataclass(frozen=True)
class Ends:
    """Front and back of a cut, with the adapters of all clients that cut there."""

    front: Backbone
    back: Backbone
    adapters: AdapterSet


@pytest.fixture(scope="module")
def ends(path: Path) -> dict[tuple[int, int], Ends]:
    alone, found = Parallel.alone("cpu"), {}
    for front, back in set(CUTS.values()):
        split = (front, LAYERS - front - back, back)
        first, last = (Backbone.load(path, alone, torch.float64, split=split, stage=i) for i in (0, 2))
        ops = [*first.base_ops(), *last.base_ops()]
        found[front, back] = Ends(first, last, AdapterSet(Host(ops, alone, torch.float64, first.shape)))
    return found


@dataclass
class Client:
    """A client's ends, on a body."""

    name: str
    body: Body
    ends: Ends
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.layers = range(self.ends.front.layers.stop, self.ends.back.layers.start)
        task = task_of(self.name)
        self.adapter = self.ends.adapters.add(task, STEPS)
        self.optimizer = TaskOptimizer(self.adapter, TRAINING, STEPS)
        self.body.add(self.name, task.adapter, TRAINING, self.layers, STEPS)

    def rows(self, step: int) -> Rows:
        self.batch = batch_of(self.name, step, self.adapter.slot)
        with activate(self.batch):
            self.hidden = self.ends.front.forward(self.batch)
        lengths = tuple(segment.length for segment in self.batch.segments)
        hidden = self.hidden.detach().squeeze(1)
        return Rows(self.name, lengths, (0, 1), step, True, hidden, self.hidden.requires_grad)

    def loss(self, output: Tensor) -> Tensor:
        self.output = output.unsqueeze(1).requires_grad_()
        with activate(self.batch):
            made = self.ends.back.forward(self.batch, self.output, labelled_only=True)
            loss, _ = self.ends.back.loss(made, self.batch)
            loss.backward()
        self.losses.append(float(loss.detach()))
        assert self.output.grad is not None
        return self.output.grad.squeeze(1)

    def finish(self, step: int, gradient: Tensor | None) -> None:
        if gradient is not None:
            with activate(self.batch):
                self.hidden.backward(gradient.unsqueeze(1))
        self.adapter.penalty(step)
        squares = [g.square().sum() for g in self.optimizer.owned]
        norm = (sum(map(float, squares)) + self.body.squared_norm(self.name, step)) ** 0.5
        self.optimizer.clip(torch.tensor(norm, dtype=torch.float64))
        take_step(self.adapter, self.optimizer, step)
        self.body.update(self.name, step, norm, skip=False)

    def values(self) -> dict[str, Tensor]:
        """Trained tensors of both ends: of those that all layers share, either's columns."""
        state = self.body.state(self.name)
        fixed = {record.key for record in self.adapter.fixed}
        theirs = {p.key: p for p in state if p.kind == "value" and p.key not in fixed}
        found = {}
        for p in self.adapter.parameters:
            found[p.key] = p.value.detach()
            if p.dim is not None and p.key in theirs:  # the prefix: columns of both
                other = theirs.pop(p.key)
                whole = torch.zeros(p.full_shape, dtype=torch.float64)
                assert p.index is not None and other.index is not None
                found[p.key] = whole.index_copy(1, p.index, p.value.detach()).index_copy(
                    1, other.index, other.tensor
                )
        return found | {key: piece.tensor for key, piece in theirs.items() if key not in found}


@pytest.fixture
def clients(body: Body, ends: dict[tuple[int, int], Ends]) -> Iterator[list[Client]]:
    made = [Client(name, body, ends[cut]) for name, cut in CUTS.items()]
    yield made
    for client in made:
        client.ends.adapters.remove(client.name)


def train(clients: Sequence[Client], body: Body, steps: int, together: bool, keep: bool = False) -> None:
    """Steps of all clients: each by itself, or requests with equal layers as one micro-batch."""
    for step in range(steps):
        rows = {client.name: client.rows(step) for client in clients}
        groups = [[client] for client in clients]
        if together:
            layers = dict.fromkeys(client.layers for client in clients)
            groups = [[client for client in clients if client.layers == one] for one in layers]
        for group in groups:
            own = [rows[client.name] for client in group]
            outputs, kept = body.forward(own, group[0].layers, graph=keep)
            gradients = [client.loss(output) for client, output in zip(group, outputs, strict=True)]
            if kept is None:
                _, kept = body.forward(own, group[0].layers, graph=True)
            assert kept is not None
            for client, gradient in zip(group, body.backward(kept, gradients), strict=True):
                client.finish(step, gradient)


@pytest.mark.parametrize(("together", "keep"), [(False, False), (True, False), (False, True)])
def test_split_training_equals_that_of_the_whole(
    clients: list[Client], body: Body, wholes: dict[str, Trained], together: bool, keep: bool
) -> None:
    train(clients, body, 3, together, keep)
    for client in clients:
        wanted, found = wholes[client.name], client.values()
        assert client.losses == pytest.approx(wanted.losses, rel=1e-11)
        assert wanted.values.keys() == found.keys()
        for key, value in wanted.values.items():
            torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-10, msg=f"{client.name} {key}")


def test_all_sessions_share_one_storage_of_the_parameters(body: Body, server: Backbone) -> None:
    before = {p.untyped_storage().data_ptr() for p in server.model.parameters()}
    shared = body.shared_bytes
    for name in SECTIONS:
        front, back = CUTS[name]
        body.add(name, task_of(name).adapter, TRAINING, range(front, LAYERS - back), STEPS)
    modules: list[Any] = [op.info.module for op in body.adapters.ops]
    used = {module.weight.untyped_storage().data_ptr() for module in modules}
    assert used <= before == {p.untyped_storage().data_ptr() for p in server.model.parameters()}
    assert body.shared_bytes == shared
    tensors = [*server.model.parameters()]
    for name in SECTIONS:
        member = body._members[name]
        flat_params = member.adapter.flat_params
        tensors += [flat_params.values, flat_params.gradients, *member.optimizer.tensors]
        tensors += [record.value for record in member.adapter.fixed]
    assert unique_bytes(tensors) == shared + sum(map(body.bytes_of, SECTIONS)), (
        "nothing is held twice, nothing else"
    )


@pytest.mark.parametrize("kind", ["lora", "prefix"])
@pytest.mark.parametrize("value", [1e308, -1e200, 0.0])
def test_a_session_computed_together_with_an_absurd_one_is_as_it_would_be_alone(
    server: Backbone, parallel: Parallel, kind: str, value: float
) -> None:
    """Values that overflow stay within the rows of their own session."""
    body, layers = Body(server, parallel), range(1, LAYERS - 1)
    section = task_of(kind).adapter
    for name in ("victim", "absurd"):
        body.add(name, section, TRAINING, layers, STEPS)
    random = torch.Generator().manual_seed(1)
    hidden, gradient = (
        torch.randn(12, server.shape.hidden, dtype=torch.float64, generator=random) for _ in range(2)
    )
    rows = {
        "victim": Rows("victim", (5, 7), (0, 1), 0, True, hidden, True),
        "absurd": Rows("absurd", (5, 7), (0, 1), 0, True, torch.full_like(hidden, value), True),
    }
    found = []
    for names in (["victim"], ["absurd", "victim"]):
        outputs, kept = body.forward([rows[name] for name in names], layers, graph=True)
        assert kept is not None
        gradients = [gradient if name == "victim" else torch.full_like(gradient, 1e308) for name in names]
        made = body.backward(kept, gradients)[-1]
        assert made is not None
        found.append((outputs[-1], made, torch.tensor(body.squared_norm("victim", 0))))
        for name in names:
            body.zero(name)
    for name in ("victim", "absurd"):
        body.remove(name)
    for alone, together in zip(*found, strict=True):
        torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-12)
