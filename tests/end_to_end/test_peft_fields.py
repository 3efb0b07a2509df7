"""Fields of peft's configs for targets, ranks, initial values and DoRA: tasks come out as with peft."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from torch import Tensor

from megatron_mux import checkpoint
from megatron_mux.adapters.peft_format import read_adapter
from megatron_mux.backbone.model import Backbone
from megatron_mux.checkpoint import SavedTask
from megatron_mux.engine import Engine, Task
from megatron_mux.errors import UserError
from megatron_mux.runtime import Parallel
from megatron_mux.tasks import load_task_file
from tests import quantised_models
from tests.end_to_end import test_export
from tests.end_to_end.conftest import BackboneOf, PathOf
from tests.end_to_end.families import FAMILIES, ia3, lora, vera
from tests.end_to_end.harness import (
    Case,
    adapter,
    assert_close,
    assert_same,
    engine_logits,
    make_spec,
    random_records,
    relative,
    train,
)
from tests.end_to_end.test_parity import ADAPTER, LOSS, RECIPES, STEPS, VOCABULARY
from tests.reference import peft_solo, solo

pytestmark = pytest.mark.versions

SHORT = 8  # steps where a family is compared beside the first


def sections(family: str) -> dict[str, dict[str, Any]]:
    """An adapter section for each field, alone and with what it meets."""
    targets = FAMILIES[family]
    last, first = targets.mixed[-1], targets.mixed[0]
    ranks: dict[str, Any] = {
        "rank_pattern": {first: 2, rf".*\.[13]\..*{last}": 7},
        "alpha_pattern": {last: 3, f"1.*{first}": 1.5},
    }
    return {
        "ranks": lora(targets.mixed, r=4, use_rslora=True, **ranks),
        "layers": lora(
            targets.mixed,
            r=4,
            layers_to_transform=[0, 2],
            layers_pattern=["blocks", "layers", "h"],
        ),
        "excluded": lora("all-linear", r=3, exclude_modules=[first, f"1.mlp.{last.removeprefix('mlp.')}"]),
        "dora": lora("all-linear", r=4, use_dora=True),
        "dora-ranks": lora(targets.mixed, r=4, use_dora=True, use_rslora=True, **ranks),
        "pissa": lora(targets.mixed, r=3, init_lora_weights="pissa"),
        "pissa-ranks": lora(targets.mixed, r=4, init_lora_weights="pissa", **ranks),
        "pissa-dora": lora(targets.query_value, r=3, init_lora_weights="pissa", use_dora=True),
        "vera-layers": vera(targets.mixed, r=8, layers_to_transform=1),
        "ia3-excluded": ia3(targets) | {"exclude_modules": r".*\.[02]\..*"},
    } | ({"olora": lora(targets.mixed, r=3, init_lora_weights="olora")} if family == "llama" else {})


def taken_away(section: Mapping[str, Any]) -> bool:
    """Whether peft changes the backbone for a section."""
    return section.get("init_lora_weights") in ("pissa", "olora")


def converted(tensors: Mapping[str, Tensor], first: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """peft's conversion to plain LoRA of twice the rank."""
    found = dict(tensors)
    for key, tensor in tensors.items():
        if "lora_A" in key:
            found[key] = torch.cat((tensor, first[key]))
        elif "lora_B" in key:
            found[key] = torch.cat((tensor, -first[key]), dim=1)
    return found


def make_case(i: int, path: Path, section: dict[str, Any], steps: int) -> Case:
    """A task that starts from values that are not zero; where initial values matter, from peft's own."""
    training = {**RECIPES[i % 2], "max_steps": steps, "seed": i}
    records = random_records(23, VOCABULARY, 4, 24, seed=100 + i)
    initial = solo.random_adapter(path, section, seed=i)
    if taken_away(section):
        initial = peft_solo.export(peft_solo.wrap(peft_solo.load_model(path), section))
    return Case(f"task-{i}", section, training, records, initial)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_each_field_trains_as_in_peft(
    family: str, backbone_of: BackboneOf, path_of: PathOf, parallel: Parallel
) -> None:
    path, steps = path_of(family), STEPS if family == "llama" else SHORT
    cases = [make_case(i, path, section, steps) for i, section in enumerate(sections(family).values())]
    together = train(backbone_of(family), parallel, cases, steps)
    for case in cases:
        assert case.initial is not None
        alone = solo.train_solo(path, case.adapter, case.training, case.steps(steps), case.initial)
        assert together.losses(case.name) == pytest.approx(alone.losses, rel=LOSS), case.adapter
        wanted = converted(alone.tensors, case.initial) if taken_away(case.adapter) else alone.tensors
        assert_close(together.tensors[case.name], wanted, ADAPTER, str(case.adapter))


