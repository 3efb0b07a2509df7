"""A service's server: one process with one event loop, the routes' threads, and what they share."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack

import uvicorn

from megatron_mux.directory_lock import DirectoryLock
from megatron_mux.errors import UserError
from megatron_mux.serve.api.app import create_app
from megatron_mux.serve.api.files import remove_leftovers
from megatron_mux.serve.api.http_protocol import HttpProtocol
from megatron_mux.serve.api.job_actions import revalidate, stop_checks
from megatron_mux.serve.api.uploads import remove_expired
from megatron_mux.serve.channel.hub import Hub
from megatron_mux.serve.checker.checker import Checker
from megatron_mux.serve.completions import Completions
from megatron_mux.serve.control.loop import ControlLoop
from megatron_mux.serve.control.reports import JobRecords
from megatron_mux.serve.database.store import Store, sqlite_url
from megatron_mux.serve.executor.local import LocalExecutor
from megatron_mux.serve.keys import first_key
from megatron_mux.serve.service import Service
from megatron_mux.serve.settings import Settings

_LONGEST_SOCKET = 100
"""Characters of a Unix socket's path: the kernel has room for 107."""


def serve(settings: Settings, say: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM. Instances go on; `megatron-mux serve` finds them again.

    Args:
        settings: What the operator chose.
        say: Told what happens, a line at a time.

    Raises:
        UserError: A directory or the database cannot be used, or another server uses them.
    """
    try:
        for directory in (settings.state, settings.files, settings.runs):
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UserError(f"--state {settings.state}: {error.strerror or error}") from error
    if len(str(settings.socket)) > _LONGEST_SOCKET:
        raise UserError(f"--state {settings.state}: is too long for a socket in it: choose a shorter path")
    with DirectoryLock(settings.state, say=say):
        store = Store(settings.database or sqlite_url(settings.state))
        try:
            first_key(settings, store)
            asyncio.run(_serve(settings, store, say))
        finally:
            store.close()


async def _serve(settings: Settings, store: Store, say: Callable[[str], None]) -> None:
    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        loop.call_soon_threadsafe(changed.set)

    async with AsyncExitStack() as cleanup:
        checker = Checker(settings.state)
        cleanup.push_async_callback(checker.close)
        await checker.start()
        records = JobRecords(store, settings.state)
        hub = Hub(records, wake)
        await hub.start(settings.socket)
        cleanup.push_async_callback(hub.close)
        service = Service(settings, store, checker, wake)
        cleanup.push_async_callback(stop_checks, service)
        await asyncio.to_thread(remove_leftovers, service)
        await asyncio.to_thread(remove_expired, service)
        control = ControlLoop(settings, store, hub, records, LocalExecutor(settings.state), changed, say)
        service.completions = Completions(hub, store, control.observed.want, wake)
        task = asyncio.create_task(control.run())
        cleanup.callback(task.cancel)
        await revalidate(service)
        await _answer(settings, service, task, say)


async def _answer(
    settings: Settings, service: Service, control: asyncio.Task[None], say: Callable[[str], None]
) -> None:
    """Answer requests until a signal comes, or the control loop fails."""
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(service),
            settings.host,
            settings.port,
            http=HttpProtocol,
            ws="none",
            ssl_certfile=settings.certificate,
            ssl_keyfile=settings.key,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=5,
            lifespan="off",
        )
    )
    answering = asyncio.create_task(server.serve())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: setattr(server, "should_exit", True))
    while not server.started and not answering.done():
        await asyncio.sleep(0.02)
    if not answering.done():
        port = server.servers[0].sockets[0].getsockname()[1]
        say(f"serving {', '.join(settings.backbones)} at {settings.url(port)}")
        say(f"the first key is in {settings.state / 'first-key'}")
    done, _ = await asyncio.wait([answering, control], return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    await answering
    if control in done:
        await control  # raises what ended it
