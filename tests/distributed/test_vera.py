"""VeRA divided over 2 x 2 ranks comes out as peft trains it alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_mux.backbone.model import load_stages
from megatron_mux.engine import Engine, Planning
from megatron_mux.runtime import Parallel
from tests import tiny_models
from tests.end_to_end.families import FAMILIES, lora, vera
from tests.end_to_end.harness import assert_close
from tests.end_to_end.test_parity import ADAPTER, LOSS, STEPS, alone, make_case
from tests.reference.loop import SoloResult


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_vera_divided_is_as_with_peft_alone(
    family: str, once: Callable[[str, Callable[[Path], object]], Path], joined: Callable[..., Parallel]
) -> None:
    path = once(f"vera-{family}", lambda directory: tiny_models.make(directory, family)) / family
    targets = FAMILIES[family]
    sections = (
        vera("all-linear"),
        lora(targets.query_value, r=4),
        vera(targets.mixed, r=8, save_projection=False, projection_prng_key=3),
    )
    cases = [make_case(i, path, section) for i, section in enumerate(sections)]
    parallel = joined(2, 2)
    engine = Engine(load_stages(path, parallel), parallel, Planning("spatial", 2))
    engine.register_tasks([case.task for case in cases])
    results = [engine.step() for _ in range(STEPS)]
    tensors = {case.name: engine.adapter_tensors(case.name) for case in cases}
    # Each rank trains one of them with peft.
    own = alone(path, cases[dist.get_rank()]) if dist.get_rank() < len(cases) else None
    references: list[SoloResult | None] = [None] * dist.get_world_size()
    dist.all_gather_object(references, own)
    problems: list[str] = []
    if dist.get_rank() == 0:
        for case, wanted in zip(cases, references, strict=False):
            assert wanted is not None
            losses = [step[case.name].loss for step in results]
            if losses != pytest.approx(wanted.losses, rel=LOSS):
                problems.append(f"{case.name}: losses {losses}, with peft {wanted.losses}")
            try:
                assert_close(tensors[case.name] or {}, wanted.tensors, ADAPTER, case.name)
            except AssertionError as error:
                problems.append(str(error))
    # Every rank must fail or none: the others would wait for a rank that gave up.
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, problems)
    assert not any(everyone), "\n".join(problem for rank in everyone for problem in rank)
