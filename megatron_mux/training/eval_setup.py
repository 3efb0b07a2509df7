"""What tasks' evaluations amount to: checked against held-out records, put in words, predicted in seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_mux.data.dataset import MAX_DISTINCT, TaskDataset
from megatron_mux.engine import Task
from megatron_mux.engine.evaluation.held_out import Unprompted, prompt_and_completion
from megatron_mux.fusion.planner.evaluation_time import EvaluatedLoad, EvaluationTime, predicted_evaluation
from megatron_mux.fusion.planner.planning_context import PlanningContext
from megatron_mux.tasks import TaskSpec
from megatron_mux.tasks.evaluation import choices_among, plain_choices

_LOOKED_AT = 100
_SHOWN = 4
_LONGEST = 20


def problems_of_evaluation(spec: TaskSpec, records: TaskDataset) -> Iterator[str]:
    """Yield why a task's evaluation cannot measure what it should on these records."""
    assert spec.eval is not None
    if "classification_accuracy" in spec.eval.metrics and records.distinct_completions is None:
        yield (
            f"eval.metrics: classification_accuracy needs records that all have a prompt and a completion, with at "
            f"most {MAX_DISTINCT} distinct completions, which those of {records.path} are not: measure token_accuracy "
            "or exact_match"
        )
    if spec.eval.generates:
        first = [prompt_and_completion(records, number) for number in range(min(len(records), _LOOKED_AT))]
        if all(isinstance(one, Unprompted) for one in first):
            remedy = ", or raise data.max_length" if Unprompted.CUT_PROMPT in first else ""
            yield (
                f"eval: there is nothing to generate, for the first records of {records.path} have no prompt, or lose "
                f"a part of it at data.max_length: leave out generate, exact_match and rouge{remedy}"
            )


def accuracy_measured(task: Task) -> Iterator[str]:
    """Yield a line that says which accuracy `accuracy` is for a task's records, if it is measured."""
    spec, records = task.spec, task.evaluation
    if (
        spec.eval is None
        or records is None
        or spec.training.is_preference
        or "accuracy" not in spec.eval.metrics
    ):
        return
    plain = plain_choices(records)
    if plain is None:
        scored = choices_among(records, spec.eval.metrics)
        also = " beside the classification that was asked for" if scored is not None else ""
        yield f"{spec.name}: accuracy is the share of labelled tokens predicted{also}"
        return
    names = [text.strip()[:_LONGEST] for text in plain[:_SHOWN]]
    more = ", ..." if len(plain) > _SHOWN else ""
    yield (
        f"{spec.name}: accuracy is the share of records whose own completion is the likeliest of the {len(plain)} that "
        f"occur ({', '.join(names)}{more}); eval.metrics: [token_accuracy] counts tokens instead"
    )


def evaluation_time(tasks: Sequence[Task], context: PlanningContext) -> EvaluationTime | None:
    """Predicted seconds of the tasks' evaluation; None if none is evaluated."""
    loads = {
        task.spec.name: EvaluatedLoad.of(
            task.spec,
            task.evaluation.lengths,
            task.evaluation.label_counts,
            len(choices_among(task.evaluation, task.spec.eval.metrics) or ()),
            context.info.shape,
        )
        for task in tasks
        if task.evaluation is not None and task.spec.eval is not None
    }
    return predicted_evaluation(context, loads) if loads else None
