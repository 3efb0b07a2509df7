"""Completions that come and go: a pass gives each of them one token, whatever adapters they have."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import torch
import torch.distributed as dist

from megatron_mux.batch.packed_batch import PackedBatch
from megatron_mux.engine.agreement import everyones
from megatron_mux.engine.generation.passes import Finish, GrowingSequence, Prompt, TokenPasses
from megatron_mux.engine.generation.sampling import Draws, Sampling, SamplingCompute
from megatron_mux.engine.out_of_memory import FailedBuckets
from megatron_mux.kernels.attention.key_value_cache import KeyValueCache
from megatron_mux.tasks.evaluation import TOKENS_PER_PASS

MOST_ACTIVE = 64
"""Sequences of a pass: the logits of all of them are held at once."""
OPEN_POSITIONS = 16 * TOKENS_PER_PASS
"""Positions whose keys and values are kept at most: the sequences times the longest one. Others wait. A longer sequence
is generated alone."""


@dataclass(frozen=True)
class News:
    """What a pass has found for a completion.

    Attributes:
        key: Of the completion.
        token: The next token; None: there is none, it has ended.
        log_prob: Of the token.
        top: The likeliest tokens in its place, with their log-probabilities.
        finish: Why it has ended, if it has.
        problem: Why it cannot go on; empty: it can.
    """

    key: Hashable
    token: int | None = None
    log_prob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()
    finish: Finish | None = None
    problem: str = ""


@dataclass
class _Open:
    """A completion.

    Attributes:
        key: As callers name it.
        sequence: Its tokens.
        sampling: How they are chosen.
        is_here: Whether this rank's pipeline generates it.
    """

    key: Hashable
    sequence: GrowingSequence
    sampling: Sampling
    is_here: bool

    @property
    def uniform(self) -> float:
        """The random number of [0, 1) for the next token: it depends on the seed and the place alone."""
        place = self.sequence.length - self.sequence.prompt
        return float(np.random.default_rng([self.sampling.seed % 2**64, place]).random())


@dataclass(frozen=True)
class OpenCompletions(TokenPasses):
    """Continues sequences that are opened and closed between passes; data-parallel ranks share them.

    Every rank makes the same calls. `members` may change between passes, but for those of open completions.
    """

    _active: dict[tuple[str, int], _Open] = field(default_factory=dict)  # by the sequence's name
    _waiting: list[_Open] = field(default_factory=list)
    _caches: list[KeyValueCache] = field(default_factory=list)  # one, once something is active here
    _numbers: Iterator[int] = field(default_factory=count)

    def __len__(self) -> int:
        """Completions that are open on any rank."""
        return len(self._active) + len(self._waiting)

    def members_in_use(self) -> set[str]:
        """The members of open completions."""
        return {own.sequence.task for own in (*self._active.values(), *self._waiting)}

    def open(self, key: Hashable, prompt: Prompt, sampling: Sampling) -> None:
        """Continue a prompt from the next pass on.

        Raises:
            ValueError: The backbone has no position for another token.
        """
        sequence = self.sequence_of(number := next(self._numbers), prompt)
        mine = number % self.parallel.dp_size == self.parallel.dp_rank
        self._waiting.append(_Open(key, sequence, sampling, mine and self.parallel.experts.holds_rows))

    def close(self, key: Hashable) -> None:
        """Forget a completion; one that is over is forgotten already."""
        self._waiting[:] = [own for own in self._waiting if own.key != key]
        self._leave([own for own in self._active.values() if own.key == key])

    def run_pass(self) -> list[News]:
        """Give every completion that is not waiting its next token; returns the same on every rank."""
        new = self._admit()
        news = self._news(new)
        one_pipeline = self.parallel.world_size == self.parallel.pp_size * self.parallel.tp_size
        if not one_pipeline:
            speaks = self.parallel.is_first_stage and self.parallel.tp_rank == 0
            told = everyones(news if speaks else [], self.parallel)
            news = [own for some in told for own in some]
        over = {own.key for own in news if own.finish or own.problem}
        self._leave([own for own in self._active.values() if own.key in over])
        return news

    def _admit(self) -> list[_Open]:
        """Let those begin that there is room for, in their order."""
        new: list[_Open] = []
        while self._waiting:
            longest = self.positions([own.sequence for own in (*self._active.values(), self._waiting[0])])
            many = len(self._active) + 1
            if self._active and (many > MOST_ACTIVE or many * longest > OPEN_POSITIONS):
                break
            begun = self._waiting.pop(0)
            self._active[begun.sequence.name] = begun
            new.append(begun)
        return new

    def _leave(self, over: Iterable[_Open]) -> None:
        for own in list(over):
            del self._active[own.sequence.name]
            if own.is_here and self._caches:
                self._caches[0].drop([own.sequence.name])
        if not any(own.is_here for own in self._active.values()):
            self._caches.clear()

    def _news(self, new: Sequence[_Open]) -> list[News]:
        """Run a pass of what this pipeline generates."""
        begun = [own.sequence for own in new if own.is_here]
        here = [own.sequence for own in self._active.values() if own.is_here]
        failed = FailedBuckets(1, self.stages.values(), self.parallel)
        if begun or not self._caches:
            self._make_room(begun, self.positions(here), failed)
        if new and self.agree(bool(failed)):
            return self._without_memory(new, failed)
        if self.switches and self.any_rank(any(map(self.changes_angles, here))):
            begun = here
        going = [sequence for sequence in here if sequence not in begun]
        batches: list[PackedBatch] = []
        if self.any_rank(bool(begun)):
            batches += self.prompt_passes(self.in_task_order(begun), self._caches[0])
        if self.any_rank(bool(going)):
            batches.append(self.step_pass(self.in_task_order(going), self._caches[0]))
        if not batches:
            return []
        members = [[self._active[segment.task, segment.sequence] for segment in b.segments] for b in batches]
        chosen = self._choose(batches, members, failed)
        if self.agree(bool(failed)):
            return self._without_memory(new or list(self._active.values()), failed)
        every = [own for some in members for own in some]
        return [self._one(own, row) for own, row in zip(every, chosen, strict=True)]

    def _make_room(self, begun: Sequence[GrowingSequence], positions: int, failed: FailedBuckets) -> None:
        """Have a cache with room for sequences that begin, and for so many positions of each sequence."""
        if not self._caches:
            self._caches.append(KeyValueCache([], 0))
        try:
            self._caches[0].add([sequence.name for sequence in begun], positions)
        except torch.OutOfMemoryError as error:
            failed.note(failed.at, error)
        if failed:  # outside the handler, whose traceback keeps tensors
            failed.free()

    def _without_memory(self, lost: Iterable[_Open], failed: FailedBuckets) -> list[News]:
        """What this pipeline's completions among those that are lost for want of memory are told."""
        why = f"there is no memory for it ({self.reason(failed)})"
        return [News(own.key, problem=why) for own in lost if own.is_here]

    def _choose(
        self, batches: Sequence[PackedBatch], members: Sequence[Sequence[_Open]], failed: FailedBuckets
    ) -> list[list[float]]:
        """Run passes; returns a row of `choose` for each of their sequences, on every rank of the pipeline."""
        top = max((own.sampling.top for some in members for own in some), default=0)
        draws = [
            Draws.of([own.sampling for own in some], [own.uniform for own in some], top, self.parallel.device)
            for some in members
        ]
        compute = SamplingCompute(self.stages, batches, draws, failed)
        self.run(compute)
        chosen = self.on_every_stage(torch.cat(compute.chosen))
        if self.parallel.tp_size > 1:  # kernels may round differently on each rank
            group = self.parallel.tp_group
            dist.broadcast(chosen, src=dist.get_global_rank(group, 0), group=group)
        rows: list[list[float]] = chosen.tolist()
        return rows

    def _one(self, own: _Open, row: Sequence[float]) -> News:
        """Append the token that was chosen for a completion."""
        token, log_prob, top = int(row[0]), row[1], (len(row) - 2) // 2
        if token < 0:
            return News(own.key, problem="its logits are not finite")
        finish = self.advance(own.sequence, token)
        if finish == "stop":
            return News(own.key, finish=finish)
        likeliest = zip(map(int, row[2 : 2 + top]), row[2 + top :], strict=True)
        return News(own.key, token, log_prob, tuple(likeliest)[: own.sampling.top], finish)
