"""Ways to predict memory, by name: each answers the same question in the same form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from megatron_mux.errors import UserError
from megatron_mux.memory import dnnmem, llmem
from megatron_mux.memory.decision import OFFLOAD, Layout, largest_batch, layouts, select
from megatron_mux.memory.tensors import Skeleton

LARGEST_LENGTH = 1 << 24
MOST_GPUS = 1 << 16


@dataclass(frozen=True)
class Question:
    """What is to be trained, on what."""

    skeleton: Skeleton
    gpus: int
    gpu_memory: int
    """Bytes of each GPU."""
    length: int
    """Tokens of a sequence."""
    batch: int | None = None
    """Sequences on each GPU; None for as many as fit."""
    base_memory: int | None = None
    """LLMem's `m_base`, bytes; None for its default."""

    def check(self) -> None:
        """Refuse what no model or machine has.

        Raises:
            UserError: All that is wrong.
        """
        problems = []
        positions = self.skeleton.tensors.positions
        if positions is not None and self.length > positions:
            problems.append(
                f"--sequence-length {self.length}: is more than the {positions} positions of {self.skeleton.path}"
            )
        elif self.length > LARGEST_LENGTH:
            problems.append(f"--sequence-length {self.length}: must be at most {LARGEST_LENGTH}")
        if self.gpus > MOST_GPUS:
            problems.append(f"--gpus {self.gpus}: must be at most {MOST_GPUS}")
        if self.batch is not None and self.batch > LARGEST_LENGTH:
            problems.append(f"--batch-size {self.batch}: must be at most {LARGEST_LENGTH}")
        if problems:
            raise UserError(*problems)


@dataclass(frozen=True)
class Entry:
    """What one estimator says of one layout."""

    estimator: str
    layout: Layout
    fits: bool
    """The question's batch, or one sequence where it has none."""
    batch: int
    """Sequences on each GPU for which the peak is given: the question's, else as many as fit, else 1."""
    largest_batch: int
    """Sequences on each GPU, whatever the question's; 0 if not even one fits."""
    breakdown: Mapping[str, int]
    """Bytes of one GPU at the peak."""
    why: str | None = None
    """Why the layout cannot be, where it cannot: then it has no peak."""

    @property
    def peak_process(self) -> int | None:
        """All bytes that the process takes of the GPU at the peak, the CUDA context included."""
        return sum(self.breakdown.values()) if self.breakdown else None

    @property
    def peak_reserved(self) -> int | None:
        """Bytes that the allocator holds at the peak."""
        return self.peak_process - self.breakdown["base"] if self.peak_process is not None else None

    def to_json(self) -> dict[str, object]:
        """As programs read it."""
        return {
            "estimator": self.estimator,
            "name": self.layout.name,
            "kind": self.layout.kind,
            "data_parallel": self.layout.data,
            "tensor_parallel": self.layout.tensor,
            "fits": self.fits,
            "batch_size": self.batch,
            "largest_batch": self.largest_batch,
            "score": self.layout.score(self.largest_batch),
            "peak_process_bytes": self.peak_process,
            "peak_reserved_bytes": self.peak_reserved,
            "peak_allocated_bytes": None,  # closed forms do not tell live tensors from what is held for them
            "breakdown": dict(self.breakdown),
            "why": self.why,
        }


@dataclass(frozen=True)
class Answer:
    """All layouts by one or several estimators, and the one to train with."""

    entries: Sequence[Entry]
    chosen: Entry | None
    """None if nothing fits."""
    selected: str | None
    """The name of the chosen layout; `offload` if none fits; None if no estimator asked knows more than one GPU."""
    refusals: Sequence[str] = ()
    """Of estimators that do not know the model, where others do."""


def _llmem(question: Question) -> list[Entry]:
    """Conventional and advanced data parallelism, tensor parallelism, and both."""
    constants = llmem.Constants()
    if question.base_memory is not None:
        constants = replace(constants, base_memory=question.base_memory)
    forms = llmem.LLMem(question.skeleton.tensors, question.length, constants)
    return [
        _entry("llmem", question, layout, partial(forms.breakdown, layout))
        for layout in layouts(question.gpus)
    ]


def _dnnmem(question: Question) -> list[Entry]:
    """One GPU, so conventional data parallelism only."""
    graph = dnnmem.DNNMem(question.skeleton, question.length)
    return [_entry("dnnmem", question, layouts(question.gpus)[0], graph.breakdown)]


ESTIMATORS: Mapping[str, Callable[[Question], list[Entry]]] = {"llmem": _llmem, "dnnmem": _dnnmem}
"""By name, the most trusted first: its choice is the answer's."""
_CHOOSES = ("llmem",)
"""Estimators that know all layouts, so that nothing fits if none of theirs does."""


def estimate(question: Question, method: str) -> Answer:
    """Ask one estimator, or all that know the model.

    Args:
        question: What is to be trained.
        method: A name of `ESTIMATORS`, or `all`.

    Returns:
        Everything they say; the choice is the first one's.

    Raises:
        UserError: The method or a size is none, or no estimator knows the model.
    """
    if method != "all" and method not in ESTIMATORS:
        raise UserError(f"--method {method}: must be one of all, ours, {', '.join(ESTIMATORS)}")
    question.check()
    answers, refusals = {}, []
    for name in ESTIMATORS if method == "all" else (method,):
        try:
            answers[name] = ESTIMATORS[name](question)
        except UserError as error:
            refusals += error.problems
    if not answers:
        raise UserError(*refusals)
    first = next(iter(answers))
    chosen = _choose(answers[first])
    selected = chosen.layout.name if chosen else OFFLOAD if first in _CHOOSES else None
    return Answer([entry for found in answers.values() for entry in found], chosen, selected, refusals)


def _choose(entries: Sequence[Entry]) -> Entry | None:
    """The entry of the layout with the highest score, for the batch that would be trained with."""
    layout = select([(entry.layout, entry.batch if entry.fits else 0) for entry in entries])
    return next((entry for entry in entries if entry.layout == layout), None)


def _entry(
    estimator: str, question: Question, layout: Layout, breakdown: Callable[[int], dict[str, int]]
) -> Entry:
    """What is said of a layout, by its breakdown for a number of sequences."""
    heads = question.skeleton.tensors.heads
    if heads % layout.tensor:
        why = f"{heads} attention heads cannot be divided among {layout.tensor} GPUs"
        return Entry(estimator, layout, False, question.batch or 1, 0, {}, why)
    largest = largest_batch(lambda batch: sum(breakdown(batch).values()), question.gpu_memory)
    batch = question.batch or max(largest, 1)
    return Entry(estimator, layout, batch <= largest, batch, largest, breakdown(batch))
