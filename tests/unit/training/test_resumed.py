"""What may change in a task that continues from a save: its length, as far as its schedule allows, and no update."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_mux.checkpoint import Manifest, SavedTask
from megatron_mux.engine import Task
from megatron_mux.errors import UserError
from megatron_mux.tasks import TaskSpec, TrainingSpec
from megatron_mux.training.resumed import continue_task, is_over
from megatron_mux.training.task_setup import merge_saved
from tests.unit.task_files import task

RECORDS = 40
LINEAR = {"lr_scheduler_type": "linear", "learning_rate": 1.0}
STABLE = {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 5}}


def spec_of(training: dict[str, Any], adapter: str = "LORA") -> TaskSpec:
    section = {"peft_type": adapter, "target_modules": ["q_proj"]}
    return TaskSpec.model_validate(task(adapter=section, training=training))


def saved(training: dict[str, Any], step: int, status: str = "running", adapter: str = "LORA") -> SavedTask:
    plain = spec_of(training, adapter).plain()
    return SavedTask("movie", step, status, "", f"movie/checkpoint-{step}", plain, "data")


def resumed(entry: SavedTask, training: dict[str, Any], adapter: str = "LORA") -> Task:
    """The task as it goes on from `entry`, with this `training` section."""

    class Data(list[int]):
        fingerprint, path = "data", "data/a.jsonl"

    data: Any = Data(range(RECORDS))
    made = Task(spec_of(training, adapter), data)
    list(continue_task(made, entry))
    return made


def rates(made: Task) -> list[float]:
    training, total = made.spec.training, made.spec.total_steps(RECORDS)
    curve = training.rate_curve(total, made.lengths)
    return [training.learning_rate * curve(step) for step in range(total)]


@pytest.mark.parametrize(
    ("training", "step"),
    [
        ({"lr_scheduler_type": "constant"}, 20),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3}, 20),
        ({"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 3}, 20),
        (STABLE, 15),
        ({"lr_scheduler_type": "cosine", "warmup_steps": 4}, 5),
        (LINEAR, 1),
    ],
    ids=lambda value: value["lr_scheduler_type"] if isinstance(value, dict) else f"after {value}",
)
def test_a_length_that_leaves_the_rates_so_far_as_they_were_may_change(
    training: dict[str, Any], step: int
) -> None:
    entry = saved({**training, "max_steps": 20}, step)
    made = resumed(entry, {**training, "max_steps": 40})
    assert made.lengths == (), "the rates are those of 40 steps at once"
    before = resumed(entry, {**training, "max_steps": 20})
    assert rates(made)[:step] == rates(before)[:step]


@pytest.mark.parametrize(
    ("training", "step"),
    [
        (LINEAR, 2),
        (STABLE, 17),
        ({"lr_scheduler_type": "cosine", "warmup_steps": 4}, 6),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_ratio": 0.2}, 20),
    ],
    ids=lambda value: value["lr_scheduler_type"] if isinstance(value, dict) else f"after {value}",
)
def test_where_they_would_have_been_others_the_user_has_to_say_continue(
    training: dict[str, Any], step: int
) -> None:
    entry = saved({**training, "max_steps": 20}, step)
    with pytest.raises(
        UserError, match=r"max_steps: 40 steps instead of 20: .*lr_scheduler_on_resume: continue"
    ):
        resumed(entry, {**training, "max_steps": 40})
    made = resumed(entry, {**training, "max_steps": 40, "lr_scheduler_on_resume": "continue"})
    assert made.lengths == ((step, 20),)


def test_a_continued_rate_has_no_jump_and_ends_where_the_longer_run_does() -> None:
    """By hand: linear over 20 steps, finished, to 40 in all. A tenth of the 20 steps to come leads to the new curve."""
    entry = saved({**LINEAR, "max_steps": 20}, 20, "finished")
    found = rates(resumed(entry, {**LINEAR, "max_steps": 40, "lr_scheduler_on_resume": "continue"}))
    assert found[:20] == pytest.approx([1 - step / 20 for step in range(20)])
    assert found[20:22] == pytest.approx([2 / 3 * 0.05 + 1 / 3 * 0.5, 1 / 3 * 0.05 + 2 / 3 * 0.475])
    assert found[22:] == pytest.approx([1 - step / 40 for step in range(22, 40)])


def test_a_length_may_change_again_and_a_resume_in_between_changes_nothing() -> None:
    training = {**LINEAR, "lr_scheduler_on_resume": "continue"}
    first = resumed(saved({**training, "max_steps": 20}, 10), {**training, "max_steps": 100})
    entry = saved({**training, "max_steps": 100}, 50)
    entry.lengths = first.lengths
    again = resumed(entry, {**training, "max_steps": 100})
    assert again.lengths == ((10, 20),) and rates(again) == rates(first)
    shorter = resumed(entry, {**training, "max_steps": 60})
    assert shorter.lengths == ((10, 20), (50, 100))
    assert rates(shorter)[:50] == rates(first)[:50]
    jumps = [abs(after - before) for before, after in zip(rates(shorter), rates(shorter)[1:], strict=False)]
    assert max(jumps) < 0.2 and rates(shorter)[-1] == pytest.approx(1 / 60)


def test_a_length_counts_in_steps_however_it_is_written() -> None:
    entry = saved({"max_steps": 10, "per_device_train_batch_size": 4}, 5)
    assert resumed(entry, {"num_train_epochs": 1.0, "per_device_train_batch_size": 4}).lengths == ()
    with pytest.raises(UserError, match="num_train_epochs: 20 steps instead of 10: with them"):
        resumed(entry, {"num_train_epochs": 2.0, "per_device_train_batch_size": 4})


@pytest.mark.parametrize("steps", [3, 5])
def test_a_length_that_is_done_already_is_refused(steps: int) -> None:
    entry = saved({"lr_scheduler_type": "constant", "max_steps": 20}, 5)
    with pytest.raises(
        UserError, match=rf"max_steps: {steps} steps instead of 20, and 5 are done: give more"
    ):
        resumed(entry, {"lr_scheduler_type": "constant", "max_steps": steps})


def test_a_mask_that_is_frozen_stays_so_and_one_that_is_not_is_frozen_later() -> None:
    training = {"lr_scheduler_type": "constant", "lr_scheduler_on_resume": "continue"}
    for step, refused in ((13, False), (14, True)):  # two thirds of 20 steps
        entry = saved({**training, "max_steps": 20}, step, adapter="DIFF_PRUNING")
        if refused:
            with pytest.raises(UserError, match="frozen after 27 steps then instead of 14, and 14 are done"):
                resumed(entry, {**training, "max_steps": 40}, "DIFF_PRUNING")
        else:
            assert resumed(entry, {**training, "max_steps": 40}, "DIFF_PRUNING").lengths == ()


def test_who_is_over() -> None:
    constant = {"lr_scheduler_type": "constant", "max_steps": 20}
    longer = {**constant, "max_steps": 40}
    for status, training, over in (
        ("running", constant, False),
        ("finished", constant, True),
        ("finished", longer, False),
        ("failed", longer, True),
    ):
        entry = saved(constant, 20, status)
        made: Any = SimpleNamespace(spec=spec_of(training), data=range(RECORDS))
        assert is_over(made, entry) == over
    assert not is_over(made, None)


def test_what_may_not_change_is_named_with_what_may() -> None:
    entry = saved({"max_steps": 20, "seed": 1}, 5)
    manifest = Manifest(1, "backbone", [entry], {})
    harmless = {
        "max_steps": 40,
        "seed": 1,
        "save_steps": 3,
        "save_total_limit": 2,
        "load_best_model_at_end": True,
        "early_stopping_patience": 2,
        "report_to": "csv",
        "run_name": "again",
    }
    changed = task(
        eval={"path": "held-out", "eval_steps": 7}, training=harmless, adapter=entry.spec["adapter"]
    )
    assert merge_saved([TaskSpec.model_validate(changed)], manifest)
    with pytest.raises(UserError) as caught:
        merge_saved([spec_of({"max_steps": 20, "seed": 2})], manifest)
    first, second = caught.value.problems
    assert "task 'movie' is not as it was saved (training.seed: 2, not 1): set that back" in first
    names = set(TrainingSpec.model_fields)
    listed = {name for name in names if name in second.replace(",", "").replace("training.", "").split()}
    assert set(harmless) - {"seed"} | {"num_train_epochs", "lr_scheduler_on_resume"} <= listed
    for name in listed - {"max_steps", "num_train_epochs"}:
        assert name in TrainingSpec.undecided
