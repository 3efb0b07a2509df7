"""Certificates and an event loop for services, made once."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

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
