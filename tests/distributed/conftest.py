"""Tests that need several processes: `torchrun --nproc-per-node 4 -m pytest tests/distributed` (two: with 2).

The world is joined once; `joined(tp, pp)` divides it anew where a test asks for other sizes (ranks left over become
data parallel). Without torchrun these tests are skipped.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux import runtime
from megatron_mux.batch.packed_batch import PackedBatch, activate
from megatron_mux.runtime import Parallel
from tests import gloo, tiny_models

WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        wanted = 2 if here / "two" in item.path.parents else 4
        if here in item.path.parents and wanted != WORLD_SIZE:
            item.add_marker(pytest.mark.skip(reason=f"needs torchrun --nproc-per-node {wanted}"))


def pytest_exception_interact(call: pytest.CallInfo[object]) -> None:
    """Print a failure at once: the others wait for this rank until their time is up, and then end it unheard."""
    if WORLD_SIZE > 1 and call.excinfo is not None:
        os.write(2, f"--- rank {os.environ['RANK']} fails:\n{call.excinfo.getrepr()}\n".encode())


def assert_no_problems(problems: list[str]) -> None:
    """Fail on every rank if there are problems on any: the others would wait for a rank that gave up."""
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, problems)
    assert not any(everyone), "\n".join(problem for rank in everyone for problem in rank[:20])


def _state(parallel_state: Any) -> dict[str, Any]:
    """What Megatron-Core knows of its groups."""
    return {
        name: value
        for name, value in vars(parallel_state).items()
        if re.fullmatch("_[A-Z_]+|_global_process_group_list", name)
    }


@pytest.fixture(scope="session")
def joined() -> Iterator[Callable[..., Parallel]]:
    """Divide the world: `joined(tp, pp, sequence_parallel=False, expert=1, expert_tensor=1, managers=0)`.

    A division's groups are kept for the next test that asks for it.
    """
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    gloo.share_connections()
    nothing = _state(parallel_state)
    made: dict[Any, tuple[Parallel, dict[str, Any]]] = {}
    leave = False

    def divide(
        tp: int,
        pp: int,
        sequence_parallel: bool = False,
        expert: int = 1,
        expert_tensor: int = 1,
        managers: int = 0,
    ) -> Parallel:
        nonlocal leave
        key = (tp, pp, sequence_parallel, expert, expert_tensor, managers)
        sizes: dict[str, Any] = {
            "expert_parallel": expert,
            "expert_tensor_parallel": expert_tensor,
            "expert_managers": managers,
        }
        if leave:
            # Divisions of experts are many, each with groups of its own beside Megatron-Core's: they are not kept.
            runtime._leave_groups(parallel_state)
            leave = False
        if key in made:
            runtime._current, groups = made[key]
            vars(parallel_state).update(groups)
            return runtime.initialize(tp, pp, sequence_parallel, **sizes)  # seeds the generators
        runtime._current = None
        vars(parallel_state).update(nothing)  # or the other groups would be destroyed
        parallel = runtime.initialize(tp, pp, sequence_parallel, **sizes)
        leave = expert * expert_tensor > 1 or managers > 0
        if not leave:
            made[key] = parallel, _state(parallel_state)
        return parallel

    yield divide
    runtime.shutdown()


@pytest.fixture(scope="session")
def shared_dir(joined: Callable[..., Parallel]) -> Iterator[Path]:
    """A directory that all ranks see, gone at the end."""
    joined(1, 1)
    with tempfile.TemporaryDirectory() as own:
        name = [own]
        dist.broadcast_object_list(name, src=0)
        yield Path(name[0])
        dist.barrier()


@pytest.fixture(scope="session")
def once(shared_dir: Path) -> Callable[[str, Callable[[Path], Any]], Path]:
    """`once(name, make)` lets rank 0 call `make(directory)` once and gives all ranks the directory."""
    done: dict[str, Path] = {}

    def run(name: str, make: Callable[[Path], Any]) -> Path:
        if name not in done:
            done[name] = shared_dir / name
            if dist.get_rank() == 0:
                done[name].mkdir()
                make(done[name])
            dist.barrier()
        return done[name]

    return run


@pytest.fixture(scope="session")
def model_of(once: Callable[[str, Callable[[Path], Any]], Path]) -> Callable[[str], Path]:
    """The directory of a tiny model by its name in `tiny_models`, made once."""
    return lambda name: once(f"model-{name}", lambda directory: tiny_models.make(directory, name)) / name


class Stages:
    """A pipeline without a schedule: one micro-batch forward, then backward, by blocking send and receive."""

    def __init__(self, backbone: Any, batch: PackedBatch) -> None:
        self.backbone, self.batch, self.parallel = backbone, batch, backbone.parallel
        self.received: Tensor | None = None
        self.output: Tensor | None = None

    def forward(self, first: Tensor | None = None) -> Tensor:
        """Returns this stage's output; `first` replaces the embedding on the first stage."""
        self.received = first
        if not self.parallel.is_first_stage:
            shape = self.backbone.hidden_shape(self.batch)
            self.received = torch.empty(shape, dtype=self.backbone.dtype)
            dist.recv(self.received, group=self.parallel.pp_group, group_src=self.parallel.pp_rank - 1)
            self.received.requires_grad_(torch.is_grad_enabled())
        with activate(self.batch):
            self.output = self.backbone.forward(self.batch, self.received)
        if not self.parallel.is_last_stage:
            dist.send(self.output.detach(), group=self.parallel.pp_group, group_dst=self.parallel.pp_rank + 1)
        return self.output

    def backward(self, loss: Tensor | None) -> Tensor | None:
        """Returns the gradient of what the stage received."""
        assert self.output is not None
        with activate(self.batch):
            if self.parallel.is_last_stage:
                assert loss is not None
                loss.backward()
            else:
                given = torch.empty_like(self.output)
                dist.recv(given, group=self.parallel.pp_group, group_src=self.parallel.pp_rank + 1)
                self.output.backward(given)
        gradient = None if self.received is None else self.received.grad
        if not self.parallel.is_first_stage:
            assert gradient is not None
            dist.send(gradient, group=self.parallel.pp_group, group_dst=self.parallel.pp_rank - 1)
        return gradient


@pytest.fixture(scope="session")
def stages() -> type[Stages]:
    """See `Stages`."""
    return Stages
