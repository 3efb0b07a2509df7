"""Running the server: the body is read, the service started, and everything ended in order."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import psutil
import torch
from rich.live import Live

from megatron_mux import runtime
from megatron_mux.arguments.model import in_bf16
from megatron_mux.backbone.model import Backbone
from megatron_mux.backbone.registry import read_backbone_info, stored_dtype
from megatron_mux.backbone.split import even_split
from megatron_mux.console import make_console
from megatron_mux.directory_lock import DirectoryLock
from megatron_mux.dry_run.process import end_worker, prepare
from megatron_mux.errors import UserError
from megatron_mux.runtime import Parallel
from megatron_mux.split.server.body import Body
from megatron_mux.split.server.co_batching import measure_co_batching
from megatron_mux.split.server.dispatcher import Dispatcher
from megatron_mux.split.server.live import sessions_table
from megatron_mux.split.server.metrics import Metrics, make_logger
from megatron_mux.split.server.ranks import IDLE_MINUTES, LeadingBody, StagedBody, follow, watched
from megatron_mux.split.server.scheduler import Scheduler, SchedulerOptions
from megatron_mux.split.server.service import SHARE, ServerTls, Service
from megatron_mux.split.server.serving import ServingOptions, SplitServer
from megatron_mux.split.server.session_prediction import prediction_worker
from megatron_mux.split.server.store import SessionStore

_MIB = 1 << 20


def run(arguments: argparse.Namespace, program: str) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        UserError: The input is wrong, or another server writes into `--save`.
    """
    if os.environ.get("RANK", "0") != "0":
        _run(arguments, program)
        return
    with DirectoryLock(
        arguments.save, break_lock=arguments.break_lock, say=partial(print, flush=True)
    ) as lock:
        lock.record(backbone=str(arguments.backbone.resolve()))
        try:
            _run(arguments, program, lock.check)
        finally:
            end_worker()  # nobody waits for a prediction any more


def _run(arguments: argparse.Namespace, program: str, check: Callable[[], None] = lambda: None) -> None:
    """`run`; `check` raises if rank 0 has lost the lock on `--save`."""
    info = read_backbone_info(arguments.backbone)
    info.shape.refuse("The split server", "quantisation")
    front, back = arguments.least_cut_front, arguments.least_cut_back
    layers = range(front, info.shape.layers - back)
    if not layers:
        raise UserError(
            f"--least-cut-front {front} and --least-cut-back {back} leave no layer of {info.shape.layers}"
        )
    tensor, pipeline = arguments.tensor_model_parallel_size, arguments.pipeline_model_parallel_size
    info.check_parallel(tensor, pipeline)
    parallel = runtime.initialize(tensor, pipeline, timeout_minutes=IDLE_MINUTES)
    if parallel.dp_size > 1:
        needed = f"torchrun --nproc-per-node {tensor * pipeline}"
        raise UserError(
            f"{parallel.world_size} processes were started for a body on {tensor * pipeline}: use {needed}"
        )
    with watched(parallel, program) as parallel:
        if not parallel.rank:
            prepare(prediction_worker())
        backbone = _load(arguments, parallel, layers, info.shape.layers)
        kind = Body if parallel.world_size == 1 else StagedBody if parallel.rank else LeadingBody
        body = kind(backbone, parallel)
        weights = int(parallel.most([body.shared_bytes])[0])
        if isinstance(body, StagedBody) and parallel.rank:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)  # rank 0 says when to stop
            follow(body)
        else:
            store = SessionStore(arguments.save, arguments.max_runs_each, check)
            capacity = _capacity(arguments.memory_limit, parallel, weights)
            together = measure_co_batching(body, layers) if arguments.co_batching else 0
            parallel.heartbeat.at("serving", long=True)
            asyncio.run(_serve(arguments, body, store, info.fingerprint, layers, capacity, together))
            if isinstance(body, LeadingBody):
                body.stop()
    runtime.shutdown()


def _load(arguments: argparse.Namespace, parallel: Parallel, layers: range, count: int) -> Backbone:
    on_gpu = parallel.device.type == "cuda" and runtime.has_bf16(parallel.device)
    bf16 = in_bf16(True if arguments.bf16 else None, stored_dtype(arguments.backbone), on_gpu)
    return Backbone.load(
        arguments.backbone,
        parallel,
        torch.bfloat16 if bf16 else torch.float32,
        split=(layers.start, *even_split(len(layers), parallel.pp_size), count - layers.stop),
        stage=1 + parallel.pp_rank,
        ends=False,
    )


