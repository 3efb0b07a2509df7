"""The estimate of `--method trace`: a step of `transformers` on one GPU, or on several with plain data parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_mux.errors import UserError
from megatron_mux.memory.batches import Batches
from megatron_mux.memory.estimate import Prediction
from megatron_mux.memory.question import Question
from megatron_mux.memory.sizes import show_size
from megatron_mux.memory.stream.events import Category, Stream, StreamError
from megatron_mux.memory.trace.case import Case
from megatron_mux.memory.worker import WorkerError

NOT_TRACED = "its step cannot be traced"
"""Part of the message where a trace fails, which the next time it may not."""


@dataclass(frozen=True)
class TracedEstimate:
    """Memory of a traced step on each GPU.

    Attributes:
        gpus: Data-parallel ranks, each with the whole model.
        fits: Whether the question's batch fits, or one sequence where it has none.
        batch: Sequences for which the prediction is made: the question's, else as many as fit, else 1.
        largest_batch: The most sequences that fit; 0 if not even one does.
    """

    gpus: int
    fits: bool
    batch: int
    largest_batch: int
    prediction: Prediction

    @property
    def name(self) -> str:
        """The parallel method."""
        return f"{self.gpus}DP"

    def to_json(self) -> dict[str, object]:
        """The JSON form."""
        return {
            "estimator": "trace",
            "name": self.name,
            "data_parallel": self.gpus,
            "tensor_parallel": 1,
            "fits": self.fits,
            "batch_size": self.batch,
            "largest_batch": self.largest_batch,
            **self.prediction.to_json(),
            "allocator": self.prediction.settings.describe(),
        }


def traced_estimate(question: Question) -> TracedEstimate:
    """Trace a step, and replay it through the caching allocator.

    Raises:
        UserError: The step cannot be traced, or the question is wrong.
    """
    question.check()
    skeleton = question.skeleton
    case = question.options.case(skeleton.raw, skeleton.tensors, question.length)
    weights = itemsize(case) * skeleton.tensors.total
    batches = Batches(case, question.tracer, question.settings, question.gpus, weights)
    try:
        largest = batches.largest(question.gpu_memory)
        batch = question.batch or max(largest, 1)
        fits = batch <= largest
        prediction = batches.within(batch, question.gpu_memory) if fits else batches.prediction(batch)
        check_layers(prediction.stream, weights)
    except (WorkerError, StreamError) as error:
        raise UserError(f"trace: {skeleton.path}: {NOT_TRACED}: {error}") from None
    return TracedEstimate(question.gpus, fits, batch, largest, prediction)


def itemsize(case: Case) -> int:
    """Bytes of a weight."""
    return 4 if case.weights == "float32" else 2


def check_layers(stream: Stream, wanted: int) -> int:
    """Refuse a stream whose layers do not stand for all: some models' first ones are unlike the others.

    Args:
        wanted: Bytes of the model's weights.

    Returns:
        Bytes of the buffers that it loads besides, such as a table of which tokens see which.

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
    return max(0, loaded - wanted)
