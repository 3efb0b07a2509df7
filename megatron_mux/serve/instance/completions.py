"""Continues conversations between the steps of jobs, with adapters that are attached for that alone."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron_mux.chat.prompts import prompt_tokens
from megatron_mux.chat.speakers import read_speaker
from megatron_mux.data.stop_tokens import stop_tokens
from megatron_mux.engine.agreement import computed_by_first, first_problem
from megatron_mux.engine.generation.completions import OPEN_POSITIONS, News, OpenCompletions
from megatron_mux.engine.generation.passes import Prompt
from megatron_mux.engine.generation.sampling import Sampling
from megatron_mux.errors import UserError, failed_allocation
from megatron_mux.serve.channel.messages import (
    Abandon,
    Broken,
    Complete,
    LogProb,
    Message,
    Piece,
    TokenLogProb,
)
from megatron_mux.serve.instance.streamed_text import StreamedText
from megatron_mux.training.callback import Callback
from megatron_mux.training.step_loop import Due
from megatron_mux.training.task_registry import TaskRegistry

MOST_ADAPTERS = 32
"""Adapters that are attached for completions; the one that was used longest ago leaves for another."""
UNBOUNDED_TOKENS = 1024
"""Tokens that a completion gets at most whose client asks for no bound."""
LONGEST = OPEN_POSITIONS // 4
"""Tokens of a conversation with what is generated."""
_MOST_CHARACTERS = 32
"""Of a conversation for each token that it may have; a longer one is not even tokenised."""
_MOST_SECONDS = 1.0
"""Commands are looked at so often while completions have much time."""
_IDLE_SECONDS = 0.2
"""Passes follow each other for so long before commands are looked at, where nothing trains."""
_BARE = "backbone"
_LEAST = -9999.0
"""A log-probability of minus infinity is told as this one, as in OpenAI's API: JSON has no infinity."""


class _Member(NamedTuple):
    """See `engine.generation.passes.Attached`."""

    slot: int | None
    position_offset: int
    step: int


class _Key(NamedTuple):
    """One choice of a request."""

    id: str
    choice: int


@dataclass
class _Choice:
    """What is known of one choice of a request."""

    request: Complete
    prompt_tokens: int
    text: StreamedText


