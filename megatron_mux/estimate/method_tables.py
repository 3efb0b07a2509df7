"""The memory of a task file's tasks for a ranking of methods: tables, made where no file has them."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from queue import SimpleQueue
from threading import Event
from typing import Literal

import numpy as np

from megatron_mux.choice.engine_step import TaskMemory
from megatron_mux.choice.task_file import TaskFile
from megatron_mux.dry_run.process import dry_runs, end_worker, kept_worker, prepare
from megatron_mux.dry_run.run_spec import RunSpec
from megatron_mux.errors import UserError
from megatron_mux.estimate.solve import NotLinear
from megatron_mux.estimate.tables import Tables
from megatron_mux.footprint.memory import Memory
from megatron_mux.footprint.signature import Signature
from megatron_mux.fusion.plan import Plan
from megatron_mux.fusion.planner.load import persistent_share, signature_of
from megatron_mux.fusion.planner.step_memory import is_short
from megatron_mux.gpus import Gpu
from megatron_mux.memory.forms.method import ParallelConfig
from megatron_mux.memory.forms.stages import stages
from megatron_mux.memory.worker import WorkerError

_AT_ONCE = 2
"""Processes for dry runs, each of which runs up to four ranks."""


@contextmanager
def importing() -> Iterator[None]:
    """Context in which a process imports what dry runs need, while the caller reads the question. After an exception it
    ends at once.
    """
    prepare(kept_worker())
    try:
        yield
    except BaseException:
        end_worker()
        raise


class MethodTables:
    """Makes or reads the tables of methods for a task file.

    Args:
        say: Told before tables are made, which takes seconds.
        device: `cuda`, or `cpu` for processes that compute there.
    """

    def __init__(
        self,
        file: TaskFile,
        precision: Literal["bf16", "fp32"],
        gpu: Gpu,
        say: Callable[[str], None] = lambda text: None,
        device: Literal["cuda", "cpu"] = "cuda",
    ) -> None:
        self._file, self._gpu, self._device = file, gpu, device
        self._dtype: Literal["bfloat16", "float32"] = "bfloat16" if precision == "bf16" else "float32"
        self._say = say
        self._known: dict[ParallelConfig, TaskMemory | UserError] = {}
        self._short = all(is_short(task.length, task.virtual_tokens) for task in file.adapters)

    def prepare(
        self, methods: Sequence[ParallelConfig], known: Callable[[ParallelConfig], None] = lambda method: None
    ) -> None:
        """See `choice.engine_step.Tables`; it makes several at a time."""
        together = defaultdict(list)
        for method in methods:
            # Stages of pipelines of several depths share tables, and so do stages of several pipelines.
            about = method.tensor, method.sequence_parallel, method.recompute, method.expert
            together[about].append(method)
        for group in together.values():
            group.sort(key=lambda method: method.pipeline)  # those that share most
        count = max(1, min(_AT_ONCE, len(os.sched_getaffinity(0))))
        free, stopped, done = (
            SimpleQueue[int](),
            Event(),
            SimpleQueue[ParallelConfig | BaseException | None](),
        )
        waiting = range(1, count)  # one process gives the first answer sooner if no other starts
        free.put(0)

        def make(methods: Sequence[ParallelConfig]) -> None:
            number = free.get()
            try:
                for method in methods:
                    if not stopped.is_set():
                        self._of(method, number)
                        done.put(method)
            except BaseException as error:
                done.put(error)
            else:
                done.put(None)
            finally:
                free.put(number)

        pool = ThreadPoolExecutor(count)
        try:
            for group in together.values():
                pool.submit(make, group)
            for _ in together:
                while (ready := done.get()) is not None:
                    if isinstance(ready, BaseException):
                        raise ready
                    for number in waiting:
                        free.put(number)
                    waiting = range(0)
                    known(ready)
        except BaseException:  # such as Ctrl-C
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            end_worker()
            raise
        finally:
            pool.shutdown()

    def __call__(self, method: ParallelConfig) -> TaskMemory:
        """What tables say of a method.

        Raises:
            UserError: They cannot be made.
        """
        tables = self._of(method, 0)
        if isinstance(tables, UserError):
            raise tables
        return tables

    def _of(self, method: ParallelConfig, worker: int) -> TaskMemory | UserError:
        """The same, or why they cannot be made; with dry runs in one of several processes."""
        if method not in self._known:
            try:
                memories = self._from_resident(method, worker) or self._directly(method, worker)
                self._known[method] = TaskMemory(memories, self._columns, self._counts)
            except (NotLinear, WorkerError, UserError) as error:
                self._known[method] = UserError(f"its memory cannot be predicted: {error}")
        return self._known[method]

    def _from_resident(self, method: ParallelConfig, worker: int) -> list[Memory]:
        """From tables of resident weights, if the method keeps its weights elsewhere; else nothing, nor for quantised
        weights, of which only those in use are in the backbone's dtype.
        """
        if not (method.offload or method.zero == 3) or self._file.shape.quantisation:
            return []
        resident = replace(method, offload=False, zero=0)
        in_use = [
            stage.in_use(self._run(resident).itemsize, on_gpu=self._device == "cuda")
            for stage in stages(self._file.architecture, resident)
        ]
        # On a CPU its memory is what is counted.
        share = 0.0 if method.offload and self._device == "cuda" else 1 / (method.data if method.zero else 1)
        recomputed = method.recompute == "full"
        return [table.elsewhere(share, in_use, recomputed) for table in self._directly(resident, worker)]

    def _directly(self, method: ParallelConfig, worker: int) -> list[Memory]:
        architecture, run = self._file.architecture, self._run(method)
        runs = partial(dry_runs, whole=True, worker=kept_worker(worker))

        def say(_: str) -> None:
            self._say(f"dry runs for {method.title}: seconds, and kept for later")

        differ = architecture.placement is not None or architecture.access is not None
        return [
            Tables(run, None, runs, say, self._short, rank, chunks=False).memory(self._signatures)
            for rank in range(method.expert if differ else 1)
        ]

    @cached_property
    def _each(self) -> list[Signature]:
        return [signature_of(spec, self._file.shape) for spec in self._file.specs]

    @cached_property
    def _signatures(self) -> list[Signature]:
        return sorted(set(self._each))

    @cached_property
    def _columns(self) -> list[int]:
        return [self._signatures.index(s) for s in self._each]

    @cached_property
    def _counts(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        counts = np.zeros(len(self._signatures))
        for spec, signature, column in zip(self._file.specs, self._each, self._columns, strict=True):
            counts[column] += persistent_share(spec, self._file.shape, signature)
        return counts

    def _run(self, method: ParallelConfig) -> RunSpec:
        file = self._file
        return RunSpec(
            file.shape.config,
            (),
            Plan("auto", method.pipeline, (), tensor=method.tensor, data=method.data),
            method.tensor,
            method.sequence_parallel,
            self._dtype,
            method.recompute,
            method.residence,
            self._device,
            self._gpu,
            expert=method.expert,
            expert_tensor=method.tensor if file.shape.experts is not None else 1,
            placement=file.architecture.placement,
            access=file.architecture.access,
            quantise=file.quantise,
        )
