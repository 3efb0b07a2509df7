"""Fields of preference tasks: TRL's defaults, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_mux.engine.evaluation.evaluator import EvalResult
from megatron_mux.engine.evaluation.lines import eval_lines
from megatron_mux.engine.preference.losses import loss_of, named
from megatron_mux.errors import UserError
from megatron_mux.tasks import TaskSpec
from megatron_mux.tasks.files import read_task

LORA = {"peft_type": "LORA", "target_modules": ["q_proj"]}


def task(
    adapter: dict[str, Any] | None = None, evaluation: dict[str, Any] | None = None, **training: Any
) -> TaskSpec:
    value = {
        "name": "t",
        "adapter": {**LORA, **(adapter or {})},
        "data": {"path": "d.jsonl"},
        "training": training,
    }
    return read_task(
        value | ({"eval": {"path": "e.jsonl", **evaluation}} if evaluation is not None else {}), Path("/")
    )


def test_spellings_of_trl_are_taken() -> None:
    spec = task(
        loss="dpo", loss_type=["ipo"], truncation_mode="keep_start", padding_free=True, sync_ref_model=False
    )
    assert spec.training.variant == "ipo"
    assert spec.sequences_per_step == 2 * 8
    assert task(loss="kto").sequences_per_step == 8
    assert TaskSpec.model_validate(spec.plain()) == spec


@pytest.mark.parametrize(
    ("training", "words"),
    [
        ({"beta": 0.2}, ["beta", "loss is sft"]),
        ({"loss": "orpo", "loss_type": "sigmoid"}, ["loss_type", "loss is orpo"]),
        ({"loss": "kto", "loss_type": "hinge"}, ["hinge", "kto, apo_zero_unpaired"]),
        ({"loss": "dpo", "loss_type": "aot"}, ["aot", "sorts"]),
        ({"loss": "dpo", "loss_type": ["sigmoid", "sft"]}, ["combinations"]),
        ({"loss": "dpo", "loss_type": "sigmoidal"}, ["sigmoidal", "sigmoid"]),
        ({"loss": "dpo", "label_smoothing": 0.1}, ["label_smoothing", "robust"]),
        ({"loss": "dpo", "loss_type": "exo_pair"}, ["exo_pair", "label_smoothing"]),
        ({"loss": "dpo", "reference_free": True}, ["reference_free", "orpo"]),
        ({"loss": "dpo", "f_divergence_type": "js_divergence"}, ["f_divergence_type", "reverse_kl"]),
        ({"loss": "dpo", "truncation_mode": "keep_end"}, ["truncation_mode", "keep_end"]),
        ({"loss": "dpo", "max_prompt_length": 9}, ["max_prompt_length", "data.max_length"]),
        ({"loss": "dpo", "router_aux_loss_coef": 0.1}, ["router_aux_loss_coef"]),
        ({"loss": "kto", "per_device_train_batch_size": 1}, ["per_device_train_batch_size", "at least 2"]),
        ({"loss": "simpo"}, ["loss", "simpo"]),
    ],
)
def test_what_is_not_supported_is_refused_by_name(training: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as raised:
        task(**training)
    assert all(word in str(raised.value) for word in words), raised.value


def test_dropout_and_other_figures_are_refused() -> None:
    with pytest.raises(UserError, match=r"lora_dropout.*disable_dropout"):
        task({"lora_dropout": 0.1}, loss="dpo")
    task({"lora_dropout": 0.1}, loss="dpo", disable_dropout=False)
    with pytest.raises(UserError, match=r"eval\.metrics"):
        task(evaluation={"metrics": ["perplexity"]}, loss="kto")
    task(evaluation={"chat_template_kwargs": {"enable_thinking": False}}, loss="kto")
    task(loss="kto", loss_type="apo_zero_unpaired", per_device_train_batch_size=1)


@pytest.mark.parametrize(
    ("loss", "loss_type"), [("dpo", None), ("orpo", None), ("kto", None), ("kto", "apo_zero_unpaired")]
)
def test_the_best_adapter_is_chosen_by_a_figure_that_there_is(loss: str, loss_type: str | None) -> None:
    fields: dict[str, Any] = {"loss": loss, "loss_type": loss_type, "load_best_model_at_end": True}
    with pytest.raises(
        UserError, match=r"'nonsense' is not measured: use one of eval_loss, .*rewards/margins"
    ) as raised:
        task(evaluation={}, metric_for_best_model="nonsense", **fields)
    assert "eval.metrics" not in str(raised.value)
    spec = task(evaluation={}, metric_for_best_model="eval_rewards/margins", **fields).training
    assert {"accuracy", *named(loss_of(spec), [0.0] * 8, 1, 1, 1)} == set(spec.figures)


def test_rewards_are_shown_as_they_are_and_accuracies_in_percent() -> None:
    values = {"loss": 0.5, "accuracy": 0.75, "rewards/chosen": -0.25, "rewards/accuracies": 0.75, "kl": 0.125}
    (line,) = eval_lines("t", 3, EvalResult(values, 4))
    assert line == (
        "t: step 3 eval loss 0.5000 accuracy 75.0% rewards/chosen -0.2500 rewards/accuracies 75.0% kl 0.1250"
    )
