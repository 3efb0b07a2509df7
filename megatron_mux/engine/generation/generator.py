"""Greedy generation for several tasks at once: prompts of all of them share passes, each with its own adapter.

Prompts are taken in groups whose keys and values fit a fixed number of positions, and sequences that end leave their
group's passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from megatron_mux.batch.packed_batch import PackedBatch
from megatron_mux.engine.agreement import everyones
from megatron_mux.engine.forward_compute import GenerationCompute
from megatron_mux.engine.generation.passes import Completion, GrowingSequence, Prompt, TokenPasses
from megatron_mux.engine.out_of_memory import FailedBuckets
from megatron_mux.errors import SharedError
from megatron_mux.kernels.attention.key_value_cache import KeyValueCache
from megatron_mux.tasks.evaluation import TOKENS_PER_PASS

CACHE_POSITIONS = 4 * TOKENS_PER_PASS
"""Positions whose keys and values a group keeps at most: its sequences times the longest one. A longer sequence is a
group by itself."""


@dataclass(frozen=True)
class Generator(TokenPasses):
    """Generates; prompts are shared out over data-parallel ranks."""

    _fitted: list[int] = field(default_factory=list)

    def generate(self, prompts: Sequence[Prompt]) -> list[Completion]:
        """Continue prompts; every rank calls it with the same ones and every rank gets all completions.

        Raises:
            SharedError: Some rank has no memory for one of the sequences alone; on every rank.
        """
        sequences = sorted(
            (self.sequence_of(*given) for given in enumerate(prompts)), key=lambda sequence: -sequence.limit
        )
        of_pipeline = self.parallel.experts.share(sequences)[self.parallel.dp_rank :: self.parallel.dp_size]
        groups = self.as_many_everywhere(list(self._groups(of_pipeline, prompts)))
        done: dict[int, Completion] = {}
        problem = ""
        try:
            for group in groups:
                done |= self._generated(group)
        except SharedError as error:  # on every rank of the pipeline; others are at work
            problem = str(error)
        speaks = self.parallel.is_first_stage and self.parallel.tp_rank == 0
        everything: dict[int, Completion] = {}
        for completions, trouble in everyones((done if speaks else {}, problem), self.parallel):
            if trouble:
                raise SharedError(trouble)
            everything |= completions
        return [everything[number] for number in range(len(prompts))]

    def _groups(
        self, sequences: Sequence[GrowingSequence], prompts: Sequence[Prompt]
    ) -> Iterator[list[GrowingSequence]]:
        """Sequences that are generated together, about equally long ones."""
        group: list[GrowingSequence] = []
        for sequence in sequences:
            sizes = [prompts[member.number].batch_size or len(prompts) for member in (*group, sequence)]
            full = (len(group) + 1) * self.positions([*group, sequence]) > CACHE_POSITIONS
            if group and (full or len(group) >= min(sizes)):
                yield group
                group = []
            group.append(sequence)
        if group:
            yield group

    def _generated(self, group: list[GrowingSequence]) -> dict[int, Completion]:
        """Generate a group, in halves if there is no memory for it; every rank of the pipeline calls it.

        Raises:
            SharedError: One sequence alone does not fit.
        """
        failed = self._tried(group)
        if self.trials is None or not self.agree(bool(failed)):
            failed = FailedBuckets(1, self.stages.values(), self.parallel)
            completions = self._completions(group, failed)
            if not self.agree(bool(failed)):
                return completions
        if not self.agree(len(group) > 1):
            raise SharedError(f"one sequence to generate alone ran out of memory ({self.reason(failed)})")
        for sequence in group:
            sequence.length = sequence.prompt
        half = (len(group) + 1) // 2
        return self._generated(group[:half]) | self._generated(group[half:])

    def _tried(self, group: list[GrowingSequence]) -> FailedBuckets:
        """Whether a group runs out of memory on this rank, unless one as large has fitted."""
        failed = FailedBuckets(1, self.stages.values(), self.parallel, recovers=False)
        size = len(group) * self.positions(group)
        if self.trials is not None and group and size > max(self._fitted, default=0):
            self.trials.run(failed, lambda: self._try(group, failed))
            if not failed:
                self._fitted.append(size)
        return failed

    def _try(self, group: list[GrowingSequence], failed: FailedBuckets) -> None:
        """A group's first passes, with all of its cache, and one more."""
        group = self.in_task_order(group)
        cache = self._cache(group)
        self._next(self.prompt_passes(group, cache), failed)
        for sequence in group:
            sequence.length += 1
        self._next([self.step_pass(group, cache)], failed)
        for sequence in group:
            sequence.length = sequence.prompt

    def _completions(self, group: list[GrowingSequence], failed: FailedBuckets) -> dict[int, Completion]:
        done: dict[int, Completion] = {}
        active = self.in_task_order(group)
        cache = self._cache(active)
        batches = self.prompt_passes(active, cache)
        while batches:
            tokens = self._next(batches, failed)
            ended = []
            for sequence, token in zip(active, tokens, strict=True):
                finish = self.advance(sequence, token)
                if finish is not None:
                    generated = sequence.tokens[sequence.prompt : sequence.length].tolist()
                    done[sequence.number] = Completion(tuple(generated), finish)
                    ended.append(sequence)
            cache.drop(sequence.name for sequence in ended)
            active = [sequence for sequence in active if sequence.number not in done]
            batches = []
            if self.any_rank(bool(active)):
                begins_anew = bool(self.switches) and self.any_rank(any(map(self.changes_angles, active)))
                batches = (
                    self.prompt_passes(active, cache) if begins_anew else [self.step_pass(active, cache)]
                )
        return done

    def _cache(self, group: Sequence[GrowingSequence]) -> KeyValueCache:
        return KeyValueCache([sequence.name for sequence in group], self.positions(group))

    def _next(self, batches: Sequence[PackedBatch], failed: FailedBuckets) -> list[int]:
        """Run passes; returns the likeliest next token of each of their sequences, on every rank of the pipeline."""
        compute = GenerationCompute(self.stages, batches, failed)
        self.run(compute)
        tokens: list[int] = self.on_every_stage(torch.cat(compute.tokens)).tolist()
        return tokens
