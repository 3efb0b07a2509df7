"""Profiles of a model's full fine-tuning steps, from traces of a few layers and a few batches."""

from __future__ import annotations

from dataclasses import replace

from megatron_mux.errors import UserError
from megatron_mux.memory.question import Question
from megatron_mux.memory.step_profile import StepProfile
from megatron_mux.memory.stream.events import StreamError
from megatron_mux.memory.trace.symbolic import Steps, family
from megatron_mux.memory.traced_estimate import NOT_TRACED, check_layers, itemsize
from megatron_mux.memory.untraced import SMALL_INDEX
from megatron_mux.memory.worker import WorkerError


class StepProfiles:
    """The profiles of one model and sequence length, with layers recomputed and without, each traced once.

    Args:
        question: The model, the length and how it is trained.
        autocast: Whether weights are fp32 and autocast computes; else weights are in the precision.
        steps: Traces steps; None for those that are cached, and for the question's tracer.
    """

    def __init__(self, question: Question, autocast: bool, steps: Steps | None = None) -> None:
        self._question = question
        options = replace(
            question.options,
            master_weights=autocast,
            optimizer="sgd",
            adapter=None,
            clip=None,
            accumulate=False,
        )
        skeleton = question.skeleton
        case = options.case(skeleton.raw, skeleton.tensors, question.length)
        # Few tokens change how an embedding's gradient is made: such batches are no guide to larger ones.
        batch = max(2, SMALL_INDEX // case.length + 1)
        self._case = replace(case, steps=1, batch=batch)
        self._steps = steps or question.tracer.steps
        self._known: dict[bool, StepProfile] = {}

    def __call__(self, recompute: bool) -> StepProfile:
        """The profile of a step.

        Args:
            recompute: Whether all layers are recomputed in the backward pass.

        Raises:
            UserError: The model's step cannot be traced, or is no linear function of the batch.
        """
        if recompute not in self._known:
            self._known[recompute] = self._profile(recompute)
        return self._known[recompute]

    def _profile(self, recompute: bool) -> StepProfile:
        case = replace(self._case, recompute=recompute)
        tensors = self._question.skeleton.tensors
        try:
            found = family(case, ("batch",), self._steps, case.batch)
            streams, points = list(found.streams.values()), found.points["batch"]
            check_layers(streams[0], itemsize(case) * tensors.total)
            # Heads' own tensors have as many bytes as so many scores where sequences are short.
            tells = case.length > 4 * tensors.hidden // tensors.heads
            scores = tensors.heads * case.length**2 if tells else None
            return StepProfile.of(streams[0], streams[-1], points, case.length, case.layers, scores)
        except (WorkerError, StreamError) as error:
            said = f"ours: {tensors.model_type}: {NOT_TRACED}: {error}"
            raise UserError(said) from None
