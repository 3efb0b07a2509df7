"""A conversation with several adapters at once: each keeps its own, and all answer in one batch."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_mux.adapters.attach import AdapterSet
from megatron_mux.adapters.host import Host
from megatron_mux.backbone.model import Backbone
from megatron_mux.chat.prompts import prompt_tokens
from megatron_mux.chat.speakers import Speaker
from megatron_mux.data.stop_tokens import stop_tokens
from megatron_mux.engine.forward_passes import ForwardPasses
from megatron_mux.engine.generation.passes import Finish, Prompt
from megatron_mux.errors import UserError
from megatron_mux.pipeline.communicate import Communicator
from megatron_mux.runtime import Parallel


@dataclass(frozen=True)
class Answer:
    """What one of them said.

    Attributes:
        text: The answer.
        tokens: Its number of tokens.
        finish: Why it ended.
    """

    text: str
    tokens: int
    finish: Finish


@dataclass(frozen=True)
class _Member:
    """See `engine.generation.passes.Attached`."""

    slot: int | None
    position_offset: int
    step: int


class Conversation:
    """Talks to adapters on one backbone.

    Args:
        backbone: The whole backbone.
        parallel: This process alone.
        tokenizer: The backbone's.
        speakers: Who answers.
        max_new_tokens: Maximum number of tokens of an answer.
        plain: Continue texts as they are, even if the tokenizer has a chat template.

    Attributes:
        seconds: The last answers took so long.

    Raises:
        UserError: An adapter does not fit the backbone.
    """

    def __init__(
        self,
        backbone: Backbone,
        parallel: Parallel,
        tokenizer: Any,
        speakers: Sequence[Speaker],
        max_new_tokens: int,
        plain: bool = False,
    ) -> None:
        self.seconds = 0.0
        self._tokenizer = tokenizer
        self._max_new_tokens = max_new_tokens
        self._has_chat_template = bool(tokenizer.chat_template) and not plain
        self._positions = backbone.shape.position_limit
        shape, vocabulary, weights = backbone.shape, backbone.vocabulary_parts, backbone.module_weight
        self._adapters = AdapterSet(
            Host(backbone.base_ops(), parallel, backbone.dtype, shape, vocabulary, weights)
        )
        self._members: dict[str, _Member] = {}
        for speaker in speakers:
            if speaker.spec is not None:
                adapter = self._adapters.add(speaker.spec, 1, speaker.tensors)
                offset = speaker.spec.adapter.virtual_tokens
                self._members[speaker.name] = _Member(adapter.slot, offset, 1)
        self._members |= {speaker.name: _Member(None, 0, 0) for speaker in speakers if speaker.spec is None}
        forward = ForwardPasses({0: backbone}, parallel, Communicator(parallel))
        self._generator = forward.generator(self._members, stop_tokens(tokenizer))
        self._turns: dict[str, list[tuple[str, str]]] = {name: [] for name in self._members}

    @property
    def names(self) -> list[str]:
        """Who can answer."""
        return list(self._members)

    def reset(self) -> None:
        """Begin anew with everyone."""
        for turns in self._turns.values():
            turns.clear()

    def ask(self, text: str, names: Collection[str] | None = None) -> Mapping[str, Answer]:
        """Say something; returns what everyone named answers (None: all of them).

        Raises:
            UserError: A conversation has become longer than the backbone's positions. Nobody has heard the text then.
        """
        asked = [name for name in self._members if names is None or name in names]
        prompts = [Prompt(name, self._prompt(name, text), self._max_new_tokens) for name in asked]
        started = time.perf_counter()
        self._adapters.prepare()
        completions = self._generator.generate(prompts)
        self.seconds = time.perf_counter() - started
        answers: dict[str, Answer] = {}
        for name, completion in zip(asked, completions, strict=True):
            said = str(self._tokenizer.decode(list(completion.tokens), skip_special_tokens=True))
            answers[name] = Answer(said, len(completion.tokens), completion.finish)
            self._turns[name].append((text, said))
        return answers

    def _prompt(self, name: str, text: str) -> Any:
        messages: list[dict[str, str]] = []
        for question, answer in self._turns[name]:
            answer = answer.strip() if self._has_chat_template else answer
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        messages.append({"role": "user", "content": text})
        try:
            tokens = prompt_tokens(self._tokenizer, messages, plain=not self._has_chat_template)
        except UserError as error:
            advice = ": --plain does without it" if self._has_chat_template else ""
            raise UserError(f"{error}{advice}") from error
        limit, own = self._positions, len(tokens) + self._members[name].position_offset
        if limit is not None and own > limit:
            raise UserError(
                f"the conversation with {name} has {own} tokens, and the backbone {limit} positions: /reset begins anew"
            )
        return np.array(tokens, np.int64)