def _capacity(limit: int | None, parallel: Parallel, weights: int) -> int:
    """Bytes for adapters and requests on each rank: the limit less the weights of the one that has the most.

    Raises:
        UserError: The weights alone are more.
    """
    if limit is None:
        memory = runtime.device_memory(parallel.device)
        free = psutil.virtual_memory().available * 8 // 10 // parallel.world_size
        limit = memory * 9 // 10 if memory is not None else free + weights
    if limit <= weights:
        raise UserError(
            f"--memory-limit {limit / _MIB:.0f} MiB: the weights of the body alone take {weights / _MIB:.0f} MiB"
        )
    return limit - weights


def _scheduler_options(arguments: argparse.Namespace) -> SchedulerOptions:
    if arguments.ageing and arguments.weights is None:
        raise UserError(
            "--ageing needs --weights: without shares the queue is in the order of arrival already"
        )
    weights = None  # without shares, the order of arrival
    try:
        if arguments.weights is not None:
            read = json.loads(Path(arguments.weights).read_text())
            weights = {str(name): float(share) for name, share in read.items()}
        return SchedulerOptions(
            easy=arguments.reservations == "easy",
            ageing=arguments.ageing,
            weights=weights,
            rate=arguments.rate_limit,
        )
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UserError(
            f"--weights must be a JSON file with an object of names and shares above 0, --rate-limit above 0 and "
            f"--ageing at least 0: {error}"
        ) from None


async def _serve(
    arguments: argparse.Namespace,
    body: Body,
    store: SessionStore,
    fingerprint: str,
    layers: range,
    capacity: int,
    together: int,
) -> None:
    log, metrics = make_logger(arguments.log_format), Metrics()
    scheduler = Scheduler(capacity, _scheduler_options(arguments))
    synchronize = partial(runtime.finish, body.parallel.device)
    dispatcher = Dispatcher(scheduler, together, metrics.decision.observe, synchronize)
    options = ServingOptions(
        fingerprint,
        layers,
        arguments.policy,
        host_rate=float(arguments.swap_rate) if body.parallel.device.type == "cuda" else 0.0,
        returns_body=not arguments.keep_body,
        idle_s=arguments.idle_seconds,
        most_sessions=arguments.max_sessions,
        most_sessions_each=arguments.max_sessions_each,
        most_memory_each=arguments.max_memory_each,
        most_norm=arguments.max_norm,
        most_message=arguments.max_bytes_in_flight // SHARE,
    )
    server = SplitServer(body, dispatcher, store, options, metrics, log)
    tls = ServerTls(arguments.tls_cert, arguments.tls_key, arguments.client_ca, arguments.client_crl)
    streams = 2 * arguments.max_sessions_each
    service = Service(server, arguments.listen, tls, arguments.max_bytes_in_flight, streams)
    metrics.memory.labels("weights").set(body.shared_bytes)
    metrics.memory.labels("capacity").set(capacity)
    metrics.memory.labels("reserved").set_function(lambda: capacity - scheduler.free)
    metrics.memory.labels("resident").set_function(lambda: psutil.Process().memory_info().rss)
    metrics.queued.set_function(lambda: dispatcher.queued)
    if arguments.metrics is not None:
        metrics.serve(arguments.metrics)
    await service.start()
    fields = {
        "listen": f"{arguments.listen.rpartition(':')[0]}:{service.port}",
        "layers": f"{layers.start} to {layers.stop - 1}",
        "weights_mib": body.shared_bytes // _MIB,
        "capacity_mib": capacity // _MIB,
        "policy": arguments.policy,
        "computed_together_rows": together,
        "states": str(arguments.save.resolve()),
    }
    log.info("serving", extra={"fields": fields})
    async with _shown(server, not arguments.no_progress):
        await _stopped()
    log.info("draining", extra={"fields": {"sessions": len(server.sessions)}})
    await server.drain(arguments.grace_seconds)
    await service.stop(1.0)
    dispatcher.close()


async def _stopped() -> None:
    """Return at SIGTERM or SIGINT; a second one ends the process at once."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)


@asynccontextmanager
async def _shown(server: SplitServer, wanted: bool) -> AsyncIterator[None]:
    """Context with the live table, where the output is a terminal."""
    console = make_console()
    if not (wanted and console.is_terminal):
        yield
        return

    async def refresh(live: Live) -> None:
        while True:
            live.update(
                sessions_table(server.metrics, server.dispatcher.scheduler, server.dispatcher.queued),
                refresh=True,
            )
            await asyncio.sleep(0.5)

    with Live(console=console, auto_refresh=False) as live:
        task = asyncio.ensure_future(refresh(live))
        try:
            yield
        finally:
            task.cancel()
