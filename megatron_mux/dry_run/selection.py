"""Finds a way to train a task file that fits, by dry runs: a given plan, or the best-ranked methods in turn."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_mux.choice.engine_step import Tables
from megatron_mux.choice.fit import Fit
from megatron_mux.choice.ranking import Ranking, answer
from megatron_mux.choice.task_file import TaskFile
from megatron_mux.dry_run.rank_estimate import RankEstimate, estimate_ranks, worst
from megatron_mux.dry_run.representative_ranks import representative_ranks
from megatron_mux.dry_run.run_spec import RunSpec
from megatron_mux.dry_run.workload import Workload
from megatron_mux.dry_run.worst_case_batch import worst_case_batches
from megatron_mux.errors import UserError
from megatron_mux.fusion.check import read_plan
from megatron_mux.fusion.plan import Plan
from megatron_mux.gpus import known
from megatron_mux.memory.question import Question
from megatron_mux.memory.worker import WorkerError

_MAX_TRIES = 4
"""Maximum number of methods to try until one fits."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class MethodEstimate:
    """A parallel method and the estimates of its ranks.

    Attributes:
        name: The method's degrees, or `plan`.
        details: Further properties of the method.
        run: What the dry run executed.
    """

    name: str
    details: str
    flags: Sequence[str]
    run: RunSpec
    ranks: Sequence[RankEstimate]

    @property
    def fits(self) -> bool:
        """Whether every rank fits."""
        return all(rank.fits for rank in self.ranks)

    @property
    def worst(self) -> RankEstimate:
        """The rank with the highest peak."""
        return worst(self.ranks)

    def to_json(self) -> dict[str, Any]:
        """The JSON form: the worst rank's figures, then those of every rank."""
        plan = self.run.plan
        told = self.worst.to_json()
        return {
            "estimator": "dry-run",
            "name": self.name,
            "details": self.details,
            "data_parallel": plan.data,
            "tensor_parallel": self.run.tensor,
            "pipeline_parallel": plan.ranks,
            "sequence_parallel": self.run.sequence_parallel,
            "recompute": self.run.recompute,
            "backbone_weights": self.run.residence,
            "micro_batches": [bucket.micro_batches for bucket in plan.buckets],
            **told,
            "fits": self.fits,
            "largest_batch": None,
            "worst_rank": {"stage": self.worst.stage, "rank": self.worst.rank, "at": self.worst.when},
            "ranks": [rank.to_json() for rank in self.ranks],
            "flags": list(self.flags),
        }


@dataclass(frozen=True)
class Selection:
    """Outcome of the dry runs.

    Attributes:
        tried: Methods in order of predicted speed, up to the first that fits.
        unread: Tasks whose data could not be read.
    """

    tried: Sequence[MethodEstimate]
    unread: Sequence[str]

    @property
    def chosen(self) -> MethodEstimate | None:
        """The first that fits; None if none does."""
        return next((one for one in self.tried if one.fits), None)

    def to_json(self) -> dict[str, Any]:
        """The JSON form."""
        best = self.chosen
        return {
            "selected": best.name if best else None,
            "selected_kind": best.details if best else None,
            "flags": list(best.flags) if best else [],
            "data_not_read": list(self.unread),
            "methods": [one.to_json() for one in self.tried],
        }


def choose(
    arguments: Namespace,
    question: Question,
    say: Say,
    tables: Callable[[TaskFile], Tables],
) -> Selection:
    """Dry-run a plan, or the best methods until one fits.

    Args:
        tables: Of a task file's bytes, by which methods are ranked.

    Raises:
        UserError: The input is wrong, or a dry run cannot execute it.
    """
    directory = question.skeleton.path.parent
    if question.skeleton.path.name != "config.json":
        raise UserError(
            f"--model {question.skeleton.path}: a dry run reads data with the tokenizer beside config.json: "
            "give a backbone's directory, or --method ours"
        )
    file = TaskFile.of(arguments, question.skeleton)
    batches, unread = worst_case_batches(file.specs, directory)
    work = Workload(question.skeleton.raw, directory, file, batches, known(arguments.device).gpu)
    try:
        if arguments.plan is not None:
            tried = [_plan(arguments, question, work, say)]
        else:
            tried = _methods(question, answer(question, file, tables(file)), work, say)
    except WorkerError as error:
        raise UserError(f"--method dry-run: {error}") from None
    return Selection(tried, unread)


def _plan(arguments: Namespace, question: Question, work: Workload, say: Say) -> MethodEstimate:
    plan = read_plan(arguments.plan)
    flags = _flags(arguments, plan)
    placement = work.file.architecture.placement
    if placement is not None:
        flags += ["--expert-model-parallel-size", str(placement.size)]
    run = work.run(flags, question.gpus, plan)
    if run.world != question.gpus:
        raise UserError(f"--plan {arguments.plan}: is for {run.world} GPU(s), --gpus says {question.gpus}")
    ranks = representative_ranks(run, range(plan.ranks))
    found = _ranks(question, run, ranks, "the plan", say)
    return MethodEstimate("plan", "", ["--mux-plan", str(arguments.plan), *flags], run, found)


def _flags(arguments: Namespace, plan: Plan) -> list[str]:
    """Flags of a run that follows a plan, besides the plan's own."""
    words = plan.mesh.flags
    words.append("--bf16" if arguments.precision == "bf16" else "--mux-fp32")
    if arguments.recompute != "none":
        words += ["--recompute-granularity", arguments.recompute]
    if arguments.backbone_weights != "resident":
        words += ["--mux-backbone-weights", arguments.backbone_weights]
    if arguments.backbone_dtype is not None:
        words += ["--mux-backbone-dtype", arguments.backbone_dtype]
    return words


def _methods(question: Question, ranking: Ranking, work: Workload, say: Say) -> list[MethodEstimate]:
    tried: list[MethodEstimate] = []
    for entry in ranking.entries[:_MAX_TRIES]:
        tried.append(_method(question, entry, work, say))
        if tried[-1].fits:
            break
    return tried


def _method(question: Question, entry: Fit, work: Workload, say: Say) -> MethodEstimate:
    run = work.run(entry.command.flags, question.gpus)
    ranks = representative_ranks(run, [entry.worst.stage])
    name = " ".join(filter(None, (entry.method.name, entry.method.details)))
    found = _ranks(question, run, ranks, name, say)
    return MethodEstimate(entry.method.name, entry.method.details, entry.command.flags, run, found)


def _ranks(question: Question, run: RunSpec, ranks: Sequence[int], name: str, say: Say) -> list[RankEstimate]:
    start = time.perf_counter()
    which = f"rank(s) {', '.join(map(str, ranks))} of {run.world}"
    say(f"dry run of {name} on {which}: about half a minute")
    found = estimate_ranks([(run, rank) for rank in ranks], question.gpu_memory)
    say(f"dry run took {time.perf_counter() - start:.1f} s")
    return found
