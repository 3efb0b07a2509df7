"""What bodies of requests for jobs are taken, and what is said of others."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megatron_mux.serve.jobs.fields import Fault
from megatron_mux.serve.jobs.requests import JobRequest, parse_request


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "training_file": "file-1", **fields}


def method(kind: str, **hyperparameters: Any) -> dict[str, Any]:
    return {"type": kind, kind: {"hyperparameters": hyperparameters}}


def accepted(**fields: Any) -> JobRequest:
    request = parse_request(body(**fields))
    assert isinstance(request, JobRequest), request
    return request


def refused(given: Any) -> list[Fault]:
    faults = parse_request(given)
    assert isinstance(faults, list)
    return faults


def test_what_clients_send_is_taken() -> None:
    request = accepted(
        validation_file="file-2",
        suffix="mine-1",
        seed=7,
        metadata={"team": "a"},
        integrations=None,
        method=method("supervised", n_epochs="auto", batch_size=4, learning_rate_multiplier=0.5),
        adapter={"peft_type": "LORA", "r": 4},
        priority=2,
    )
    where, chosen = request.chosen
    assert where == "method.supervised.hyperparameters"
    assert (chosen.n_epochs, chosen.batch_size, chosen.learning_rate_multiplier) == (None, 4, 0.5)


def test_the_deprecated_hyperparameters_are_those_of_a_supervised_method() -> None:
    request = accepted(hyperparameters={"n_epochs": 2})
    where, chosen = request.chosen
    assert (where, chosen.n_epochs, request.method_type) == ("hyperparameters", 2, "supervised")


def test_a_seed_in_the_training_section_is_the_requests_own() -> None:
    request = accepted(training={"seed": 5, "max_steps": 3})
    assert (request.seed, request.training) == (5, {"max_steps": 3})


@pytest.mark.parametrize(("loss", "kind"), [("sft", "supervised"), ("dpo", "dpo"), ("kto", "supervised")])
def test_a_loss_of_the_training_section_says_the_method(loss: str, kind: str) -> None:
    assert accepted(training={"loss": loss}).method_type == kind


@pytest.mark.parametrize(
    ("fields", "param", "code", "words"),
    [
        ({"model": None}, "model", "invalid_type", "string"),
        ({"n_epochs": 3}, "n_epochs", "unknown_parameter", "unknown field"),
        ({"suffix": "a/b"}, "suffix", "invalid_value", "letters"),
        ({"suffix": "a" * 65}, "suffix", "invalid_value", "64"),
        ({"seed": -1}, "seed", "invalid_value", "greater than or equal to 0"),
        ({"seed": True}, "seed", "invalid_type", "integer"),
        ({"training": {"seed": "x"}}, "training.seed", "invalid_type", "training.seed"),
        ({"metadata": {"a": 1}}, "metadata.a", "invalid_type", "string"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "invalid_value", "16"),
        ({"integrations": [{"type": "wandb"}]}, "integrations", "invalid_value", "no other service"),
        ({"method": {"type": "reinforcement"}}, "method.type", "invalid_value", "not offered"),
        ({"method": {"type": "dpo", "supervised": {}}}, "method.supervised", "invalid_value", "is dpo"),
        (
            {"method": method("supervised", n_epochs=0)},
            "method.supervised.hyperparameters.n_epochs",
            "invalid_value",
            "greater than or equal to 1, got 0",
        ),
        (
            {"method": method("supervised", beta=0.1)},
            "method.supervised.hyperparameters.beta",
            "unknown_parameter",
            "unknown field",
        ),
        ({"method": method("dpo"), "hyperparameters": {}}, "hyperparameters", "invalid_value", "deprecated"),
        ({"eval": {}}, "eval", "invalid_value", "validation_file"),
        ({"seed": 1, "training": {"seed": 1}}, "training.seed", "invalid_value", "given by seed"),
        ({"method": method("dpo"), "training": {"loss": "sft"}}, "training.loss", "invalid_value", "is dpo"),
        (
            {"method": method("supervised", batch_size=2), "training": {"gradient_accumulation_steps": 2}},
            "training.gradient_accumulation_steps",
            "invalid_value",
            "method.supervised.hyperparameters.batch_size",
        ),
        (
            {"hyperparameters": {"n_epochs": 1}, "training": {"max_steps": 9}},
            "training.max_steps",
            None,
            "too",
        ),
        ({"training": {"learning_rate": math.nan}}, "training.learning_rate", "invalid_value", "finite"),
        ({"training": {"learning_rate": 10**400}}, "training.learning_rate", "invalid_value", "finite"),
        ({"metadata": {"a": "\ud800"}}, "metadata.a", "invalid_value", "surrogate"),
        ({"data": {"columns": {"\0": "a"}}}, "data.columns", "invalid_value", "NUL"),
        ({"adapter": {"target_modules": ["a"] * 5000}}, "adapter.target_modules", "invalid_value", "4096"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], param: str, code: str | None, words: str) -> None:
    (fault,) = refused(body(**fields))
    assert fault.param == param
    assert code is None or fault.code == code
    assert words in fault.message


def test_all_faults_come_at_once() -> None:
    given = {
        "training_file": "file-1",
        "color": 1,
        "method": method("dpo", beta=-1),
        "adapter": {"rank": 4, "target_modules": ".*q_proj"},
        "training": {"report_to": "wandb"},
    }
    assert {fault.param for fault in refused(given)} == {
        "model",
        "color",
        "method.dpo.hyperparameters.beta",
        "adapter.rank",
        "adapter.target_modules",
        "training.report_to",
    }
    assert "missing_required_parameter" in {fault.code for fault in refused(given)}


@pytest.mark.parametrize("given", [None, [], "text", 3])
def test_only_objects_are_bodies(given: Any) -> None:
    (fault,) = refused(given)
    assert fault.code == "invalid_type"


def test_deep_bodies_are_refused() -> None:
    deep: Any = {}
    for _ in range(200):
        deep = {"a": deep}
    (fault,) = refused(body(data=deep))
    assert "nested too deeply" in fault.message
