"""Which way to train a task file fits: a plan, or the best methods by closed forms until one does."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_mux.choice.answer import Choice
from megatron_mux.choice.ranking import Ranked
from megatron_mux.choice.recipes import TaskFile
from megatron_mux.errors import UserError
from megatron_mux.fusion.check import read_plan
from megatron_mux.gpus import known
from megatron_mux.memory.estimators import Question
from megatron_mux.memory.store import Store
from megatron_mux.memory.trace.process import TraceError
from megatron_mux.rehearsal.answer import RankAnswer, answers, worst
from megatron_mux.rehearsal.data import Batches
from megatron_mux.rehearsal.runs import Work
from megatron_mux.rehearsal.setting import Setting
from megatron_mux.rehearsal.telling import telling_ranks
from megatron_mux.tasks import TaskSpec

_TRIES = 4
"""Methods that are rehearsed at the most until one fits."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Rehearsed:
    """A way to train, rehearsed.

    Attributes:
        name: Of the method: its degrees; `plan` of a plan.
        details: The rest of it.
        flags: That run it.
        setting: What was rehearsed.
        ranks: What each of its ranks takes that was.
    """

    name: str
    details: str
    flags: Sequence[str]
    setting: Setting
    ranks: Sequence[RankAnswer]

    @property
    def fits(self) -> bool:
        """Whether every rank does."""
        return all(rank.fits for rank in self.ranks)

    @property
    def worst(self) -> RankAnswer:
        """The rank that needs most."""
        return worst(self.ranks)

    def to_json(self) -> dict[str, Any]:
        """As programs read it: what the worst rank takes, then all of them."""
        plan = self.setting.plan
        told = self.worst.to_json()
        return {
            "estimator": "rehearsal",
            "name": self.name,
            "details": self.details,
            "data_parallel": plan.data,
            "tensor_parallel": self.setting.tensor,
            "pipeline_parallel": plan.ranks,
            "sequence_parallel": self.setting.sequence_parallel,
            "recompute": self.setting.recompute,
            "backbone_weights": self.setting.residence,
            "micro_batches": [bucket.micro_batches for bucket in plan.buckets],
            **told,
            "fits": self.fits,
            "largest_batch": None,
            "worst_rank": {"stage": self.worst.stage, "rank": self.worst.rank, "at": self.worst.when},
            "ranks": [rank.to_json() for rank in self.ranks],
            "flags": list(self.flags),
        }


@dataclass(frozen=True)
class Answer:
    """What rehearsals say.

    Attributes:
        tried: In the order of their predicted speed, until one fits.
        unread: Tasks whose data were not at hand.
    """

    tried: Sequence[Rehearsed]
    unread: Sequence[str]

    @property
    def chosen(self) -> Rehearsed | None:
        """The first that fits; None if none does."""
        return next((one for one in self.tried if one.fits), None)

    def to_json(self) -> dict[str, Any]:
        """As programs read it."""
        best = self.chosen
        return {
            "selected": best.name if best else None,
            "selected_kind": best.details if best else None,
            "flags": list(best.flags) if best else [],
            "data_not_read": list(self.unread),
            "methods": [one.to_json() for one in self.tried],
        }


def choose(arguments: Namespace, question: Question, specs: Sequence[TaskSpec], say: Say) -> Answer:
    """Rehearse a plan, or the best methods until one fits.

    Args:
        arguments: The tool's.
        question: The model and the GPUs.
        specs: The tasks.
        say: Told what takes time.

    Raises:
        UserError: The input is wrong, or cannot be rehearsed.
    """
    directory = question.skeleton.path.parent
    if question.skeleton.path.name != "config.json":
        raise UserError(
            f"--model {question.skeleton.path}: a rehearsal reads data with the tokenizer beside config.json: "
            "give a backbone's directory, or --method ours"
        )
    file = TaskFile.read(question.skeleton.path, arguments.tasks)
    file.check(question.skeleton.tensors.positions, arguments.sequence_length)
    batches = Batches(directory, Store("batches"))
    work = Work(
        question.skeleton.raw,
        directory,
        arguments.tasks,
        specs,
        batches.of(specs),
        known(arguments.device).gpu,
    )
    try:
        if arguments.plan is not None:
            tried = [_plan(arguments, question, work, say)]
        else:
            tried = _methods(question, Choice.of(question, arguments, file), work, say)
    except TraceError as error:
        raise UserError(f"--method rehearsal: {error}") from None
    return Answer(tried, batches.unread)


def _plan(arguments: Namespace, question: Question, work: Work, say: Say) -> Rehearsed:
    plan = read_plan(arguments.plan)
    recompute = None if arguments.recompute == "none" else arguments.recompute
    setting = work.by_plan(plan, arguments.precision == "bf16", recompute, arguments.backbone_weights)
    if setting.world != question.gpus:
        raise UserError(
            f"--plan {arguments.plan}: is for {setting.world} GPU(s), --gpus says {question.gpus}"
        )
    ranks = telling_ranks(setting, range(plan.ranks))
    flags = ["--mux-plan", str(arguments.plan), *_flags(setting)]
    return Rehearsed("plan", "", flags, setting, _ranks(question, setting, ranks, "the plan", say))


def _flags(setting: Setting) -> list[str]:
    """What a run by a plan is told beside it."""
    words = []
    if setting.tensor > 1:
        words += ["--tensor-model-parallel-size", str(setting.tensor)]
    if setting.plan.ranks > 1:
        words += ["--pipeline-model-parallel-size", str(setting.plan.ranks)]
    if setting.dtype == "bfloat16":
        words.append("--bf16")
    if setting.recompute != "none":
        words += ["--recompute-granularity", setting.recompute]
    if setting.residence != "resident":
        words += ["--mux-backbone-weights", setting.residence]
    return words


def _methods(question: Question, choice: Choice, work: Work, say: Say) -> list[Rehearsed]:
    ours = [entry for entry in choice.ranking.entries if entry.elsewhere is None]
    if not ours:
        why = sorted({entry.elsewhere for entry in choice.ranking.entries if entry.elsewhere})
        raise UserError(f"--method rehearsal: this engine runs none of the methods: {'; '.join(why)}")
    tried: list[Rehearsed] = []
    for entry in ours[:_TRIES]:
        tried.append(_method(question, entry, work, say))
        if tried[-1].fits:
            break
    return tried


def _method(question: Question, entry: Ranked, work: Work, say: Say) -> Rehearsed:
    setting = work.by_flags(entry.flags, question.gpus)
    ranks = telling_ranks(setting, [entry.worst.stage])
    name = " ".join(filter(None, (entry.method.name, entry.method.details)))
    found = _ranks(question, setting, ranks, name, say)
    return Rehearsed(entry.method.name, entry.method.details, entry.flags, setting, found)


def _ranks(
    question: Question, setting: Setting, ranks: Sequence[int], name: str, say: Say
) -> list[RankAnswer]:
    start = time.perf_counter()
    which = f"rank(s) {', '.join(map(str, ranks))} of {setting.world}"
    say(f"rehearsing {name} on {which}: half a minute or so, unless it is known")
    found = answers([(setting, rank) for rank in ranks], question.gpu_memory, store=Store("rehearsals"))
    say(f"rehearsed in {time.perf_counter() - start:.1f} s")
    return found
