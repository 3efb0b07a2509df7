"""Passes that generate: prompts of several tasks, and then a token of every sequence, each with its own adapter.

A prompt's first pass leaves its keys and values in a cache; each later pass takes the last token of every sequence that
goes on. The last stage's tokens go to all stages, since each lays out the next pass by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.batch.pack import PackedSequence, pack
from megatron_mux.batch.packed_batch import PackedBatch
from megatron_mux.engine.forward_compute import PassRunner
from megatron_mux.engine.out_of_memory import FailedBuckets
from megatron_mux.kernels.attention.key_value_cache import KeyValueCache
from megatron_mux.tasks.evaluation import TOKENS_PER_PASS, filled

Finish = Literal["stop", "length", "positions"]
"""Why a sequence ended: with a stop token, at its maximum length, or at the last position of the backbone."""


class Attached(Protocol):
    """How a task takes part in a pass: a `TaskState`."""

    @property
    def slot(self) -> int | None:
        """Its number among the attached tasks: see `RowGroups`. None: it has no adapter."""

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
class GrowingSequence:
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
class TokenPasses(PassRunner):
    """Lays out and runs the passes of sequences that are generated.

    Attributes:
        members: The tasks by name, in one order on every rank.
        stop: Tokens that end a sequence.
    """

    members: Mapping[str, Attached] = field(kw_only=True)
    stop: Collection[int] = field(kw_only=True)

    def sequence_of(self, number: int, prompt: Prompt) -> GrowingSequence:
        """Begin a prompt's sequence.

        Raises:
            ValueError: The backbone has no position for another token.
        """
        positions = next(iter(self.stages.values())).shape.position_limit
        length = len(prompt.tokens)
        limit = length + prompt.max_new_tokens
        if positions is not None:
            # The last token that is generated takes no position.
            limit = min(limit, positions - self.members[prompt.task].position_offset + 1)
        if not 0 < length < limit:
            raise ValueError(f"prompt {number} has {length} tokens, and may not have more than {limit - 1}")
        tokens = np.zeros(limit + 1, np.int64)
        tokens[:length] = prompt.tokens
        is_cut = limit < length + prompt.max_new_tokens
        return GrowingSequence(number, prompt.task, tokens, length, length, limit, is_cut)

    def positions(self, group: Sequence[GrowingSequence]) -> int:
        """Positions of the longest sequence."""
        return max((s.limit + self.members[s.task].position_offset for s in group), default=0)

    def agree(self, flag: bool) -> bool:
        """Whether some rank raises a flag, of the pipeline, or of all where they keep in step; all of them call it."""
        if self.parallel.world_size == 1:
            return flag
        value = torch.tensor([int(flag)], device=self.parallel.device)
        dist.all_reduce(
            value, op=dist.ReduceOp.MAX, group=None if self.in_step else self.parallel.model_group
        )
        return bool(value.item())

    def reason(self, failed: FailedBuckets) -> str:
        """Where and why memory ran out first; the ranks of `agree` call it."""
        if self.parallel.world_size == 1:
            return failed.reason
        group = None if self.in_step else self.parallel.model_group
        reasons = [""] * dist.get_world_size(group)
        dist.all_gather_object(reasons, failed.reason, group=group)
        return next(filter(None, reasons), "")

    def any_rank(self, flag: bool) -> bool:
        """Whether this pipeline, or another one that keeps in step with it, raises a flag."""
        return self.agree(flag) if self.in_step else flag

    @property
    def switches(self) -> set[int]:
        """Positions beyond which `longrope` has other angles, for all tokens of a sequence."""
        ropes = next(iter(self.stages.values())).shape.ropes
        return {
            rope.original_max_position_embeddings
            for rope in ropes
            if rope is not None and rope.rope_type == "longrope"
        }

    def changes_angles(self, sequence: GrowingSequence) -> bool:
        """Whether the last token changed the angles of all before it: their keys are computed again."""
        return sequence.length + self.members[sequence.task].position_offset - 1 in self.switches

    def advance(self, sequence: GrowingSequence, token: int) -> Finish | None:
        """Append a token; why the sequence has ended, if it has."""
        if token in self.stop:
            return "stop"
        sequence.tokens[sequence.length] = token
        sequence.length += 1
        if sequence.length < sequence.limit:
            return None
        return "positions" if sequence.is_cut else "length"

    def in_task_order(self, group: Sequence[GrowingSequence]) -> list[GrowingSequence]:
        """As `pack` orders them."""
        order = {name: i for i, name in enumerate(self.members)}
        return sorted(group, key=lambda sequence: order[sequence.task])

    def prompt_passes(self, group: Sequence[GrowingSequence], cache: KeyValueCache) -> list[PackedBatch]:
        """Micro-batches of whole prompts, of about `TOKENS_PER_PASS`; at least one, as many on all ranks in step."""
        passes = self.as_many_everywhere(list(filled(group, lambda s: s.length, TOKENS_PER_PASS)) or [[]])
        return [self._pack(members, cache, lambda s: (0, s.length)) for members in passes]

    def step_pass(self, active: Sequence[GrowingSequence], cache: KeyValueCache) -> PackedBatch:
        """The micro-batch of the last token of sequences, all that the cache has."""
        return self._pack(active, cache, lambda s: (s.length - 1, s.length))

    def _pack(
        self,
        sequences: Sequence[GrowingSequence],
        cache: KeyValueCache,
        span: Callable[[GrowingSequence], tuple[int, int]],
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
            slots={name: task.slot for name, task in self.members.items() if task.slot is not None},
        )
        # The token that is to be predicted is not there yet.
        segments = tuple(replace(segment, positions=segment.positions - 1) for segment in host.segments)
        return replace(host, segments=segments).to(self.parallel.device, cache=cache)

    def on_every_stage(self, found: Tensor) -> Tensor:
        """What the last stage has found, in a tensor of the same shape on every rank of the pipeline."""
        if self.parallel.pp_size > 1:
            dist.broadcast(found, src=self.parallel.pipeline_ranks[-1], group=self.parallel.pp_group)
        return found