@dataclass(eq=False)
class Completions(Callback):
    """Follows `Complete` and `Abandon`. Every rank has one, and decides alike.

    Attributes:
        root: The service's directory.
        send: Has the server told something at once; None on ranks that tell nobody.
        share: Of the time, that completions get while jobs train.
    """

    root: Path
    send: Callable[[Message], None] | None
    share: float = 0.5
    arrived: threading.Event = field(default_factory=threading.Event)
    _registry: TaskRegistry = field(init=False)
    _completions: OpenCompletions = field(init=False)
    _members: dict[str, _Member] = field(default_factory=dict)
    _adapters: OrderedDict[str, None] = field(default_factory=OrderedDict)  # attached, the newest used last
    _choices: dict[_Key, _Choice] = field(default_factory=dict)
    _tokenizer: Any = None
    _step_seconds: float = 0.0
    _owed: float = 0.0  # seconds that completions may still take before the next steps
    _pass_seconds: float = 0.05

    # -- the run

    def set_up(self, registry: TaskRegistry) -> None:
        """See `Callback`."""
        self._registry, self._tokenizer = registry, registry.files.tokenizer
        self._members[_BARE] = _Member(None, 0, 0)
        self._completions = registry.engine.completions(self._members, stop_tokens(self._tokenizer))

    def told(self, content: object) -> None:
        """See `Callback`."""
        if isinstance(content, Complete):
            started = time.perf_counter()
            try:
                self._open(content)
            except UserError as error:
                self._break(content.id, "; ".join(error.problems), is_clients=True)
            self._owed -= time.perf_counter() - started
        elif isinstance(content, Abandon):
            self._close(content.id)

    def due(self, seconds: float) -> Iterable[Due]:
        """See `Callback`: while completions are open, they get their turn after each step."""
        self._step_seconds = seconds
        if len(self._completions):
            yield 1, 1

    def after_steps(self, steps: int) -> None:
        """See `Callback`."""
        earned = steps * self._step_seconds * self.share / (1.0 - self.share)
        # No more is kept than the next pass takes: what nobody asked for is not made up for later.
        self._owed = min(self._owed, self._pass_seconds) + earned

    def between_steps(self) -> bool:
        """See `Callback`."""
        engine = self._registry.engine
        if not len(self._completions):
            self._owed = 0.0
            return False
        if not engine.active:
            self._owed = max(self._pass_seconds, _IDLE_SECONDS)
        passes, more = computed_by_first(self._turn, engine.parallel)
        engine.adapters.prepare()
        for _ in range(passes):
            started = time.perf_counter()
            self._tell(self._completions.run_pass())
            taken = time.perf_counter() - started
            self._owed -= taken
            self._pass_seconds += 0.2 * (taken - self._pass_seconds)
            if not len(self._completions):
                break
        return bool(len(self._completions)) and (more or not engine.active)

    def _turn(self) -> tuple[int, bool]:
        """How many passes follow, and whether more are due once commands have been looked at."""
        passes = int(min(self._owed, max(self._pass_seconds, _MOST_SECONDS)) / self._pass_seconds + 1e-6)
        return passes, self._owed - passes * self._pass_seconds > self._pass_seconds

    def idle(self, seconds: float) -> None:
        """See `Callback`: until a command has arrived."""
        if self.send is None:
            time.sleep(seconds)
        else:
            self.arrived.wait(seconds)
            self.arrived.clear()

    def close(self) -> None:
        """See `Callback`."""
        for own in {key.id for key in self._choices}:
            self._break(own, "its instance has ended")

    # -- requests

    def _open(self, request: Complete) -> None:
        """Begin with a request's choices.

        Raises:
            UserError: It cannot be continued, because of what was asked for.
        """
        if any(key.id == request.id for key in self._choices):
            return
        shape = self._registry.engine.backbone.shape
        limit = min(LONGEST, shape.position_limit or LONGEST)
        if sum(len(message["content"]) for message in request.messages) > _MOST_CHARACTERS * limit:
            raise UserError(f"the conversation has more than the {limit} tokens that it may have: shorten it")
        tokens = np.array(prompt_tokens(self._tokenizer, request.messages), np.int64)
        if len(tokens) > limit:
            raise UserError(f"the conversation has {len(tokens)} tokens, and may have {limit}: shorten it")
        if tokens.max() >= shape.vocab:
            raise UserError(f"the tokenizer has a token that the model has not: {tokens.max()}")
        member, problem = self._member(request.adapter)
        if problem:
            self._break(request.id, problem)
            return
        if len(tokens) > (limit := limit - self._members[member].position_offset):
            raise UserError(f"the conversation has {len(tokens)} tokens, and may have {limit}: shorten it")
        most = min(request.max_tokens or UNBOUNDED_TOKENS, LONGEST - len(tokens) + 1)
        for choice in range(request.choices):
            key = _Key(request.id, choice)
            sampling = Sampling(
                request.temperature, request.top_p, request.top_k, request.seed + choice, request.top_log_probs or 0
            )  # fmt: skip
            self._completions.open(key, Prompt(member, tokens, most), sampling)
            self._choices[key] = _Choice(request, len(tokens), StreamedText(self._tokenizer, request.stop))

    def _member(self, adapter: str) -> tuple[str, str]:
        """The member that has an adapter, attached if it was not; or what keeps it from being attached."""
        if not adapter:
            return _BARE, ""
        name = f"completions@{adapter}"
        if name not in self._adapters:
            used = self._completions.members_in_use()
            spare = [other for other in self._adapters if other not in used]
            if len(self._adapters) >= MOST_ADAPTERS:
                if not spare:
                    return "", f"{MOST_ADAPTERS} other adapters are generating: try again later"
                self._detach(spare[0])
            if problem := self._attach(name, self.root / adapter):
                return "", problem
        self._adapters[name] = None
        self._adapters.move_to_end(name)
        return name, ""

    def _attach(self, name: str, directory: Path) -> str:
        """Attach an adapter, without an optimizer; returns what is wrong, the same on every rank."""
        engine, problem = self._registry.engine, ""
        try:
            speaker = read_speaker("adapter", directory, self._registry.info, self._registry.reporter.say)
            assert speaker.spec is not None
            spec = speaker.spec.model_copy(update={"name": name})
            attached = engine.adapters.add(spec, 1, speaker.tensors)
            self._members[name] = _Member(attached.slot, spec.adapter.virtual_tokens, 1)
        except torch.OutOfMemoryError as error:
            problem = f"there is no memory for its adapter ({failed_allocation(error)})"
        except Exception as error:  # whatever it is: other ranks wait, and it may name paths of the server's
            self._registry.reporter.say(f"completions: {error}")
            problem = "its adapter cannot be read"
        if problem := first_problem(problem, engine.parallel):
            self._detach(name)
        engine.forget_trials()  # there is less memory
        return problem

    def _detach(self, name: str) -> None:
        self._adapters.pop(name, None)
        self._members.pop(name, None)
        engine = self._registry.engine
        if name in engine.adapters.tasks:
            engine.adapters.remove(name)
            engine.forget_trials()

    def _close(self, own: str) -> None:
        """Forget a request."""
        for key in [key for key in self._choices if key.id == own]:
            del self._choices[key]
            self._completions.close(key)

    def _break(self, own: str, message: str, is_clients: bool = False) -> None:
        """Tell that a request is over before its end, and forget it."""
        self._close(own)
        if self.send is not None:
            self.send(Broken(id=own, message=message, is_clients=is_clients))

    # -- what comes of them

    def _tell(self, news: Sequence[News]) -> None:
        """Tell the server what a pass has found."""
        for own in news:
            key = own.key
            assert isinstance(key, _Key)
            choice = self._choices.get(key)
            if choice is None:
                continue  # its request is over
            if own.problem:
                self._break(key.id, own.problem)
                continue
            text = "" if own.token is None else choice.text.add(own.token)
            finish = "stop" if choice.text.is_stopped else own.finish
            if finish is not None:
                text += choice.text.end()
                self._completions.close(key)  # a text has stopped it
                del self._choices[key]
            log_probs = [] if choice.request.top_log_probs is None else self._log_probs(own)
            if self.send is not None and (text or log_probs or finish):
                self.send(
                    Piece(
                        id=key.id,
                        choice=key.choice,
                        text=text,
                        log_probs=log_probs,
                        finish=None if finish is None else "stop" if finish == "stop" else "length",
                        prompt_tokens=choice.prompt_tokens,
                        completion_tokens=len(choice.text.tokens),
                    )
                )

    def _log_probs(self, own: News) -> list[TokenLogProb]:
        if own.token is None:
            return []
        top = [LogProb(**self._named(token), log_prob=max(value, _LEAST)) for token, value in own.top]
        return [TokenLogProb(**self._named(own.token), log_prob=max(own.log_prob, _LEAST), top=top)]

    def _named(self, token: int) -> dict[str, Any]:
        text = str(self._tokenizer.decode([token]))
        is_whole = "\ufffd" not in text  # not a part of a character
        return {"token": text, "bytes": list(text.encode()) if is_whole else None}