def fresh_sections(family: str) -> dict[str, dict[str, Any]]:
    """Sections whose saves are compared: those of all fields, and more initial values."""
    targets = FAMILIES[family]
    more = {
        "gaussian": lora(targets.mixed, r=4, init_lora_weights="gaussian"),
        "drawn": lora(targets.mixed, r=4, init_lora_weights=False),
        "orthogonal": lora(targets.mixed, r=4, init_lora_weights="orthogonal"),
        "pissa-fast": lora(targets.mixed, r=3, init_lora_weights="pissa_niter_16"),
        "pissa-rslora": lora(
            targets.mixed, r=3, init_lora_weights="pissa", use_rslora=True, rank_pattern={"v_proj": 5}
        ),
    }
    return sections(family) | (more if family == "llama" else {})


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_peft_loads_what_is_saved_and_a_resume_goes_on(
    family: str, backbone_of: BackboneOf, path_of: PathOf, parallel: Parallel, tmp_path: Path
) -> None:
    backbone, path = backbone_of(family), path_of(family)
    cases = [test_export.make_case(name, section) for name, section in fresh_sections(family).items()]
    engine = Engine(backbone, parallel)
    engine.register_tasks([case.task for case in cases])
    bare = engine_logits(Engine(backbone, parallel), cases[0], cases[0].records.pairs[:2])
    for case in cases:
        unchanged = case.name != "drawn"
        start = engine_logits(engine, case, case.records.pairs[:2])
        assert unchanged == all(relative(a, b) < 1e-5 for a, b in zip(start, bare, strict=True)), case.name
        compare_fresh(path, case, adapter(engine, case.name))
    for _ in range(2):
        engine.step()
    snapshots = {}
    for case in cases:
        directory = test_export.save(engine, case, tmp_path / case.name)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # keys that do not match are a warning in peft
            warnings.filterwarnings("ignore", "Specified to not save vera_A")
            theirs = PeftModel.from_pretrained(peft_solo.load_model(path), directory).eval()
        test_export.assert_same_logits(engine, case, theirs)
        entry = SavedTask(case.name, 2, "running", "", str(directory), {}, "")
        snapshots[case.name] = checkpoint.load_task(tmp_path, entry)
    wanted = engine.step()
    tensors = {case.name: adapter(engine, case.name) for case in cases}
    again = Engine(backbone, parallel)
    for case in cases:
        engine.remove_task(case.name)
    again.register_tasks(
        [
            Task(case.spec, case.records.as_dataset(), resume=partial(copy.copy, snapshots[case.name]))
            for case in cases
        ]
    )
    found = again.step()
    for case in cases:
        assert found[case.name].loss == wanted[case.name].loss, case.name
        assert_same(adapter(again, case.name), tensors[case.name], case.name)
        again.remove_task(case.name)


def compare_fresh(path: Path, case: Case, found: Mapping[str, Tensor]) -> None:
    """Initial values that follow from the weights are peft's own; others have peft's shapes and spread."""
    theirs = peft_solo.export(peft_solo.wrap(peft_solo.load_model(path), case.adapter))
    if taken_away(case.adapter):
        theirs = converted(theirs, theirs)
    assert found.keys() == theirs.keys()
    for key, wanted in theirs.items():
        fast = str(case.adapter.get("init_lora_weights")).startswith("pissa_niter")
        assert fast or found[key].shape == wanted.shape, f"{case.name}: {key}"
        if taken_away(case.adapter) or "magnitude" in key:
            assert relative(found[key], wanted) < 1e-4, f"{case.name}: {key}"
    for side in ("lora_A", "lora_B"):
        mine, its = (
            torch.cat([value.flatten() for key, value in own.items() if side in key] or [torch.zeros(1)])
            for own in (found, theirs)
        )
        assert fast or float(mine.norm()) == pytest.approx(float(its.norm()), rel=0.15), (
            f"{case.name}: {side}"
        )


@pytest.mark.parametrize("name", ["layers", "excluded", "dora-ranks", "pissa-ranks", "pissa-dora", "olora"])
def test_a_task_starts_from_what_peft_saved(
    name: str, backbone_of: BackboneOf, path_of: PathOf, parallel: Parallel, tmp_path: Path
) -> None:
    """PiSSA and OLoRA unconverted, too: peft takes their initial product from the weights again."""
    path, section = path_of("llama"), sections("llama")[name]
    case = make_case(0, path, section, 2)
    initial = {key: value * 1.1 for key, value in (case.initial or {}).items()}
    model = peft_solo.wrap(peft_solo.load_model(path), section, initial)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    task = {"name": "t", "adapter": {"peft_type": "LORA", "adapter_name_or_path": str(tmp_path)}}
    file = tmp_path / "tasks.yaml"
    file.write_text(
        yaml.safe_dump({"tasks": [{**task, "data": {"path": "tasks.yaml"}, "training": {"max_steps": 2}}]})
    )
    (spec,) = load_task_file(file)
    backbone = backbone_of("llama")
    engine = Engine(backbone, parallel)
    read = read_adapter(tmp_path, spec.adapter, backbone.shape)
    engine.register_tasks([Task(spec, case.records.as_dataset(), initial=read)])
    try:
        test_export.assert_same_logits(engine, Case("t", section, case.training, case.records), model)
    finally:
        engine.remove_task("t")


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_poisoned_neighbour_changes_nothing(
    poison: float, backbone_of: BackboneOf, path_of: PathOf, parallel: Parallel
) -> None:
    path, backbone = path_of("llama"), backbone_of("llama")
    own = [test_export.make_case(name, section) for name, section in sections("llama").items()]
    sick = [make_case(i, path, section, 9) for i, section in enumerate(sections("llama").values())]
    for case in sick:
        assert case.initial is not None
        case.initial = {key: torch.full_like(value, poison) for key, value in case.initial.items()}
    alone = train(backbone, parallel, own, 2)
    beside = train(backbone, parallel, [*sick, *own], 2)
    for case in sick:
        assert beside.results[case.name][-1].status == "failed"
    for case in own:
        assert beside.losses(case.name) == pytest.approx(alone.losses(case.name), rel=1e-6), case.name
        assert_close(beside.tensors[case.name], alone.tensors[case.name], 1e-4, case.name)


