"""Preference tasks beside supervised ones come out as with TRL alone, and harm nobody."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file
from torch import Tensor

from megatron_mux.backbone.model import Backbone
from megatron_mux.data.preference import parse_preference
from megatron_mux.data.preference_file import PreferenceDataset
from megatron_mux.data.tokenizer import load_tokenizer
from megatron_mux.engine import Engine, Planning, StepResult
from megatron_mux.engine.evaluation.evaluator import EvalResult
from megatron_mux.errors import UserError
from megatron_mux.runtime import Parallel
from megatron_mux.tasks import TaskSpec, TrainingSpec
from tests.budget import failing
from tests.end_to_end.families import FAMILIES, lora, prefix
from tests.end_to_end.forked import Fault, Server
from tests.end_to_end.harness import Case, adapter, assert_close, random_records
from tests.end_to_end.outcome import assert_same_file, metrics
from tests.end_to_end.preference_tasks import (
    LENGTH,
    LORA,
    TRAINING,
    Preferences,
    furnished,
    section,
    steps_of,
)
from tests.end_to_end.ranks import run_ranks
from tests.end_to_end.workplace import Workplace
from tests.reference import solo
from tests.reference.peft_solo import load_model, wrap
from tests.reference.trl_solo import TrlResult, train_trl

STEPS = 20
SKY = [{"role": "user", "content": "w1 w2"}]
LOSS = 1e-4  # relative, every step
NOISE = 1e-5  # absolute, of rewards near zero: differences of sums of about 30
ADAPTER = 2e-3  # relative Frobenius norm

FIELDS: dict[str, dict[str, Any]] = {
    "dpo": {"loss": "dpo"},
    "ipo": {
        "loss": "dpo",
        "loss_type": "ipo",
        "beta": 0.2,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
    },
    "robust": {"loss": "dpo", "loss_type": "robust", "label_smoothing": 0.1},
    "orpo": {"loss": "orpo", "beta": 0.3},
    "kto": {"loss": "kto", "desirable_weight": 1.3, "per_device_train_batch_size": 5},
}


class Run(NamedTuple):
    """What an engine made of the tasks."""

    results: dict[str, list[StepResult]]
    tensors: dict[str, dict[str, Tensor]]
    evaluations: dict[str, EvalResult | UserError]


def supervised() -> list[Case]:
    """Three neighbours of other kinds, sizes and recipes."""
    kinds = (lora(FAMILIES["llama"].query_value, r=3), prefix(4), lora("all-linear", r=2))
    return [
        Case(
            f"sft-{i}",
            kind,
            {**TRAINING, "seed": i, "max_steps": STEPS},
            random_records(9, 90, 3, 20, seed=i),
        )
        for i, kind in enumerate(kinds)
    ]


@pytest.fixture(scope="module")
def furniture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workplace, dict[str, list[dict[str, Any]]]]:
    return furnished(tmp_path_factory.mktemp("preferences"))


@pytest.fixture(scope="module")
def place(furniture: tuple[Workplace, Any]) -> Workplace:
    return furniture[0]


@pytest.fixture(scope="module")
def backbone(place: Workplace, parallel: Parallel) -> Backbone:
    return Backbone.load(place.backbone, parallel)


@pytest.fixture(scope="module")
def initial(place: Workplace) -> dict[str, Tensor]:
    return solo.random_adapter(place.backbone, LORA, seed=1)


@pytest.fixture(scope="module")
def preferences(place: Workplace) -> Preferences:
    return Preferences(place)


@pytest.fixture(scope="module")
def together(
    backbone: Backbone, parallel: Parallel, preferences: Preferences, initial: dict[str, Tensor]
) -> Run:
    """All losses beside three supervised tasks, in two micro-batches; one as cached, one from a fresh adapter."""
    engine = Engine(backbone, parallel, Planning("spatial", 1, micro_batches=2))
    tasks = [preferences.task(name, steps=STEPS, initial=initial, **more) for name, more in FIELDS.items()]
    tasks.append(preferences.task("cached", "dpo", STEPS, initial, precompute_ref_log_probs=True))
    tasks.append(preferences.task("fresh", "dpo", STEPS))
    engine.register_tasks(tasks + [case.task for case in supervised()])
    results = steps_of(engine, STEPS)
    evaluations = engine.evaluate_together(list(FIELDS))
    run = Run(results, {name: adapter(engine, name) for name in engine.tasks}, evaluations)
    for name in engine.tasks:
        engine.remove_task(name)
    return run


@pytest.fixture(scope="module")
def alone(
    furniture: tuple[Workplace, Any], initial: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, TrlResult]:
    """The same with TRL, a task at a time."""
    found, (place, records) = {}, furniture
    for name, more in FIELDS.items():
        training = {**TRAINING, "max_steps": STEPS, **more}
        found[name] = train_trl(
            place.backbone,
            LORA,
            training,
            records[more["loss"]],
            initial,
            LENGTH,
            tmp_path_factory.mktemp(name),
        )
    return found


@pytest.mark.parametrize("name", FIELDS)
def test_losses_rewards_and_adapters_are_those_of_trl(
    name: str, together: Run, alone: dict[str, TrlResult]
) -> None:
    parts = FIELDS[name].get("gradient_accumulation_steps", 1)
    wanted = alone[name]
    for step, result in enumerate(together.results[name]):
        at = f"{name} step {step + 1}"
        losses = wanted.losses[step * parts : (step + 1) * parts]
        assert result.loss == pytest.approx(sum(losses) / parts, rel=LOSS), at
        for key, value in result.metrics.items():
            assert value == pytest.approx(wanted.logs[step][key], rel=LOSS, abs=NOISE), f"{at} {key}"
    assert {"rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen"} <= result.metrics.keys()
    assert len(together.results[name]) == STEPS
    assert_close(together.tensors[name], wanted.tensors, ADAPTER, name)


@pytest.mark.parametrize("name", FIELDS)
def test_evaluations_are_those_of_trl(name: str, together: Run, alone: dict[str, TrlResult]) -> None:
    found, wanted = together.evaluations[name], alone[name].evaluation
    assert isinstance(found, EvalResult)
    assert found.loss == pytest.approx(wanted["eval_loss"], rel=LOSS)
    assert {"rewards/chosen", "rewards/margins"} <= found.values.keys()
    for key, value in found.values.items():
        if key != "accuracy":  # that of rewards, which TRL does not have for KTO
            assert value == pytest.approx(wanted[f"eval_{key}"], rel=LOSS, abs=NOISE), key


def test_cached_references_give_the_same(together: Run) -> None:
    for one, other in zip(together.results["cached"], together.results["dpo"], strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
    assert_close(together.tensors["cached"], together.tensors["dpo"], 1e-4, "cached")


def test_a_fresh_adapter_refers_to_the_backbone(together: Run) -> None:
    first, *others = together.results["fresh"]
    assert first.metrics["rewards/chosen"] == pytest.approx(0, abs=NOISE), "B is zero"
    assert any(abs(result.metrics["rewards/chosen"]) > 0.1 for result in others)


def test_neighbours_come_out_the_same_whether_preferences_are_there_or_diverge(
    together: Run,
    backbone: Backbone,
    parallel: Parallel,
    preferences: Preferences,
    initial: dict[str, Tensor],
) -> None:
    engine = Engine(backbone, parallel, Planning("spatial", 1, micro_batches=2))
    bad = [
        preferences.task(name, loss, STEPS, initial, learning_rate=1e30, max_grad_norm=0.0)
        for name, loss in (("a-bad", "dpo"), ("b-bad", "orpo"), ("z-bad", "kto"))
    ]
    good = preferences.task("dpo", "dpo", STEPS, initial)
    cases = supervised()
    engine.register_tasks([*bad, good, *(case.task for case in cases)])
    results = steps_of(engine, STEPS)
    for task in bad:
        assert results[task.spec.name][-1].diverged
    for name in ("dpo", *(case.name for case in cases)):
        for one, other in zip(results[name], together.results[name], strict=True):
            assert one.loss == pytest.approx(other.loss, rel=1e-6), name
        assert_close(adapter(engine, name), together.tensors[name], 1e-4, name)
    for name in engine.tasks:
        engine.remove_task(name)


def test_what_cannot_be_trained_stops_its_task_alone(
    backbone: Backbone, parallel: Parallel, preferences: Preferences
) -> None:
    engine = Engine(backbone, parallel)
    bad, good = (
        preferences.task("bad", "dpo", 2, precompute_ref_log_probs=True),
        preferences.task("good", "kto", 2),
    )
    head = preferences.task("head", "orpo", 2)
    adapter = {**LORA, "modules_to_save": ["lm_head"]}
    head.spec = TaskSpec.model_validate({**head.spec.plain(), "adapter": adapter})
    with pytest.raises(UserError, match=r"task 'head': adapter: an output layer.* loss: orpo"):
        engine.register_tasks([good, head])
    engine.register_tasks([bad, good])
    with failing([backbone], lambda batch: True):  # the passes of references come first
        failed = engine.step()["bad"]
    assert (failed.status, failed.diverged) == ("failed", False) and "ran out of memory" in failed.reason
    results = steps_of(engine, 3)
    assert [result.status for result in results["good"]] == ["running", "finished"]
    for name in engine.tasks:
        engine.remove_task(name)


def test_a_run_reports_rewards_and_resumes_exactly(
    place: Workplace, server: Server, initial: dict[str, Tensor], tmp_path: Path
) -> None:
    start: Any = wrap(load_model(place.backbone), LORA, initial)
    start.save_pretrained(tmp_path / "start")
    tasks = {
        "cached": section(place, "dpo", 4, precompute_ref_log_probs=True),
        "kto": section(place, "kto", 4) | {"adapter": {"adapter_name_or_path": str(tmp_path / "start")}},
        "orpo": section(place, "orpo", 4),
    }
    file = place.write_tasks("preferences.yaml", tasks)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    # Killed in its third step, when the save after the second can only have begun once the first was complete.
    more = ("--save-interval", "1", "--mux-data-cache", tmp_path / "cache")
    run = server.run(place.arguments("--save", whole, *more, tasks=file))
    assert run.status == 0, run.errors
    fault = Fault("megatron_mux.engine.optimize:TaskOptimizer.step", 8, "kill before")
    run = server.run(place.arguments("--save", parts, *more, tasks=file), fault=fault)
    assert run.status == -signal.SIGKILL, run.errors
    kept = (tmp_path / "start").rename(tmp_path / "kept")
    other: Any = wrap(load_model(place.backbone), LORA, {key: 2 * value for key, value in initial.items()})
    other.save_pretrained(tmp_path / "start")
    run = server.run(place.arguments("--save", parts, "--load", parts, *more, tasks=file))
    assert run.status == 2 and "holds other weights than when the run was saved" in run.errors
    shutil.rmtree(tmp_path / "start")
    kept.rename(tmp_path / "start")
    run = server.run(place.arguments("--save", parts, "--load", parts, *more, tasks=file))
    assert run.status == 0, run.errors
    for name in tasks:
        ours, theirs = (root / name / "checkpoint-4" for root in (parts, whole))
        for path in theirs.iterdir():
            assert_same_file(ours / path.name, path)
        assert metrics(parts, name) == metrics(whole, name)
        keys = {key for line in metrics(whole, name) for key in line}
        assert {"rewards/chosen", "rewards/margins", "logps/rejected"} <= keys
        assert {"eval_loss", "eval_accuracy", "eval_rewards/chosen"} <= keys
        assert ("kl" in keys) == (name == "kto")


def test_a_run_on_two_pipeline_stages_gives_what_trl_gives(
    place: Workplace, server: Server, initial: dict[str, Tensor], alone: dict[str, TrlResult], tmp_path: Path
) -> None:
    start: Any = wrap(load_model(place.backbone), LORA, initial)
    start.save_pretrained(tmp_path / "start")
    from_start = {"adapter": {"adapter_name_or_path": str(tmp_path / "start")}}
    tasks = {
        name: section(place, more["loss"], STEPS, **{k: v for k, v in more.items() if k != "loss"})
        | from_start
        for name, more in FIELDS.items()
    }
    data = {"path": str(place.root / "pairs.jsonl"), "max_length": 24}
    for case in supervised():
        tasks[case.name] = {"adapter": case.adapter, "training": case.training, "data": data}
    file = place.write_tasks("two-stages.yaml", tasks)
    save, cache = tmp_path / "run", tmp_path / "cache"
    flags = ("--pipeline-model-parallel-size", "2", "--save", save, "--mux-data-cache", cache)
    runs = run_ranks(server, place.arguments(*flags, tasks=file), 2)
    assert [run.status for run in runs] == [0, 0], "".join(run.errors for run in runs)
    for name, wanted in alone.items():
        parts = FIELDS[name].get("gradient_accumulation_steps", 1)
        steps = [line for line in metrics(save, name) if "loss" in line]
        assert len(steps) == STEPS
        for step, line in enumerate(steps):
            losses = wanted.losses[step * parts : (step + 1) * parts]
            assert line["loss"] == pytest.approx(sum(losses) / parts, rel=LOSS), f"{name} step {step + 1}"
            rewards = {key: line[key] for key in line if key.startswith("rewards/")}
            assert {"rewards/chosen", "rewards/margins"} <= rewards.keys()
            for key, value in rewards.items():
                assert value == pytest.approx(wanted.logs[step][key], rel=LOSS, abs=NOISE), f"{name} {key}"
        tensors = load_file(save / name / f"checkpoint-{STEPS}" / "adapter_model.safetensors")
        assert_close(tensors, wanted.tensors, ADAPTER, name)


def test_defaults_are_those_of_trl(tmp_path: Path) -> None:
    from trl.experimental.orpo import ORPOConfig
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.kto_config import KTOConfig

    for loss, config in (("dpo", DPOConfig), ("orpo", ORPOConfig), ("kto", KTOConfig)):
        ours, theirs = (
            TrainingSpec.model_validate({"loss": loss}),
            config(output_dir=str(tmp_path), bf16=False, use_cpu=True),
        )
        for name in (
            "beta",
            "learning_rate",
            "label_smoothing",
            "discopop_tau",
            "desirable_weight",
            "undesirable_weight",
        ):
            assert not hasattr(theirs, name) or getattr(ours, name) == getattr(theirs, name), f"{loss} {name}"
        assert ours.truncation_mode == getattr(theirs, "truncation_mode", "keep_start")
        assert ours.disable_dropout == theirs.disable_dropout
        variant = getattr(theirs, "loss_type", "")
        assert ours.variant == (variant[0] if isinstance(variant, list) else variant)


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [
        ("The sky is blue.", "The sky is green."),
        ("w1 w2 w3", "w1 w2 w4 w5"),
        ([*SKY, {"role": "assistant", "content": "w3"}], [*SKY, {"role": "assistant", "content": "w4"}]),
    ],
)
def test_a_missing_prompt_is_found_as_trl_finds_it(chosen: Any, rejected: Any) -> None:
    from trl.data_utils import extract_prompt

    found = parse_preference({"chosen": chosen, "rejected": rejected}, "dpo")
    wanted = extract_prompt({"chosen": chosen, "rejected": rejected})
    assert found.prompt == wanted["prompt"]
    assert found.completions == (wanted["chosen"], wanted["rejected"])


def test_pairs_of_a_kto_task_are_divided_as_trl_divides_them(place: Workplace, tmp_path: Path) -> None:
    from datasets import Dataset
    from trl.data_utils import unpair_preference_dataset

    pairs = [{"prompt": f"w{i}", "chosen": f" w{i + 1}", "rejected": f" w{i + 2} w9"} for i in range(5)]
    path = place.write_records("divided.jsonl", pairs)
    tokenizer = load_tokenizer(place.backbone)
    data = PreferenceDataset(path, tokenizer, 16, "kto", tmp_path)
    wanted = unpair_preference_dataset(Dataset.from_list(pairs))
    texts = [tokenizer.decode(data[i].tokens[:-1]) for i in range(len(data))]
    assert texts == [row["prompt"] + row["completion"] for row in wanted]
    assert data.desirable.tolist() == wanted["label"]
    mixed = data.mismatched(3, 8)
    assert tokenizer.decode(mixed.tokens[:-1]) == wanted[3]["prompt"] + wanted[8]["completion"]
    assert mixed.labelled.tolist() == [False, True, True, True]
