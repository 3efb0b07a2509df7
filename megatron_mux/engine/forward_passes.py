"""What the engine does with attached adapters beside training them: evaluate tasks, and generate."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from megatron_mux import runtime
from megatron_mux.data.preference_file import PreferenceDataset
from megatron_mux.engine.evaluation.evaluator import EvalResult, Evaluator
from megatron_mux.engine.evaluation.held_out import HeldOut, Records
from megatron_mux.engine.evaluation.texts import with_texts
from megatron_mux.engine.forward_compute import PassRunner
from megatron_mux.engine.generation.completions import OpenCompletions
from megatron_mux.engine.generation.generator import Generator
from megatron_mux.engine.generation.passes import Attached
from megatron_mux.engine.preference.evaluation import evaluate_preferences
from megatron_mux.engine.preference.log_probs import LogProbs, Wanted
from megatron_mux.engine.preference.task import PreferenceTask
from megatron_mux.engine.task_state import TaskState
from megatron_mux.errors import SharedError, UserError


class ForwardPasses(PassRunner):
    """Forward passes over this rank's stages; every rank makes the same calls."""

    def evaluate(
        self, tasks: Mapping[str, TaskState], given: Mapping[str, Records]
    ) -> dict[str, EvalResult | UserError]:
        """See `Engine.evaluate_together`."""
        known = {name: given.get(name, task.task.evaluation) for name, task in tasks.items()}
        held_out = [HeldOut(tasks[name], records) for name, records in known.items() if records is not None]
        if not held_out:
            return {}
        preferences = [task for task in held_out if isinstance(task.records, PreferenceDataset)]
        held_out = [task for task in held_out if not isinstance(task.records, PreferenceDataset)]
        results = self._evaluate_preferences(preferences)
        if held_out:
            evaluator = Evaluator(self.stages, self.parallel, self.communicator, self.trials)
            merged = evaluator.evaluate(held_out)
            results |= with_texts(merged, held_out, lambda stop: self.generator(tasks, stop), self.parallel)
        return results

    def _evaluate_preferences(self, tasks: Sequence[HeldOut]) -> dict[str, EvalResult | UserError]:
        """Evaluate preference tasks together; one by one if some of them cannot be."""
        try:
            return dict(evaluate_preferences(self._log_probs, tasks)) if tasks else {}
        except UserError as error:  # on every rank
            if len(tasks) == 1:
                return {tasks[0].name: error}
            results = [self._evaluate_preferences([task]) for task in tasks]
            return {name: result for of_task in results for name, result in of_task.items()}

    def compute_references(self, tasks: Mapping[str, TaskState]) -> dict[str, str]:
        """Compute log-probabilities under references that tasks ask for; why it could not be done, by task.

        Every rank calls it and gets the same answer.
        """
        preferences = {name: task for name, task in tasks.items() if isinstance(task, PreferenceTask)}
        problems = {name: self._compute_reference(task) for name, task in preferences.items()}
        return {name: problem for name, problem in problems.items() if problem}

    def _compute_reference(self, task: PreferenceTask) -> str:
        """Compute what a task's reference makes of all its data; why it could not be done."""
        if runtime.is_dry_run():  # no value counts, and these passes are smaller than those of a step
            task.reference_log_probs = np.zeros(len(task.task.data))
        else:
            data = task.preferences
            try:
                [log_probs] = self._log_probs.everywhere(
                    [Wanted(task, data.completion, range(len(data)), policy=False)]
                )
            except SharedError as error:
                return str(error)
            task.reference_log_probs = log_probs[1].numpy()
        task.ready = True
        return ""

    @property
    def _log_probs(self) -> LogProbs:
        return LogProbs(self.stages, self.parallel, self.communicator)

    def generator(self, members: Mapping[str, Attached], stop: Collection[int]) -> Generator:
        """Make what continues prompts of some tasks; see `Generator`."""
        return Generator(
            self.stages, self.parallel, self.communicator, self.trials, members=members, stop=stop
        )

    def completions(self, members: Mapping[str, Attached], stop: Collection[int]) -> OpenCompletions:
        """Make what continues sequences that come and go; see `OpenCompletions`."""
        return OpenCompletions(self.stages, self.parallel, self.communicator, members=members, stop=stop)
