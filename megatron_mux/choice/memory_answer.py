"""The answer of `megatron-mux estimate`: a ranking of methods, a traced step or both; JSON, table, picture."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_mux.errors import UserError
from megatron_mux.memory.plot import closed, draw, traced
from megatron_mux.memory.question import OFFLOAD, Question
from megatron_mux.memory.sizes import GIB, show_size
from megatron_mux.memory.traced_estimate import TracedEstimate, traced_estimate

if TYPE_CHECKING:
    from rich.console import Console

    from megatron_mux.choice.engine_step import Tables
    from megatron_mux.choice.fit import Fit
    from megatron_mux.choice.ranking import Ranking, Told
    from megatron_mux.choice.task_file import TaskFile

_DRAWN = 6
"""Methods in a picture."""
_SHOWN = 12
"""Methods in a table; programs get all of them."""
_CAPTION = (
    "here: whether this engine runs it; parts: micro-batches of a step on each pipeline; batch: sequences of one; "
    "GiB: of the worst rank; worst: its stage"
)


@dataclass
class MemoryAnswer:
    """The answer to a question.

    Attributes:
        ranking: All methods, ranked; None if not asked for or refused.
        trace: A traced step on one GPU or with plain data parallelism; None if not asked for or refused.
        refusals: Why an estimator refused, where another one answers.
    """

    question: Question
    ranking: Ranking | None = None
    trace: TracedEstimate | None = None
    refusals: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        question: Question,
        method: str,
        file: TaskFile | None,
        tables: Tables | None = None,
        told: Told = lambda done, total, best: None,
    ) -> MemoryAnswer:
        """Ask the methods that `--method` names.

        Args:
            file: The tasks that train together; None for full fine-tuning, or for one traced task.
            told: See `ranking.Told`.

        Raises:
            UserError: No method answers.
        """
        by_us = method in ("ours", "all")
        if by_us:
            # It imports torch, which a saved trace does without, while another process reads the model's sizes.
            from megatron_mux.choice.ranking import answer as ranked
        question.check()
        answer = cls(question)
        if by_us:
            try:
                answer.ranking = ranked(question, file, tables, told)
            except UserError as error:
                if method == "ours" or file is not None:
                    raise
                answer.refusals += error.problems
        if method == "trace" or (method == "all" and file is None):
            try:
                answer.trace = traced_estimate(question)
            except UserError as error:
                answer.refusals += error.problems
        if answer.ranking is None and answer.trace is None:
            raise UserError(*answer.refusals)
        return answer

    def to_json(self) -> dict[str, Any]:
        """The JSON form."""
        ranked = self.ranking.to_json() if self.ranking is not None else {}
        return {
            "selected": self._selected_by_trace,
            "selected_kind": "replicated" if self.trace and self.trace.fits else None,
            "batch_size": self.trace.batch if self.trace and self.trace.fits else 0,
            **ranked,
            "methods": [*ranked.get("methods", ()), *([self.trace.to_json()] if self.trace else [])],
            **about(self.question),
        }

    @property
    def _selected_by_trace(self) -> str | None:
        """What a trace selects: replicas if they fit, else offloading on one GPU; None if neither is possible."""
        if self.trace is None:
            return None
        if self.trace.fits:
            return self.trace.name
        return OFFLOAD if self.question.gpus == 1 else None

    def print(self, console: Console, command: str) -> None:
        """Print tables.

        Args:
            command: Start of the command line that runs the selected method.
        """
        if self.trace is not None:
            self._print_trace(console, self.trace)
        if self.ranking is None:
            return
        from megatron_mux.choice.fit import SEQUENCES

        _show(console, self.ranking, command)
        if self.question.batch is None and not self.ranking.tasks:
            console.print(
                f"these steps have at least {SEQUENCES} sequences, in as many micro-batches (parts), whose gradients "
                "add up: with --batch-size there are no more of them than a pipeline needs",
                highlight=False,
                soft_wrap=True,
            )

    def _print_trace(self, console: Console, traced: TracedEstimate) -> None:
        question, prediction = self.question, traced.prediction
        tensors = question.skeleton.tensors
        least, most = map(show_size, prediction.interval)
        lines = [
            f"{tensors.model_type}, {tensors.total / 1e6:,.0f}M parameters, {question.length} tokens",
            f"trace: {traced.name} {'fits' if traced.fits else 'does not fit'}; largest batch {traced.largest_batch}",
            f"trace: {show_size(prediction.process)} with {traced.batch} sequence(s) on each GPU",
            "trace: at that peak "
            + ", ".join(f"{part} {size / GIB:.2f} GiB" for part, size in prediction.breakdown.items()),
            f"trace: the peak is {prediction.moment}",
            f"trace: {least} to {most}: kernels, context and NCCL are uncertain (not measured on a GPU)",
            f"trace: {show_size(prediction.peak_reserved_expandable)} reserved with expandable segments",
            f"trace: {question.options.describe()}; {prediction.settings.describe()}",
        ]
        if self.ranking is None:
            lines.append(
                f"selected: {self._selected_by_trace or 'nothing: a model does not fit on each GPU'}"
            )
        for line in lines:
            console.print(line, highlight=False, soft_wrap=True)

    def draw(self, file: Any) -> None:
        """Draw memory over time.

        Raises:
            UserError: It cannot be written.
        """
        panels = []
        if self.trace is not None:
            title = f"{self.trace.name}, batch {self.trace.batch}: a traced step"
            panels.append(traced(self.trace.prediction, title))
        for ranked in self.ranking.entries[:_DRAWN] if self.ranking is not None else ():
            name = " ".join((ranked.method.name, ranked.method.details)).strip()
            panels.append(closed(f"{name}\nbatch {ranked.sequences}: ours", ranked.phases))
        question = self.question
        title = f"{question.skeleton.tensors.model_type}, {question.length} tokens, {question.gpus} GPU(s)"
        draw(panels, title, question.gpu_memory, file)


def about(question: Question) -> dict[str, Any]:
    """The part of the JSON form that repeats the question."""
    tensors = question.skeleton.tensors
    return {
        "model": {"model_type": tensors.model_type, "parameters": tensors.total, "layers": tensors.layers},
        "gpus": question.gpus,
        "gpu_memory_bytes": question.gpu_memory,
        "sequence_length": question.length,
    }


def _show(console: Console, ranking: Ranking, command: str) -> None:
    """Print a ranking; `command` begins the command line that runs a method of ours."""
    from rich.table import Table

    count = len(ranking.entries)
    which = f"the first {_SHOWN} of {count} methods" if count > _SHOWN else f"{count} method(s)"
    how = "tables of this engine" if ranking.tasks else "closed forms of ours"
    table = Table(title=f"by {how}: {which}", caption=_CAPTION)
    table.add_column("method", no_wrap=True)
    table.add_column("")
    for column in ("fits", "here", "parts", "batch", "GiB", "worst", "tokens/s"):
        table.add_column(column, justify="right", no_wrap=True)
    for entry in ranking.entries[:_SHOWN]:
        table.add_row(*_row(entry))
    console.print(table)
    for name, why in ranking.impossible.items():
        console.print(f"{name}: {why}", highlight=False)
    _show_choice(console, ranking, command)


def _row(entry: Fit) -> list[str]:
    return [
        entry.method.name,
        entry.method.details,
        "yes" if entry.fits else "no",
        "no" if entry.command.elsewhere else "yes",
        str(entry.method.micro_batches),
        str(entry.sequences),
        f"{entry.peak_process / GIB:.1f}",
        f"{entry.worst.stage + 1}/{entry.method.pipeline}",
        f"{entry.throughput:,.0f}",
    ]


def _show_choice(console: Console, ranking: Ranking, command: str) -> None:
    best = ranking.chosen
    if best is None:
        nearest = f"; {ranking.entries[0].method.name} needs the least" if ranking.entries else ""
        console.print(f"selected: nothing: no method fits{nearest}", highlight=False)
        return
    parts = ", ".join(f"{part} {show_size(size)}" for part, size in best.breakdown.items() if size)
    offloaded = f"{OFFLOAD}: " if best.method.offload else ""
    many = "at most " if best.method.parts else ""
    batches = f"{many}{best.sequences} sequence(s) in each of {best.method.micro_batches} micro-batch(es)"
    lines = [
        f"selected: {offloaded}{best.method.title}, {batches}",
        f"its peak, at {best.worst.name}: {parts}",
        f"{' to '.join(map(show_size, best.interval))} (context, NCCL and allocator are uncertain)",
    ]
    host, runs = best.memory.host, best.command
    if host:
        lines.append(f"host memory: {show_size(host)} for each GPU")
    words = shlex.join(runs.flags)
    if runs.elsewhere:
        lines += [f"not by this engine ({runs.elsewhere}); flags of {runs.program}: {words}", *runs.remarks]
    else:
        lines += [f"run it with: {command} {words}"]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
