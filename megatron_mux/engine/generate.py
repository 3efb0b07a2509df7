"""Greedy generation for several tasks at once: prompts of all of them share passes, each with its own adapter.

A prompt's first pass leaves its keys and values in a cache; each later pass takes the last token of every sequence that
goes on. The last stage's tokens go to all stages, since each lays out the next pass by itself. Prompts are taken in
groups whose keys and values fit a fixed number of positions, and sequences that end leave their group's passes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from megatron_mux.batch.pack import PackedSequence, pack
from megatron_mux.batch.packed_batch import PackedBatch
from megatron_mux.engine.agreement import everyones
from megatron_mux.engine.forward_compute import GenerationCompute, PassRunner
from megatron_mux.engine.out_of_memory import FailedBuckets
from megatron_mux.errors import SharedError
from megatron_mux.kernels.attention.key_value_cache import KeyValueCache
from megatron_mux.tasks.evaluation import TOKENS_PER_PASS, filled

CACHE_POSITIONS = 4 * TOKENS_PER_PASS
"""Positions whose keys and values a group keeps at most: its sequences times the longest one. A longer sequence is a
group by itself."""

Finish = Literal["stop", "length", "positions"]
"""Why a sequence ended: with a stop token, at its maximum length, or at the last position of the backbone."""


class Attached(Protocol):
    """How a task takes part in a pass: a `TaskState`."""

    @property
    def slot(self) -> int:
        """Its number among the attached tasks: see `RowGroups`."""

    @property
    def position_offset(self) -> int:
        """Virtual tokens in front of every sequence."""

    @property
    def step(self) -> int:
        """Optimizer steps done."""


@dataclass(frozen=True)
class Prompt:
    """What is to be continued.

    Attributes:
        task: Whose adapter continues it.
        tokens: `[L]` int64, at least one.
        max_new_tokens: Maximum number of tokens that follow.
        batch_size: Maximum number of sequences generated together with it; None is bound by memory alone.
    """

    task: str
    tokens: npt.NDArray[np.int64]
    max_new_tokens: int
    batch_size: int | None = None


@dataclass(frozen=True)
class Completion:
    """What followed a prompt.

    Attributes:
        tokens: Without the token that stopped it.
        finish: Why it ended.
    """

    tokens: tuple[int, ...]
    finish: Finish


@dataclass
class _Sequence:
    """A sequence that is generated.

    Attributes:
        number: Of its prompt.
        task: Whose adapter it has.
        tokens: `[L + room + 1]` int64, what is known of it.
        length: Tokens that are known.
        prompt: L.
        limit: Tokens that it may have.
        is_cut: Whether the backbone's positions allow fewer than were asked for.
    """

    number: int
    task: str
    tokens: npt.NDArray[np.int64]
    length: int
    prompt: int
    limit: int
    is_cut: bool

    @property
    def name(self) -> tuple[str, int]:
        """As segments and the cache name it."""
        return self.task, self.number

    def packed(self) -> PackedSequence:
        """The sequence with one more token, the label whose place is to be predicted."""
        tokens = self.tokens[: self.length + 1]
        return PackedSequence(self.task, self.number, tokens, np.arange(len(tokens)) == self.length, 1.0)


@dataclass(frozen=True)
class Generator(PassRunner):
    """Generates; prompts are shared out over data-parallel ranks.

    Attributes:
        members: The tasks by name, in one order on every rank. One without an adapter has a slot that no other has.
        stop: Tokens that end a sequence.
    """

    members: Mapping[str, Attached] = field(kw_only=True)
    stop: Collection[int] = field(kw_only=True)
    _fitted: list[int] = field(default_factory=list)

    def generate(self, prompts: Sequence[Prompt]) -> list[Completion]:
        """Continue prompts; every rank calls it with the same ones and every rank gets all completions.

        Raises:
            SharedError: Some rank has no memory for one of the sequences alone; on every rank.
        """
        sequences = sorted(self._sequences(prompts), key=lambda sequence: -sequence.limit)
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

    def _sequences(self, prompts: Sequence[Prompt]) -> Iterator[_Sequence]:
        positions = next(iter(self.stages.values())).shape.position_limit
        for number, prompt in enumerate(prompts):
            length = len(prompt.tokens)
            limit = length + prompt.max_new_tokens
            if positions is not None:
                # The last token that is generated takes no position.
                limit = min(limit, positions - self.members[prompt.task].position_offset + 1)
            if not 0 < length < limit:
                raise ValueError(
                    f"prompt {number} has {length} tokens, and may not have more than {limit - 1}"
                )
            tokens = np.zeros(limit + 1, np.int64)
            tokens[:length] = prompt.tokens
            is_cut = limit < length + prompt.max_new_tokens
            yield _Sequence(number, prompt.task, tokens, length, length, limit, is_cut)

    def _groups(self, sequences: Sequence[_Sequence], prompts: Sequence[Prompt]) -> Iterator[list[_Sequence]]:
        """Sequences that are generated together, about equally long ones."""
        group: list[_Sequence] = []
        for sequence in sequences:
            sizes = [prompts[member.number].batch_size or len(prompts) for member in (*group, sequence)]
            full = (len(group) + 1) * self._positions([*group, sequence]) > CACHE_POSITIONS
            if group and (full or len(group) >= min(sizes)):
                yield group
                group = []
            group.append(sequence)
        if group:
            yield group

    def _positions(self, group: Sequence[_Sequence]) -> int:
        """Positions of the longest sequence."""
        return max((s.limit + self.members[s.task].position_offset for s in group), default=0)

    def _generated(self, group: list[_Sequence]) -> dict[int, Completion]:
        """Generate a group, in halves if there is no memory for it; every rank of the pipeline calls it.

        Raises:
            SharedError: One sequence alone does not fit.
        """
        failed = self._tried(group)
        if self.trials is None or not self._agree(bool(failed)):
            failed = FailedBuckets(1, self.stages.values(), self.parallel)
            completions = self._completions(group, failed)
            if not self._agree(bool(failed)):
                return completions
        if not self._agree(len(group) > 1):
            raise SharedError(f"one sequence to generate alone ran out of memory ({self._reason(failed)})")
        for sequence in group:
            sequence.length = sequence.prompt
        half = (len(group) + 1) // 2
        return self._generated(group[:half]) | self._generated(group[half:])

    def _agree(self, flag: bool) -> bool:
        """Whether some rank raises a flag, of the pipeline, or of all where they keep in step; all of them call it."""
        if self.parallel.world_size == 1:
            return flag
        value = torch.tensor([int(flag)], device=self.parallel.device)
        dist.all_reduce(
            value, op=dist.ReduceOp.MAX, group=None if self.in_step else self.parallel.model_group
        )
        return bool(value.item())

    def _reason(self, failed: FailedBuckets) -> str:
        """Where and why memory ran out first; the ranks of `_agree` call it."""
        if self.parallel.world_size == 1:
            return failed.reason
        group = None if self.in_step else self.parallel.model_group
        reasons = [""] * dist.get_world_size(group)
        dist.all_gather_object(reasons, failed.reason, group=group)
        return next(filter(None, reasons), "")

    def _tried(self, group: list[_Sequence]) -> FailedBuckets:
        """Whether a group runs out of memory on this rank, unless one as large has fitted."""
        failed = FailedBuckets(1, self.stages.values(), self.parallel, recovers=False)
        size = len(group) * self._positions(group)
        if self.trials is not None and group and size > max(self._fitted, default=0):
            self.trials.run(failed, lambda: self._try(group, failed))
            if not failed:
                self._fitted.append(size)
        return failed

    def _try(self, group: list[_Sequence], failed: FailedBuckets) -> None:
        """A group's first passes, with all of its cache, and one more."""
        group = self._in_task_order(group)
        cache = self._cache(group)
        self._next(self._prompt_passes(group, cache), failed)
        for sequence in group:
            sequence.length += 1
        self._next([self._pack(group, cache, _last_token)], failed)
        for sequence in group:
            sequence.length = sequence.prompt

    def _completions(self, group: list[_Sequence], failed: FailedBuckets) -> dict[int, Completion]:
        done: dict[int, Completion] = {}
        active = self._in_task_order(group)
        cache = self._cache(active)
        batches = self._prompt_passes(active, cache)
        while batches:
            tokens = self._next(batches, failed)
            ended = []
            for sequence, token in zip(active, tokens, strict=True):
                finish = self._advance(sequence, token)
                if finish is not None:
                    generated = sequence.tokens[sequence.prompt : sequence.length].tolist()
                    done[sequence.number] = Completion(tuple(generated), finish)
                    ended.append(sequence)
            cache.drop(sequence.name for sequence in ended)
            active = [sequence for sequence in active if sequence.number not in done]
            batches = []
            if self._any(bool(active)):
                begins_anew = bool(self._switches) and self._any(any(map(self._changes_angles, active)))
                batches = (
                    self._prompt_passes(active, cache)
                    if begins_anew
                    else [self._pack(active, cache, _last_token)]
                )
        return done

    def _any(self, flag: bool) -> bool:
        """Whether this pipeline, or another one that keeps in step with it, raises a flag."""
        return self._agree(flag) if self.in_step else flag

    @property
    def _switches(self) -> set[int]:
        """Positions beyond which `longrope` has other angles, for all tokens of a sequence."""
        ropes = next(iter(self.stages.values())).shape.ropes
        return {
            rope.original_max_position_embeddings
            for rope in ropes
            if rope is not None and rope.rope_type == "longrope"
        }

    def _changes_angles(self, sequence: _Sequence) -> bool:
        """Whether the last token changed the angles of all before it: their keys are computed again."""
        return sequence.length + self.members[sequence.task].position_offset - 1 in self._switches

    def _advance(self, sequence: _Sequence, token: int) -> Finish | None:
        """Append a token; why the sequence has ended, if it has."""
        if token in self.stop:
            return "stop"
        sequence.tokens[sequence.length] = token
        sequence.length += 1
        if sequence.length < sequence.limit:
            return None
        return "positions" if sequence.is_cut else "length"

    def _in_task_order(self, group: Sequence[_Sequence]) -> list[_Sequence]:
        """As `pack` orders them."""
        order = {name: i for i, name in enumerate(self.members)}
        return sorted(group, key=lambda sequence: order[sequence.task])

    def _cache(self, group: Sequence[_Sequence]) -> KeyValueCache:
        return KeyValueCache([sequence.name for sequence in group], self._positions(group))

    def _prompt_passes(self, group: Sequence[_Sequence], cache: KeyValueCache) -> list[PackedBatch]:
        """Micro-batches of whole prompts, of about `TOKENS_PER_PASS`; at least one, as many on all ranks in step."""
        passes = self.as_many_everywhere(list(filled(group, lambda s: s.length, TOKENS_PER_PASS)) or [[]])
        return [self._pack(members, cache, lambda s: (0, s.length)) for members in passes]

    def _pack(
        self,
        sequences: Sequence[_Sequence],
        cache: KeyValueCache,
        span: Callable[[_Sequence], tuple[int, int]],
    ) -> PackedBatch:
        """The micro-batch of some tokens of sequences.

        Args:
            sequences: In the order of their tasks.
            cache: Of their keys and values.
            span: Returns the first token of a sequence that is taken, and one past the last.
        """
        host = pack(
            [sequence.packed() for sequence in sequences],
            tuple(self.members),
            {name: task.step for name, task in self.members.items()},
            {name: task.position_offset for name, task in self.members.items()},
            self.multiple,
            training=False,
            spans=[span(sequence) for sequence in sequences],
            slots={name: task.slot for name, task in self.members.items()},
        )
        # The token that is to be predicted is not there yet.
        segments = tuple(replace(segment, positions=segment.positions - 1) for segment in host.segments)
        return replace(host, segments=segments).to(self.parallel.device, cache=cache)

    def _next(self, batches: Sequence[PackedBatch], failed: FailedBuckets) -> list[int]:
        """Run passes; returns the likeliest next token of each of their sequences, on every rank of the pipeline."""
        compute = GenerationCompute(self.stages, batches, failed)
        self.run(compute)
        tokens = torch.cat(compute.tokens)
        if self.parallel.pp_size > 1:
            dist.broadcast(tokens, src=self.parallel.pipeline_ranks[-1], group=self.parallel.pp_group)
        labels: list[int] = tokens.tolist()
        return labels


def _last_token(sequence: _Sequence) -> tuple[int, int]:
    return sequence.length - 1, sequence.length
