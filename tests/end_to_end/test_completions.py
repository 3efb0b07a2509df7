"""Completions that come and go are those of `transformers`, and draws are distributed as they are asked to be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_mux.batch.packed_batch import PackedBatch
from megatron_mux.engine import Engine
from megatron_mux.engine.generation import completions as completions_module
from megatron_mux.engine.generation.completions import News
from megatron_mux.engine.generation.passes import Prompt
from megatron_mux.engine.generation.sampling import Sampling
from megatron_mux.kernels.attention.key_value_cache import KeyValueCache
from megatron_mux.runtime import Parallel
from tests.budget import failing
from tests.end_to_end.conftest import BackboneOf, PathOf
from tests.end_to_end.generated import (
    Member,
    attached,
    cases_of,
    frequent,
    opened,
    prompts_of,
    reference,
    tokens_of,
)
from tests.reference.greedy import differences


@pytest.fixture
def path(path_of: PathOf) -> Path:
    return path_of("llama")


@pytest.fixture
def engine(backbone_of: BackboneOf, parallel: Parallel) -> Iterator[Engine]:
    engine = Engine(backbone_of("llama"), parallel)
    yield engine
    for name in list(engine.adapters.tasks):
        engine.adapters.remove(name)


def test_greedy_tokens_are_those_of_transformers_whoever_comes_and_goes(
    engine: Engine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions_module, "OPEN_POSITIONS", 300)  # some have to wait
    cases = cases_of(path)
    prompts = prompts_of(cases)[:24]
    stop = [int(frequent(reference(path, cases, prompts[::4], [])).argmax())]
    wanted = reference(path, cases, prompts, stop)
    completions = engine.completions(attached(engine, cases), stop)
    found = opened(completions, {i: (prompt, Sampling()) for i, prompt in enumerate(prompts)})
    problems, _ = differences([tokens_of(found[i]) for i in range(len(prompts))], wanted)
    assert not problems
    finishes = {found[i][-1].finish for i in range(len(prompts))}
    assert finishes == {"stop", "length"} and not any(
        own.finish for some in found.values() for own in some[:-1]
    )


def test_the_bare_backbone_beside_adapters_and_its_log_probabilities(engine: Engine, path: Path) -> None:
    from transformers import AutoModelForCausalLM

    prompts = prompts_of(cases_of(path))[:5]
    completions = engine.completions(attached(engine, cases_of(path)), [])
    coming = {i: (prompt, Sampling(top=4)) for i, prompt in enumerate(prompts)}
    coming[9] = (Prompt("bare", prompts[0].tokens, 6), Sampling(top=4))
    own = opened(completions, coming)[9]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokens = torch.tensor([[*prompts[0].tokens.tolist(), *tokens_of(own)]])
    with torch.no_grad():
        log_probs = model(tokens).logits[0].log_softmax(-1)[len(prompts[0].tokens) - 1 : -1]
    assert tokens_of(own) == tuple(log_probs.argmax(-1).tolist())
    values, places = log_probs.topk(4)
    for news, value, place in zip(own, values, places, strict=True):
        assert [token for token, _ in news.top] == place.tolist()
        torch.testing.assert_close(torch.tensor([p for _, p in news.top]), value, atol=1e-4, rtol=0)
        assert news.log_prob == news.top[0][1]


def test_a_seed_draws_the_same_beside_others_and_alone(engine: Engine, path: Path) -> None:
    prompts = prompts_of(cases_of(path))[:6]
    members = attached(engine, cases_of(path))
    drawn = Sampling(temperature=1.5, top_p=0.9, top_k=40, seed=5)
    together = opened(engine.completions(members, []), {i: (p, drawn) for i, p in enumerate(prompts)})
    alone = opened(engine.completions(members, []), {3: (prompts[3], drawn)})
    assert tokens_of(together[3]) == tokens_of(alone[3])
    other = opened(engine.completions(members, []), {3: (prompts[3], Sampling(1.5, 0.9, 40, seed=6))})
    assert tokens_of(other[3]) != tokens_of(alone[3])


def test_one_that_is_closed_leaves_and_the_others_go_on(engine: Engine, path: Path) -> None:
    prompts = prompts_of(cases_of(path))[:4]
    members = attached(engine, cases_of(path))
    wanted = opened(engine.completions(members, []), {i: (p, Sampling()) for i, p in enumerate(prompts)})
    completions = engine.completions(members, [])
    for i, prompt in enumerate(prompts):
        completions.open(i, prompt, Sampling())
    found = {i: list[News]() for i in range(4)}
    for number in range(100):
        if number == 5:
            completions.close(1)
        for news in completions.run_pass():
            assert isinstance(news.key, int)
            found[news.key].append(news)
    assert len(found[1]) == 5 and len(completions) == 0 and not completions.members_in_use()
    assert all(tokens_of(found[i]) == tokens_of(wanted[i]) for i in (0, 2, 3))


def test_one_without_memory_ends_and_the_others_go_on(engine: Engine, path: Path) -> None:
    prompts = prompts_of(cases_of(path))[:4]
    members = attached(engine, cases_of(path))
    wanted = opened(engine.completions(members, []), {i: (p, Sampling()) for i, p in enumerate(prompts)})
    completions = engine.completions(members, [])
    found = {i: list[News]() for i in range(5)}
    for i, prompt in enumerate(prompts):
        completions.open(i, prompt, Sampling())

    def lacks(batch: PackedBatch) -> bool:
        return "bare" in batch.task_rows

    def has(batch: PackedBatch) -> bool:
        return False

    for number in range(40):
        if number == 3:
            completions.open(4, Prompt("bare", prompts[0].tokens, 20), Sampling())
        with failing([engine.backbone], lacks if number == 3 else has):
            for news in completions.run_pass():
                assert isinstance(news.key, int)
                found[news.key].append(news)
    assert "no memory" in found[4][0].problem and len(found[4]) == 1
    assert all(tokens_of(found[i]) == tokens_of(wanted[i]) for i in range(4))


def test_those_that_find_no_room_in_the_cache_end_and_the_others_go_on(
    engine: Engine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(cases_of(path))[:2]
    members = attached(engine, cases_of(path))
    wanted = opened(engine.completions(members, []), {0: (prompts[0], Sampling())})
    completions = engine.completions(members, [])
    completions.open(0, prompts[0], Sampling())
    found = completions.run_pass()
    completions.open(1, prompts[1], Sampling())

    def lacks(*_: object) -> None:
        raise torch.OutOfMemoryError("made to fail. Nothing is short")

    with monkeypatch.context() as patch:
        patch.setattr(KeyValueCache, "add", lacks)
        (told,) = completions.run_pass()
    assert told.key == 1 and "no memory" in told.problem
    while len(completions):
        found += completions.run_pass()
    assert tokens_of(found) == tokens_of(wanted[0])


def test_a_prompt_that_the_backbone_has_no_positions_for_is_refused(
    backbone_of: BackboneOf, parallel: Parallel
) -> None:
    engine = Engine(backbone_of("opt"), parallel)
    limit = engine.backbone.shape.position_limit
    assert limit is not None
    completions = engine.completions({"bare": Member(None, 0, 0)}, [])
    with pytest.raises(ValueError, match="may not have more"):
        completions.open(0, Prompt("bare", np.ones(limit + 1, np.int64), 5), Sampling())
    assert len(completions) == 0
    completions.open(0, Prompt("bare", np.ones(limit - 3, np.int64), 50), Sampling())
    finishes = [completions.run_pass()[0].finish for _ in range(4)]
    assert finishes == [None, None, None, "positions"]