def test_tasks_on_a_quantised_backbone_start_at_its_output(parallel: Parallel, tmp_path: Path) -> None:
    """Magnitudes and factors are those of the dequantised weights."""
    path = quantised_models.make_plain(tmp_path)
    backbone = Backbone.load(path, parallel, quantise="nf4")
    names = ("dora", "pissa-dora", "olora")
    cases = [test_export.make_case(name, sections("llama")[name]) for name in names]
    engine = Engine(backbone, parallel)
    pairs = cases[0].records.pairs[:2]
    bare = engine_logits(engine, cases[0], pairs)
    engine.register_tasks([case.task for case in cases])
    for case in cases:
        found = engine_logits(engine, case, pairs)
        assert all(relative(a, b) < 1e-4 for a, b in zip(found, bare, strict=True)), case.name
    assert all(result.status == "running" for result in engine.step().values())


def test_half_precision_is_near_single(backbone_of: BackboneOf, path_of: PathOf, parallel: Parallel) -> None:
    cases = [test_export.make_case(name, section) for name, section in sections("llama").items()]
    wide, narrow = (
        train(backbone_of("llama", dtype), parallel, cases, 3) for dtype in (torch.float32, torch.bfloat16)
    )
    for case in cases:
        assert narrow.losses(case.name) == pytest.approx(wide.losses(case.name), rel=0.02), case.name


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rank_pattern": {"query": 3}}, "rank_pattern: 'query' matches no module that the task targets"),
        (
            {"exclude_modules": ["o_proj"]},
            "exclude_modules: ['o_proj'] excludes no module that target_modules",
        ),
        ({"exclude_modules": ".*"}, "exclude_modules: '.*' excludes all modules"),
        ({"layers_to_transform": [1, 9]}, "layers_to_transform: no targeted module is in layer 9"),
        ({"layers_to_transform": 1, "layers_pattern": "h"}, "layers_pattern: 'h' leaves no module"),
        ({"init_lora_weights": "pissa", "r": 33}, "whose weight has rank 32 at most"),
        ({"init_lora_weights": "orthogonal", "r": 3}, "orthogonal needs even ranks"),
        (
            {"target_modules": ["q_proj", "lm_head"]},
            "'lm_head': embeddings and output layers can have no adapter: train them whole with modules_to_save",
        ),
    ],
)
def test_fields_that_fit_no_module_are_refused(
    fields: dict[str, Any], said: str, backbone_of: BackboneOf
) -> None:
    spec = make_spec("t", {**lora(["q_proj", "v_proj"], r=4), **fields}, {"max_steps": 1})
    with pytest.raises(UserError) as error:
        spec.adapter.modules(backbone_of("llama").shape)
    assert said in str(error.value)


@pytest.mark.parametrize("field", ["use_dora", "init_lora_weights"])
def test_what_peft_cannot_have_of_experts_is_refused(field: str, backbone_of: BackboneOf) -> None:
    value = True if field == "use_dora" else "pissa"
    section = lora(["q_proj"], target_parameters=["mlp.experts.down_proj"]) | {field: value}
    spec = make_spec("t", section, {"max_steps": 1})
    with pytest.raises(UserError, match=f"{field}: must be its default with target_parameters"):
        spec.adapter.modules(backbone_of("mixtral").shape)


def test_an_unconverted_adapter_with_random_initial_values_is_refused(
    path_of: PathOf, backbone_of: BackboneOf, tmp_path: Path
) -> None:
    section = lora(["q_proj"], r=3, init_lora_weights="pissa_niter_4")
    peft_solo.wrap(peft_solo.load_model(path_of("llama")), section).save_pretrained(tmp_path)  # type: ignore[operator]
    spec = make_spec("t", section | {"adapter_name_or_path": str(tmp_path)}, {"max_steps": 1})
    with pytest.raises(UserError, match="path_initial_model_for_weight_conversion"):
        read_adapter(tmp_path, spec.adapter, backbone_of("llama").shape)
