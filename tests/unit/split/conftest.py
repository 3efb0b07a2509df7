"""Certificates, an event loop for services, and what clients train on, made once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_mux.backbone.model import Backbone
from megatron_mux.split.server.body import Body
from tests import tiny_models
from tests.end_to_end.workplace import write_tokenizer
from tests.unit.split.splitting import write_data
from tests.unit.split.toy_server import Files, Loop, ToyHandler


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def loop() -> Loop:
    return Loop()


@pytest.fixture
def served(loop: Loop, files: Files) -> Iterator[tuple[int, ToyHandler]]:
    """The port and the handler of a service with TLS."""
    with loop.service(files.server()) as (service, handler):
        yield service.port, handler
        until = time.monotonic() + 5
        while service.in_flight.free < service.in_flight.most and time.monotonic() < until:
            time.sleep(0.01)  # a client has left just now
        assert service.in_flight.free == service.in_flight.most


@pytest.fixture
def body(backbone: Backbone) -> Iterator[Body]:
    """The server's body of a module's `backbone`, without sessions before and after a test."""
    body = Body(backbone, backbone.parallel)
    yield body
    for name in list(body.adapters.tasks):
        body.remove(name)


@pytest.fixture(scope="session")
def whole_backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny backbone with a tokenizer."""
    path = tiny_models.make(tmp_path_factory.mktemp("backbone"), "llama")
    write_tokenizer(path)
    return path


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files of `write_data`."""
    directory = tmp_path_factory.mktemp("data")
    write_data(directory)
    return directory
