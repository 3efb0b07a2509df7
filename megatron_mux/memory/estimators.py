"""Ways to predict memory, by name: each answers the same question in the same form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from megatron_mux.errors import UserError
from megatron_mux.memory.batches import Batches
from megatron_mux.memory.caching.settings import Settings
from megatron_mux.memory.estimate import COMMUNICATORS, CONTEXT, Prediction
from megatron_mux.memory.papers import llmem
from megatron_mux.memory.papers.decision import OFFLOAD, Layout, largest_batch, layouts, select
from megatron_mux.memory.sizes import MIB, show_size
from megatron_mux.memory.stream.events import Category, Stream, StreamError
from megatron_mux.memory.tensors import Skeleton
from megatron_mux.memory.trace.case import Case
from megatron_mux.memory.trace.options import Options
from megatron_mux.memory.trace.process import Request, TraceError, Tracer
from megatron_mux.memory.trace.traces import Traces

LARGEST_LENGTH = 1 << 24
MOST_GPUS = 1 << 16
NOT_TRACED = "its step cannot be traced"
"""What is said where closed forms answer instead: the next time, it may be traced."""
LEAST_MEMORY = 64 * MIB
"""Below, a unit has been forgotten."""


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
    options: Options = field(default_factory=Options)
    """How it is trained. Traces alone look at it."""
    settings: Settings = field(default_factory=Settings)
    """The caching allocator's options. Traces alone look at them."""
    tracer: Tracer = field(default_factory=Tracer, compare=False)
    """The process that does what needs torch."""

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
        if self.gpu_memory < LEAST_MEMORY:
            problems.append(
                f"--gpu-memory: {show_size(self.gpu_memory)} is no GPU's: give a unit, such as 80GiB"
            )
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
    prediction: Prediction | None = None
    """Of a traced step."""

    @property
    def peak_process(self) -> int | None:
        """All bytes that the process takes of the GPU at the peak, the CUDA context included."""
        return sum(self.breakdown.values()) if self.breakdown else None

    @property
    def peak_reserved(self) -> int | None:
        """Bytes that the allocator holds at the peak."""
        if self.peak_process is None:
            return None
        return self.peak_process - sum(self.breakdown.get(part, 0) for part in _OUTSIDE)

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
            # Closed forms do not tell live tensors from what is held for them.
            "peak_allocated_bytes": self.prediction.peak_allocated if self.prediction else None,
            "breakdown": dict(self.breakdown),
            "why": self.why,
            **(_told(self.prediction) if self.prediction else {}),
        }


_OUTSIDE = ("base", CONTEXT, COMMUNICATORS)
"""Parts of a breakdown that do not go through the allocator."""


