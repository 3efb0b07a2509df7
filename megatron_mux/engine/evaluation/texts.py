"""What tasks generate on their held-out prompts: exact match, ROUGE, and samples to look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from megatron_mux.data.dataset import TaskDataset
from megatron_mux.data.stop_tokens import stop_tokens
from megatron_mux.engine.evaluation.evaluator import EvalResult, Sample
from megatron_mux.engine.evaluation.held_out import HeldOut, Tokens, Unprompted, prompt_and_completion
from megatron_mux.engine.generation.generator import Generator
from megatron_mux.engine.generation.passes import Completion, Prompt
from megatron_mux.errors import SharedError
from megatron_mux.runtime import Parallel
from megatron_mux.tasks.evaluation import GenerateSpec

MakeGenerator = Callable[[Collection[int]], Generator]
"""Makes a generator that stops at some tokens."""

PROMPTS_AT_ONCE = 1024
"""Prompts that are read at a time for each pipeline: only so many are in memory, however long the files are."""

_ROUGE = ("rouge1", "rouge2", "rougeL")


@dataclass(frozen=True)
class _Asked:
    """A held-out record as a prompt.

    Attributes:
        prompt: `[L]` int64.
        reference: The record's own completion, tokens, uncut.
    """

    task: str
    prompt: Tokens
    reference: Tokens


@dataclass
class _Texts:
    """What is known of a task's texts so far."""

    task: HeldOut
    count: int = 0
    exact: int = 0
    rouge: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_ROUGE, 0.0))
    samples: list[Sample] = field(default_factory=list)
    unprompted: Counter[Unprompted] = field(default_factory=Counter)
    at_length: int = 0
    at_positions: int = 0

    @property
    def numbers(self) -> range:
        """The records to generate for."""
        count = len(self.task.records)
        return range(count if self.task.measures_texts else min(count, self.generates.samples))

    def add(self, asked: _Asked, completion: Completion) -> None:
        """Count a completion."""
        text = self._text(completion.tokens)
        wanted = self._text(asked.reference.tolist())
        self.count += 1
        self.at_length += completion.finish == "length"
        self.at_positions += completion.finish == "positions"
        self.exact += text == wanted
        if "rouge" in self.task.metrics:
            scores = self._scorer.score(wanted, text)
            for name in _ROUGE:
                self.rouge[name] += scores[name].fmeasure
        if len(self.samples) < self.generates.samples:
            prompt = str(self._tokenizer.decode(asked.prompt.tolist()))
            self.samples.append(Sample(prompt, text, wanted))

    def completed(self, result: EvalResult) -> EvalResult:
        """The evaluation's result with what was generated."""
        values, count = dict(result.values), max(self.count, 1)
        if "exact_match" in self.task.metrics:
            values["exact_match"] = self.exact / count
        if "rouge" in self.task.metrics:
            values |= {name: total / count for name, total in self.rouge.items()}
        longest = self.generates.max_new_tokens
        notes = {
            **{f"records have {why.value}": self.unprompted[why] for why in Unprompted},
            f"completions have max_new_tokens ({longest}) and no end": self.at_length,
            "completions were cut at the last position of the backbone": self.at_positions,
        }
        seen = self.count + self.unprompted.total()
        said = tuple(f"{number} of {seen} {what}" for what, number in notes.items() if number)
        return replace(result, values=values, samples=tuple(self.samples), notes=said)

    @property
    def generates(self) -> GenerateSpec:
        """What is generated."""
        assert self.task.generates is not None
        return self.task.generates

    @property
    def _tokenizer(self) -> Any:
        return self.task.tokenizer

    @cached_property
    def _scorer(self) -> Any:
        # An extra: a task file that asks for it is refused without it.
        from rouge_score.rouge_scorer import RougeScorer

        return RougeScorer(list(_ROUGE))

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()


def with_texts(
    results: Mapping[str, EvalResult | SharedError],
    tasks: Sequence[HeldOut],
    make: MakeGenerator,
    parallel: Parallel,
) -> dict[str, EvalResult | SharedError]:
    """Add what tasks generate to the results of those that ask for it; every rank calls it.

    Args:
        results: By task, what was found without generating.
        tasks: In the same order on every rank.
        make: Makes the generator.
        parallel: Where this rank stands.

    Returns:
        By task, its result; or why there is none.
    """
    given = dict(results)
    texts = {t.name: _Texts(t) for t in tasks if t.generates and isinstance(given[t.name], EvalResult)}
    if not texts:
        return given
    problems: dict[str, SharedError] = {}
    generator = make(stop_tokens(next(iter(texts.values())).task.tokenizer))
    for asked in _prompts(texts, problems, parallel):
        for prompt, completion in zip(asked, _completions(asked, texts, generator, problems), strict=True):
            if completion is not None:
                texts[prompt.task].add(prompt, completion)
    for name, counts in texts.items():
        result = given[name]
        assert isinstance(result, EvalResult)
        given[name] = problems[name] if name in problems else counts.completed(result)
    return given


def _completions(
    asked: Sequence[_Asked],
    texts: Mapping[str, _Texts],
    generator: Generator,
    problems: dict[str, SharedError],
) -> list[Completion | None]:
    """The completions, all tasks at once; task by task if one of them has no memory for a sequence."""

    def prompts(of: Sequence[_Asked]) -> list[Prompt]:
        return [
            Prompt(
                prompt.task,
                prompt.prompt,
                texts[prompt.task].generates.max_new_tokens,
                texts[prompt.task].task.batch_size,
            )
            for prompt in of
        ]

    try:
        return list(generator.generate(prompts(asked)))
    except SharedError:  # on every rank
        completions: list[Completion | None] = [None] * len(asked)
        for name in texts:
            at = [i for i, prompt in enumerate(asked) if prompt.task == name]
            try:
                for i, text in zip(at, generator.generate(prompts([asked[i] for i in at])), strict=True):
                    completions[i] = text
            except SharedError as error:
                problems[name] = error
        return completions


def _prompts(
    texts: Mapping[str, _Texts], problems: dict[str, SharedError], parallel: Parallel
) -> Iterator[list[_Asked]]:
    """Yield prompts, task after task, some at a time: the same on every rank, which reads all of them."""
    numbers = [(name, number) for name, of_task in texts.items() for number in of_task.numbers]
    size = PROMPTS_AT_ONCE * parallel.dp_size
    for start in range(0, len(numbers), size):
        asked: list[_Asked] = []
        for name, number in numbers[start : start + size]:
            if name in problems:
                continue
            prompt = _asked(texts[name].task, number)
            if isinstance(prompt, Unprompted):
                texts[name].unprompted[prompt] += 1
            else:
                asked.append(prompt)
        yield asked


def _asked(task: HeldOut, number: int) -> _Asked | Unprompted:
    assert isinstance(task.records, TaskDataset)  # see `HeldOut.generates`
    record = prompt_and_completion(task.records, number)
    return record if isinstance(record, Unprompted) else _Asked(task.name, *record)
