"""Rows of the embedding and of the output layer that a task trains itself: as peft trains, stores and loads them."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import PeftModel

from megatron_mux.adapters.peft_format import read_adapter
from megatron_mux.engine import Engine, Snapshot, Task
from megatron_mux.runtime import Parallel
from tests.end_to_end.conftest import BackboneOf, PathOf
from tests.end_to_end.harness import Case, adapter, assert_close, assert_same, random_records, train
from tests.end_to_end.test_export import assert_same_logits, save
from tests.reference import peft_solo

STEPS = 20
LOSSES = 1e-4
BOTH = {"embed_tokens": [7, 3, 90, 41], "lm_head": [7, 3, 90, 41]}
FIELDS: dict[str, dict[str, Any]] = {
    "embedding": {"modules_to_save": ["embed_tokens"]},
    "head": {"modules_to_save": ["lm_head"]},
    "both": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "tokens": {"trainable_token_indices": [7, 3, 90, 41]},
    "tokens of both": {"trainable_token_indices": BOTH},
    "tokens of the head": {"trainable_token_indices": {"lm_head": [90, 7]}},
    "other tokens": {"trainable_token_indices": {"embed_tokens": [7, 3], "lm_head": [90, 7, 50]}},
    "tokens and embedding": {
        "modules_to_save": ["embed_tokens"],
        "trainable_token_indices": {"lm_head": [90, 7]},
    },
}
TRAINING = {
    "per_device_train_batch_size": 2,
    "learning_rate": 5e-3,
    "lr_scheduler_type": "linear",
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "max_steps": STEPS,
    "seed": 4,
}


def section(fields: dict[str, Any], family: str = "llama") -> dict[str, Any]:
    """A LoRA with these fields."""
    targets = ["c_attn"] if family == "gpt2" else ["q_proj", "v_proj"]
    return {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": targets, **fields}


def make_case(path: Path, name: str, adapter: dict[str, Any], vocab: int = 96) -> Case:
    """A task that starts from random values in every tensor."""
    records = random_records(9, vocab, 3, 22, seed=len(name))
    initial = peft_solo.random_adapter(path, adapter, seed=5)
    return Case(name.replace(" ", "-"), adapter, TRAINING, records, initial)


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_tasks_train_as_with_peft(
    family: str, backbone_of: BackboneOf, path_of: PathOf, parallel: Parallel
) -> None:
    """All of them in one batch, each against peft alone."""
    path = path_of(family)
    cases = [make_case(path, name, section(fields)) for name, fields in FIELDS.items()]
    trained = train(backbone_of(family), parallel, cases, STEPS)
    for case in cases:
        assert case.initial is not None
        alone = peft_solo.train_solo(path, case.adapter, case.training, case.steps(STEPS), case.initial)
        assert trained.losses(case.name) == pytest.approx(alone.losses, rel=LOSSES), case.name
        norms = [result.grad_norm for result in trained.results[case.name]]
        assert norms == pytest.approx(alone.grad_norms, rel=1e-3), case.name
        assert_close(trained.tensors[case.name], alone.tensors, 2e-3, case.name)


@pytest.mark.parametrize("name", ["both", "tokens", "other tokens"])
@pytest.mark.parametrize("family", ["gpt2", "gemma3_text"])
def test_other_families_train_as_with_peft(
    family: str, name: str, backbone_of: BackboneOf, path_of: PathOf, parallel: Parallel
) -> None:
    """Tied matrices with other names, learned positions, a scaled embedding; padding that occurs in records."""
    path, fields = path_of(family), dict(FIELDS[name])
    if family == "gpt2":
        names = {"embed_tokens": "wte"}
        for field, value in fields.items():
            if isinstance(value, dict):
                fields[field] = {names.get(key, key): own for key, own in value.items()}
            elif isinstance(value[0], str):
                fields[field] = [names.get(key, key) for key in value]
    case = make_case(path, name, section(fields, family))
    for tokens, _ in case.records.pairs:
        tokens[1::5] = 0  # Gemma's padding token, whose row peft does not train
    trained = train(backbone_of(family), parallel, [case], 4)
    assert case.initial is not None
    alone = peft_solo.train_solo(path, case.adapter, case.training, case.steps(4), case.initial)
    assert trained.losses(case.name) == pytest.approx(alone.losses, rel=LOSSES)
    assert_close(trained.tensors[case.name], alone.tensors, 2e-3, name)


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_files_are_peft_s(
    family: str, backbone_of: BackboneOf, path_of: PathOf, parallel: Parallel, tmp_path: Path
) -> None:
    """What peft wrote is read with equal logits, and what is written after a step, peft reads with equal logits."""
    backbone, path = backbone_of(family), path_of(family)
    engine = Engine(backbone, parallel)
    for name in ("both", "tokens", "other tokens"):
        case = make_case(path, name, section(FIELDS[name]))
        model = peft_solo.wrap(peft_solo.load_model(path), case.adapter, case.initial)
        model.save_pretrained(tmp_path / case.name)  # type: ignore[operator]
        read = read_adapter(tmp_path / case.name, case.spec.adapter, backbone.shape)
        engine.register_tasks([Task(case.spec, case.records.as_dataset(), initial=read)])
        try:
            assert case.initial is not None
            assert_same(adapter(engine, case.name), case.initial, name)
            assert_same_logits(engine, case, model)
            engine.step()
            written = save(engine, case, tmp_path / f"{case.name} written")
            loaded = PeftModel.from_pretrained(peft_solo.load_model(path), written)
            loaded.eval()
            assert_same_logits(engine, case, loaded)
        finally:
            engine.remove_task(case.name)


def test_a_diverging_task_changes_nothing(
    backbone_of: BackboneOf, path_of: PathOf, parallel: Parallel
) -> None:
    """Three tasks with rows of their own, and one without; one of them is NaN in all of its rows."""
    backbone, path = backbone_of("llama-tied"), path_of("llama-tied")
    cases = {
        name: make_case(path, name, section(fields))
        for name, fields in (*((n, FIELDS[n]) for n in ("both", "tokens", "other tokens")), ("none", {}))
    }
    weights = {name: value.clone() for name, value in backbone.model.named_parameters()}
    for poisoned in ("both", "tokens"):
        healthy = train(backbone, parallel, list(cases.values()), 1)
        before = cases[poisoned].initial
        assert before is not None
        spoiled = {k: v if "lora" in k else torch.full_like(v, math.nan) for k, v in before.items()}
        cases[poisoned].initial = spoiled
        sick = train(backbone, parallel, list(cases.values()), 3)
        cases[poisoned].initial = before
        (failed,) = sick.results[poisoned]
        assert failed.status == "failed"
        for name in sorted(cases.keys() - {poisoned}):
            own = cases[name].name
            assert sick.losses(own)[0] == healthy.losses(own)[0]
            assert_same(sick.after_first[own], healthy.tensors[own], f"{own} beside {poisoned}")
            assert len(sick.results[own]) == 3
    assert_same(dict(backbone.model.named_parameters()), weights, "the backbone")
    assert not any(part.own for part in backbone.vocabulary.parts.values())


def test_a_resumed_task_goes_on_as_if_never_stopped(
    backbone_of: BackboneOf, path_of: PathOf, parallel: Parallel
) -> None:
    """From a snapshot, with the moments of its rows, which are stored in the order that the task names them."""
    cases = [make_case(path_of("llama-tied"), name, section(FIELDS[name])) for name in ("both", "tokens")]
    engine = Engine(backbone_of("llama-tied"), parallel)
    engine.register_tasks([case.task for case in cases])
    for _ in range(2):
        engine.step()
    snapshots = [engine.snapshot(case.name) for case in cases]
    engine.step()
    wanted = [adapter(engine, case.name) for case in cases]
    for case in cases:
        engine.remove_task(case.name)
    resumed = [
        replace(case.task, resume=partial(copy.copy, cast(Snapshot, state)))
        for case, state in zip(cases, snapshots, strict=True)
    ]
    engine.register_tasks(resumed)
    engine.step()
    for case, own in zip(cases, wanted, strict=True):
        assert_same(adapter(engine, case.name), own, case.name)
        engine.remove_task(case.name)


def test_a_fresh_task_starts_as_the_backbone(
    backbone_of: BackboneOf, path_of: PathOf, parallel: Parallel
) -> None:
    """Its rows are the backbone's, its logits too, and evaluation uses what it has trained."""
    backbone, path = backbone_of("llama"), path_of("llama")
    engine = Engine(backbone, parallel)
    for name in ("both", "other tokens"):
        case = make_case(path, name, section(FIELDS[name]))
        case.initial = None
        bare = peft_solo.load_model(path)
        engine.register_tasks([case.task])
        try:
            assert_same_logits(engine, case, bare)
            before = engine.evaluate(case.name, case.records)
            for _ in range(8):
                engine.step()
            after = engine.evaluate(case.name, case.records)
            assert before is not None and after is not None and after.loss < before.loss
            tensors = adapter(engine, case.name)
            model = peft_solo.wrap(bare, case.adapter, tensors)
            assert_same_logits(engine, case, model)
        finally:
            engine.remove_task(case.name)