def _told(prediction: Prediction) -> dict[str, object]:
    """What only a traced step tells."""
    return {
        "peak_reserved_expandable_bytes": prediction.peak_reserved_expandable,
        "peak_process_interval_bytes": list(prediction.interval),
        "moment": prediction.moment,
        "allocator": prediction.settings.told(),
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
    """What `dnnmem` says, in the process that has torch."""
    try:
        (found,) = question.tracer.ask([_to_dnnmem(question)])
    except TraceError as error:
        raise UserError(f"dnnmem: {question.skeleton.path}: {error}") from None
    return [Entry("dnnmem", layouts(question.gpus)[0], **found)]


def _to_dnnmem(question: Question) -> Request:
    sizes = {name: getattr(question, name) for name in ("gpus", "gpu_memory", "length", "batch")}
    return "dnnmem", {"config": str(question.skeleton.path), **sizes}


def dnnmem(question: Question) -> Entry:
    """One GPU, so conventional data parallelism only. This imports torch, which takes seconds."""
    from megatron_mux.memory.papers.dnnmem import DNNMem

    graph = DNNMem(question.skeleton, question.length)
    return _entry("dnnmem", question, layouts(question.gpus)[0], graph.breakdown)


def _trace(question: Question) -> list[Entry]:
    """A traced step of `transformers` on one GPU, or on several with plain `DistributedDataParallel`."""
    skeleton, layout = question.skeleton, layouts(question.gpus)[0]
    case = question.options.case(skeleton.raw, skeleton.tensors, question.length)
    weights = _itemsize(case) * skeleton.tensors.total
    batches = Batches(case, Traces(tracer=question.tracer), question.settings, question.gpus, weights)
    try:
        largest = batches.largest(question.gpu_memory)
        batch = question.batch or max(largest, 1)
        fits = batch <= largest
        prediction = batches.within(batch, question.gpu_memory) if fits else batches.prediction(batch)
        _check_layers(prediction.stream, weights)
    except (TraceError, StreamError) as error:
        raise UserError(f"trace: {skeleton.path}: {NOT_TRACED}: {error}; closed forms answer") from None
    return [Entry("trace", layout, fits, batch, largest, prediction.breakdown, prediction=prediction)]


def _itemsize(case: Case) -> int:
    """Bytes of a weight."""
    return 4 if case.weights == "float32" else 2


def _check_layers(stream: Stream, wanted: int) -> None:
    """Whether the layers that were traced stand for all: some models' first ones are unlike the others.

    Args:
        stream: A step.
        wanted: Bytes of the model's weights.

    Raises:
        StreamError: The stream loads fewer, or far more (buffers are loaded too).
    """
    loaded = sum(
        event.size for event in stream if event.kind == "allocate" and event.category == Category.PARAMETERS
    )
    if not 0.999 * wanted <= loaded <= 1.5 * wanted:
        raise StreamError(
            f"its layers differ: those traced make {show_size(loaded)} of all, and it has {show_size(wanted)}"
        )


ESTIMATORS: Mapping[str, Callable[[Question], list[Entry]]] = {
    "llmem": _llmem,
    "dnnmem": _dnnmem,
    "trace": _trace,
}
"""By name, the most trusted first: its choice is the answer's. On one GPU that is the trace's."""
_CHOOSES = ("llmem",)
"""Estimators that know all layouts, so that nothing fits if none of theirs does."""


def begin(question: Question, method: str) -> None:
    """Begin with what takes longest of what `estimate` will be asked, in a process of its own."""
    if method in ("all", "dnnmem"):
        question.tracer.begin(_to_dnnmem(question))


def estimate(question: Question, method: str) -> Answer:
    """Ask one estimator, or all that know the model.

    Args:
        question: What is to be trained.
        method: A name of `ESTIMATORS`, or `all`.

    Returns:
        Everything they say; the choice is the most trusted one's. Where a step cannot be traced, closed forms answer.

    Raises:
        UserError: The method or a size is none, or no estimator knows the model.
    """
    if method != "all" and method not in ESTIMATORS:
        raise UserError(f"--method {method}: must be one of all, ours, dry run, {', '.join(ESTIMATORS)}")
    question.check()
    answers, refusals = _ask(question, ESTIMATORS if method == "all" else (method,))
    if not answers and method == "trace" and any(NOT_TRACED in refusal for refusal in refusals):
        closed, more = _ask(question, [name for name in ESTIMATORS if name != method])
        answers, refusals = closed, refusals + more
    if not answers:
        raise UserError(*refusals)
    first = "trace" if question.gpus == 1 and "trace" in answers else next(iter(answers))
    chosen = _choose(answers[first])
    knows_all = first in _CHOOSES or question.gpus == 1  # there is but one layout of one GPU
    selected = chosen.layout.name if chosen else OFFLOAD if knows_all else None
    return Answer([entry for found in answers.values() for entry in found], chosen, selected, refusals)


def _ask(question: Question, names: Iterable[str]) -> tuple[dict[str, list[Entry]], list[str]]:
    """What estimators say, and why others say nothing."""
    answers: dict[str, list[Entry]] = {}
    refusals: list[str] = []
    for name in names:
        try:
            answers[name] = ESTIMATORS[name](question)
        except UserError as error:
            refusals += error.problems
    return answers, refusals


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
