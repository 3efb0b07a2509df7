"""What the engine does with attached adapters beside training them: evaluate tasks, and generate."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from megatron_mux.data.preference_file import PreferenceDataset
from megatron_mux.engine.evaluate import EvalResult, Evaluator
from megatron_mux.engine.forward_compute import PassRunner
from megatron_mux.engine.generate import Attached, Generator
from megatron_mux.engine.held_out import HeldOut, Records
from megatron_mux.engine.held_out_texts import with_texts
from megatron_mux.engine.log_probs import LogProbs
from megatron_mux.engine.preference_evaluation import evaluate_preferences
from megatron_mux.engine.reference import compute_references
from megatron_mux.engine.task_state import TaskState
from megatron_mux.errors import UserError


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
        preferences = [one for one in held_out if isinstance(one.records, PreferenceDataset)]
        held_out = [one for one in held_out if not isinstance(one.records, PreferenceDataset)]
        results = self._evaluate_preferences(preferences)
        if held_out:
            evaluator = Evaluator(self.stages, self.parallel, self.communicator, self.trials)
            found = evaluator.evaluate(held_out)
            results |= with_texts(found, held_out, lambda stop: self.generator(tasks, stop), self.parallel)
        return results

    def _evaluate_preferences(self, tasks: Sequence[HeldOut]) -> dict[str, EvalResult | UserError]:
        """Evaluate preference tasks, one after the other."""
        results: dict[str, EvalResult | UserError] = {}
        for one in tasks:
            assert isinstance(one.records, PreferenceDataset)
            log_probs = self._log_probs(one.task, one.batch_size)
            try:
                results[one.name] = evaluate_preferences(log_probs, one.records)
            except UserError as error:  # on every rank
                results[one.name] = error
        return results

    def compute_references(self, tasks: Mapping[str, TaskState]) -> dict[str, str]:
        """Compute log-probabilities under references that tasks ask for; why it could not be done, by task.

        Every rank calls it and gets the same answer.
        """
        problems = {name: compute_references(self._log_probs(task)) for name, task in tasks.items()}
        return {name: problem for name, problem in problems.items() if problem}

    def _log_probs(self, task: TaskState, batch_size: int | None = None) -> LogProbs:
        return LogProbs(self.stages, self.parallel, self.communicator, task=task, batch_size=batch_size)

    def generator(self, members: Mapping[str, Attached], stop: Collection[int]) -> Generator:
        """Make what continues prompts of some tasks; see `Generator`."""
        return Generator(
            self.stages, self.parallel, self.communicator, self.trials, members=members, stop=stop
        )
