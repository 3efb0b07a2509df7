"""Prompts of several tasks on a tiny backbone, and what `transformers` and `peft` make of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_mux.backbone.model import Backbone
from megatron_mux.engine import Engine
from megatron_mux.engine.generation.completions import News, OpenCompletions
from megatron_mux.engine.generation.passes import Prompt
from megatron_mux.engine.generation.sampling import Sampling
from megatron_mux.runtime import Parallel
from tests.end_to_end.families import FAMILIES, ia3, lora, prefix, vera
from tests.end_to_end.harness import Case, random_records
from tests.reference import greedy, peft_solo

PROMPTS, MOST = 50, 24
VOCABULARY = 96


def cases_of(path: Path) -> list[Case]:
    """Four tasks of different kinds on a Llama, none of them fresh."""
    targets = FAMILIES["llama"]
    sections: dict[str, dict[str, Any]] = {
        "lora": lora(targets.query_value, r=4),
        "prefix": prefix(3),
        "ia3": ia3(targets),
        "vera": vera(targets.query_value, r=8),
    }
    training = {"per_device_train_batch_size": 2, "max_steps": 4}
    return [
        Case(
            name,
            section,
            training,
            random_records(4, VOCABULARY, 4, 8, seed=1),
            peft_solo.random_adapter(path, section, seed=7 + i),
        )
        for i, (name, section) in enumerate(sections.items())
    ]


def prompts_of(cases: Sequence[Case]) -> list[Prompt]:
    """Random prompts of 1 to 20 tokens, the tasks in turn."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for number in range(PROMPTS):
        length = int(torch.randint(1, 21, (1,), generator=generator))
        tokens = torch.randint(3, VOCABULARY, (length,), generator=generator)
        found.append(Prompt(cases[number % len(cases)].name, tokens.numpy(), MOST))
    return found


def reference(
    path: Path, cases: Sequence[Case], prompts: Sequence[Prompt], stop: Sequence[int]
) -> list[greedy.Greedy]:
    """What `transformers` and `peft` generate."""
    models = {
        case.name: peft_solo.wrap(peft_solo.load_model(path), case.adapter, case.initial) for case in cases
    }
    ways = {case.name: greedy.generate for case in cases}
    ways |= {case.name: greedy.generate_by_forward for case in cases if case.spec.adapter.virtual_tokens}
    return [
        ways[prompt.task](models[prompt.task], torch.from_numpy(prompt.tokens), prompt.max_new_tokens, stop)
        for prompt in prompts
    ]


def generated(
    stages: Backbone | Sequence[Backbone],
    parallel: Parallel,
    cases: Sequence[Case],
    prompts: Sequence[Prompt],
    stop: Sequence[int],
    **options: Any,
) -> list[Any]:
    """What the engine generates for all of them at once; `options` are those of `Engine`."""
    engine = Engine(stages, parallel, **options)
    engine.register_tasks([case.task for case in cases])
    try:
        return engine.generate(prompts, stop)
    finally:
        for case in cases:
            engine.remove_task(case.name)


class Member(NamedTuple):
    """An adapter that is attached for generation alone, or the bare backbone."""

    slot: int | None
    position_offset: int
    step: int


def attached(engine: Engine, cases: Sequence[Case]) -> dict[str, Member]:
    """Adapters without optimizers, and the bare backbone."""
    members = {"bare": Member(None, 0, 0)}
    for case in cases:
        adapter = engine.adapters.add(case.spec, 1, case.task.initial)
        members[case.name] = Member(adapter.slot, case.spec.adapter.virtual_tokens, 1)
    engine.adapters.prepare()
    return members


def opened(
    completions: OpenCompletions, coming: Mapping[int, tuple[Prompt, Sampling]], at_once: int = 3
) -> dict[int, list[News]]:
    """Open completions, some before each pass, and run passes until all are over."""
    found: dict[int, list[News]] = {}
    waiting = dict(coming)
    while waiting or len(completions):
        for key in list(waiting)[:at_once]:
            completions.open(key, *waiting.pop(key))
        for news in completions.run_pass():
            assert isinstance(news.key, int)
            found.setdefault(news.key, []).append(news)
    return found


def tokens_of(news: Sequence[News]) -> tuple[int, ...]:
    """The tokens of a completion."""
    return tuple(own.token for own in news if own.token is not None)


def frequent(completions: Sequence[greedy.Greedy]) -> Tensor:
    """How often each token is generated."""
    return torch.bincount(torch.tensor([t for one in completions for t in one.tokens]), minlength=VOCABULARY)
