"""Every field of a task has a row, and requests become the tasks that they describe."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from megatron_mux.adapters.registry import KINDS
from megatron_mux.section import Section
from megatron_mux.serve.jobs.fields import SECTIONS, Fault, Row, as_written, faults_of_section, to_task
from megatron_mux.serve.jobs.requests import JobRequest, parse_request
from megatron_mux.tasks import DataSpec, EvalSpec, TaskSpec, TrainingSpec, read_task
from tests.unit.serve.jobs.test_requests import body, method


def fields_of(model: type[BaseModel], where: str) -> Iterator[str]:
    """The dotted names of a section's fields, those of sections within included unless the row refuses the whole."""
    for name, field in model.model_fields.items():
        yield f"{where}.{name}"
        if (row := SECTIONS[where].get(name)) and row.use == "accepted":
            for inner in sections_in(field.annotation):
                yield from (f"{where}.{name}.{key}" for key in inner.model_fields)


def sections_in(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from sections_in(argument)


def rows_of(rows: Mapping[str, Row], where: str) -> Iterator[str]:
    for name, row in rows.items():
        yield f"{where}.{name}"
        yield from rows_of(row.inner, f"{where}.{name}")


def test_each_field_of_a_task_has_a_row_and_each_row_a_field() -> None:
    assert TaskSpec.model_fields.keys() == {"name", *SECTIONS}
    fields = {field for kind in KINDS.values() for field in fields_of(kind, "adapter")}
    for where, model in (("data", DataSpec), ("training", TrainingSpec), ("eval", EvalSpec)):
        fields |= set(fields_of(model, where))
    assert fields == {row for where, rows in SECTIONS.items() for row in rows_of(rows, where)}


def test_no_field_that_holds_a_path_is_accepted() -> None:
    models: list[type[BaseModel]] = [*KINDS.values(), DataSpec, TrainingSpec, EvalSpec]
    for where, model in zip(["adapter"] * len(KINDS) + ["data", "training", "eval"], models, strict=True):
        for name, field in model.model_fields.items():
            if "pathlib" in str(field.annotation) or "path" in name or "dir" in name.split("_"):
                assert SECTIONS[where][name].use != "accepted", f"{where}.{name}"


@pytest.mark.parametrize(
    ("section", "given", "param", "words"),
    [
        ("adapter", {"adapter_name_or_path": "ft:x"}, "adapter.adapter_name_or_path", "fine-tuned model yet"),
        ("adapter", {"target_modules": "(a+)+$"}, "adapter.target_modules", "no regular expressions"),
        ("adapter", {"exclude_modules": ["q_proj", "(a+)+$"]}, "adapter.exclude_modules", "expressions"),
        ("adapter", {"layers_pattern": ["(a+)+"]}, "adapter.layers_pattern", "expressions"),
        ("adapter", {"rank_pattern": {"(a+)+$": 4}}, "adapter.rank_pattern", "expressions"),
        ("adapter", {"lora_alfa": 4}, "adapter.lora_alfa", "did you mean 'lora_alpha'"),
        ("data", {"path": "/etc/passwd"}, "data.path", "training_file"),
        ("data", {"mixture": [{"path": "/etc/passwd"}]}, "data.mixture", "one training file"),
        ("training", {"logging_dir": "/tmp"}, "training.logging_dir", "directory"),
        ("eval", {"path": "/etc/passwd"}, "eval.path", "validation_file"),
        ("eval", {"generate": {"file": "x"}}, "eval.generate.file", "unknown field"),
    ],
)
def test_what_no_client_may_send(section: str, given: dict[str, Any], param: str, words: str) -> None:
    (fault,) = faults_of_section(section, given)
    assert fault.param == param
    assert words in fault.message


def test_plain_names_are_accepted() -> None:
    given = {"target_modules": ["q_proj", "model.layers.0.mlp.up_proj"], "rank_pattern": {"v_proj": 4}}
    assert not faults_of_section("adapter", given)
    assert not faults_of_section("adapter", {"target_modules": "all-linear", "layers_pattern": "layers"})


def task_of(**fields: Any) -> tuple[dict[str, Any], dict[str, Any], TaskSpec]:
    request = parse_request(body(**fields))
    assert isinstance(request, JobRequest), request
    held_out = Path("/state/files/file-2") if request.validation_file else None
    task, resolved = to_task(request, "ftjob-1", 9, Path("/state/files/file-1"), held_out)
    return task, resolved, read_task(task, Path("/"))


def test_a_request_without_sections_has_the_services_defaults() -> None:
    task, resolved, spec = task_of()
    assert task == {
        "name": "ftjob-1",
        "adapter": {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": "all-linear"},
        "data": {"path": "/state/files/file-1"},
        "training": {
            "loss": "sft",
            "learning_rate": 1e-4,
            "per_device_train_batch_size": 8,
            "num_train_epochs": 3,
            "seed": 9,
        },
    }
    assert resolved == {"n_epochs": 3, "batch_size": 8, "learning_rate_multiplier": 1}
    assert spec.training.seed == 9


def test_hyperparameters_become_fields() -> None:
    chosen = method("dpo", n_epochs=2, batch_size=4, learning_rate_multiplier=3, beta=0.5)
    _, resolved, spec = task_of(method=chosen, validation_file="file-2")
    training = spec.training
    assert (training.loss, training.beta, training.num_train_epochs) == ("dpo", 0.5, 2)
    assert training.per_device_train_batch_size == 4
    assert training.learning_rate == pytest.approx(1.5e-5)
    assert resolved == chosen["dpo"]["hyperparameters"]
    assert spec.eval is not None
    assert spec.eval.eval_steps == 100


def test_sections_count_before_defaults_and_are_echoed() -> None:
    _, resolved, spec = task_of(
        validation_file="file-2",
        adapter={"r": 2},
        data={"max_length": 64},
        training={"learning_rate": "2e-4", "max_steps": 5, "gradient_accumulation_steps": 3, "optim": "sgd"},
        eval={"eval_steps": 2, "metrics": ["token_accuracy"]},
    )
    assert spec.adapter.model_dump(include={"peft_type", "r", "lora_alpha"}) == {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 8,
    }
    assert (spec.data.max_length, spec.training.max_steps, spec.training.optim) == (64, 5, "sgd")
    assert spec.eval is not None
    assert spec.eval.eval_steps == 2
    assert resolved == {"n_epochs": None, "batch_size": 24, "learning_rate_multiplier": 2}


def test_values_of_wrong_types_are_left_to_the_checker() -> None:
    request = parse_request(body(training={"learning_rate": [], "loss": {}, "max_steps": "x"}))
    assert isinstance(request, JobRequest)
    task, resolved = to_task(request, "ftjob-1", 9, Path("/f"), None)
    assert task["training"]["loss"] == {}
    assert resolved["learning_rate_multiplier"] is None


def test_faults_name_fields_as_the_client_wrote_them() -> None:
    request = parse_request(body(method=method("dpo", n_epochs=2), training={"learning_rate": 2.0}))
    assert isinstance(request, JobRequest)
    faults = [
        Fault("training.num_train_epochs: is wrong", "training.num_train_epochs"),
        Fault("training.learning_rate: is wrong", "training.learning_rate"),
        Fault("adapter.r: is wrong", "adapter.r"),
    ]
    own = "method.dpo.hyperparameters.n_epochs"
    assert as_written(faults, request) == [Fault(f"{own}: is wrong", own), *faults[1:]]
