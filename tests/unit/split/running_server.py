"""A real server of split fine-tuning, in a thread of the test's process, without TLS."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_mux.backbone.model import Backbone
from megatron_mux.dry_run.process import prepare
from megatron_mux.runtime import Parallel
from megatron_mux.split.server.body import Body
from megatron_mux.split.server.dispatcher import Dispatcher
from megatron_mux.split.server.metrics import Metrics
from megatron_mux.split.server.scheduler import Scheduler, SchedulerOptions
from megatron_mux.split.server.service import Service
from megatron_mux.split.server.serving import ServingOptions, SplitServer
from megatron_mux.split.server.session_prediction import SessionPredictor, prediction_worker
from megatron_mux.split.server.store import SessionStore

_PREDICTORS: dict[object, SessionPredictor] = {}


class RunningServer:
    """A server that tests can look into; `address` is where it listens, `more` are services beside, which it stops."""

    def __init__(self, backbone: Backbone, parallel: Parallel, store: Path, **options: Any) -> None:
        self.backbone = backbone
        self.parallel = parallel
        self.store = SessionStore(store)
        self.capacity = options.pop("capacity", 1 << 30)
        self.together = options.pop("together", 0)
        self.fingerprint = options.pop("fingerprint", "fingerprint")
        self.options = options
        self.more: list[Service] = []
        self.port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        prepare(prediction_worker()).result(120)  # clients of tests wait for seconds only
        started = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._run(started)), daemon=True)
        self.thread.start()
        assert started.wait(30)

    async def _run(self, started: threading.Event) -> None:
        self.loop, self.stopping = asyncio.get_running_loop(), asyncio.Event()
        self.body = Body(self.backbone, self.parallel)
        dispatcher = Dispatcher(Scheduler(self.capacity, SchedulerOptions()), self.together)
        options = ServingOptions(self.fingerprint, self.backbone.layers, **self.options)
        log = logging.getLogger("split server in a test")
        self.server = SplitServer(self.body, dispatcher, self.store, options, Metrics(), log)
        # What a body takes is predicted once for all tests, not by each of their servers.
        info = self.backbone.info
        body = info.path, info.fingerprint, self.backbone.dtype, self.backbone.layers
        self.server._predict = _PREDICTORS.setdefault(body, self.server._predict)
        service = Service(self.server, self.address, None)
        await service.start()
        self.port = service.port
        started.set()
        await self.stopping.wait()
        for one in (service, *self.more):
            await one.stop(0)
        dispatcher.close()

    def stop(self) -> None:
        """Stop at once: nothing is saved, as if the process had been killed."""
        self.loop.call_soon_threadsafe(self.stopping.set)
        self.thread.join(30)

    def restart(self) -> None:
        """Stop at once and start again at the same port, with what was saved durably."""
        self.stop()
        self.start()


@contextmanager
def running_server(
    backbone: Backbone, parallel: Parallel, store: Path, **options: Any
) -> Iterator[RunningServer]:
    server = RunningServer(backbone, parallel, store, **options)
    server.start()
    try:
        yield server
    finally:
        server.stop()
