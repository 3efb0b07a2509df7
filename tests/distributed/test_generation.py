"""However processes share generation, tokens are those of `transformers` and `peft`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_mux.backbone.model import load_stages
from megatron_mux.backbone.weight_offload import Kind
from megatron_mux.batch.packed_batch import PackedBatch
from megatron_mux.engine import Engine
from megatron_mux.engine.generation import generator, passes
from megatron_mux.engine.generation.sampling import Sampling
from megatron_mux.runtime import Parallel
from tests import tiny_models
from tests.budget import failing
from tests.distributed.conftest import assert_no_problems
from tests.end_to_end.generated import (
    attached,
    cases_of,
    frequent,
    generated,
    opened,
    prompts_of,
    reference,
    tokens_of,
)
from tests.reference.greedy import Greedy, differences

Once = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture
def path(once: Once) -> Path:
    return once("models", lambda directory: tiny_models.make(directory, "llama")) / "llama"


@pytest.fixture
def wanted(once: Once, path: Path) -> tuple[list[int], list[Greedy]]:
    """A stop token, and what follows every prompt."""

    def write(directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        cases = cases_of(path)
        prompts = prompts_of(cases)
        stop = [int(frequent(reference(path, cases, prompts[::4], [])).argmax())]
        found = [asdict(one) for one in reference(path, cases, prompts, stop)]
        (directory / "wanted.json").write_text(json.dumps([stop, found]))

    stop, found = json.loads((once("generated", write) / "wanted.json").read_text())
    return stop, [Greedy(tuple(one["tokens"]), tuple(one["margins"])) for one in found]


@pytest.mark.parametrize(
    ("layout", "split", "residence"),
    [
        ((2, 1, False), None, "resident"),
        ((2, 2, True), None, "resident"),
        ((1, 2, False), (1, 1, 1, 1), "resident"),
        ((1, 1, False), None, "sharded"),
    ],
    ids=["TP2xDP2", "SP2xPP2", "virtual PP2xDP2", "sharded DP4"],
)
def test_tokens_are_those_of_transformers_and_peft(
    layout: tuple[int, int, bool],
    split: tuple[int, ...] | None,
    residence: Kind,
    path: Path,
    wanted: tuple[list[int], list[Greedy]],
    joined: Callable[..., Parallel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if split is not None or residence == "sharded":
        monkeypatch.setattr(generator, "CACHE_POSITIONS", 200)  # several groups, more on some ranks
        monkeypatch.setattr(passes, "TOKENS_PER_PASS", 50)
    parallel = joined(*layout)
    stages = load_stages(path, parallel, torch.float32, split=split, residence=residence)
    cases = cases_of(path)
    stop, expected = wanted
    tries = layout[0] > 1  # first on each rank alone, as on a GPU
    found = generated(stages, parallel, cases, prompts_of(cases), stop, tries_plans=tries)
    problems, ties = differences([one.tokens for one in found], expected)
    if parallel.rank == 0:
        print(f"{len(found)} prompts, {ties} with logits that tie")
    engine = Engine(stages, parallel)
    completions = engine.completions(attached(engine, cases), stop)
    coming = {i: (prompt, Sampling()) for i, prompt in enumerate(prompts_of(cases)[:30])}
    one_by_one = opened(completions, coming)
    problems += differences([tokens_of(one_by_one[i]) for i in coming], expected[: len(coming)])[0]
    for case in cases:
        engine.adapters.remove(case.name)
    assert_no_problems(problems)


def test_one_rank_that_lacks_memory_makes_its_pipeline_take_smaller_groups(
    path: Path, wanted: tuple[list[int], list[Greedy]], joined: Callable[..., Parallel]
) -> None:
    parallel = joined(1, 2)
    stages = load_stages(path, parallel, torch.float32)
    cases, (stop, expected) = cases_of(path), wanted
    lacking = 0

    def lacks(batch: PackedBatch) -> bool:
        nonlocal lacking
        hit = dist.get_rank() == 2 and len(batch.segments) > 8
        lacking += hit
        return hit

    with failing(stages, lacks):
        found = generated(stages, parallel, cases, prompts_of(cases), stop)
    problems, _ = differences([one.tokens for one in found], expected)
    if (parallel.rank == 2) != bool(lacking):
        problems.append(f"{lacking} failures")
    assert_no_problems(problems)
