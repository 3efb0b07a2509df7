"""One process, one world: backbones are loaded once and shared; every test leaves them without adapters."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megatron_mux.backbone.model import Backbone
from megatron_mux.runtime import Parallel, initialize
from tests import tiny_models
from tests.end_to_end.forked import Server
from tests.end_to_end.workplace import Workplace, furnish

BackboneOf = Callable[..., Backbone]
PathOf = Callable[[str], Path]


@pytest.fixture(scope="session", autouse=True)
def no_progress_bars() -> None:
    """transformers draws them while loading; tests look at what is printed."""
    from transformers.utils import logging

    logging.disable_progress_bar()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """The tiny models are slower on two threads than on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def parallel() -> Parallel:
    """This process alone. Not shut down here: other tests of the session may use the same world."""
    return initialize(device="cpu")


@pytest.fixture(scope="session")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> PathOf:
    """The Hugging Face directory of a tiny model by name."""
    directory = tmp_path_factory.mktemp("models")
    made: dict[str, Path] = {}

    def path(name: str) -> Path:
        if name not in made:
            made[name] = tiny_models.make(directory, name)
        return made[name]

    return path


@pytest.fixture(scope="session")
def backbone_of(parallel: Parallel, path_of: PathOf) -> BackboneOf:
    """A backbone over a tiny model by name and dtype."""
    made: dict[tuple[str, torch.dtype], Backbone] = {}

    def backbone(name: str, dtype: torch.dtype = torch.float32) -> Backbone:
        if (name, dtype) not in made:
            made[name, dtype] = Backbone.load(path_of(name), parallel, dtype)
        return made[name, dtype]

    return backbone


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Runs `pretrain_mux.py` in processes of their own."""
    with Server(tmp_path_factory.mktemp("runs")) as running:
        yield running


@pytest.fixture
def warm_workers(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that the package starts for traces and dry runs are forked from the server as well."""
    monkeypatch.setattr(sys, "executable", server.python)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A user's directory."""
    return furnish(tmp_path_factory.mktemp("workplace"))
