"""Task files with defaults, sweeps and a scheduler: what they mean, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_mux.errors import UserError
from megatron_mux.tasks import TaskFile, read_task_file
from megatron_mux.tasks.sampler import Trial, ask, first_trials
from megatron_mux.tasks.sweep import Range, SamplerSpec, Sweep
from tests.unit.task_files import task, with_data

RATES = {"log_uniform": ["1e-5", 1.0e-3]}
HALVING = {"type": "halving", "min_steps": 2}
EVALUATED = {"eval": {"path": "data/b.jsonl"}}


def read(folder: Path, *tasks: Any, **top: Any) -> TaskFile:
    path = with_data(folder) / "tasks.yaml"
    path.write_text(yaml.safe_dump({"tasks": list(tasks), **top}, sort_keys=False))
    return read_task_file(path)


def problems(folder: Path, *tasks: Any, **top: Any) -> list[str]:
    with pytest.raises(UserError) as caught:
        read(folder, *tasks, **top)
    return [text.partition("tasks.yaml: ")[2] for text in caught.value.problems]


def test_a_grid_has_every_combination_under_a_name_that_tells_it(tmp_path: Path) -> None:
    modules = [["q_proj", "v_proj"], "all-linear"]
    swept = {
        "adapter.r": [4, 16],
        "training.learning_rate": ["1e-4", 2.0e-3],
        "adapter.target_modules": modules,
    }
    file, rates = read(tmp_path, task(sweep=swept), task(name="alone")), ("0.0001", "0.002")
    assert [spec.name for spec in file.tasks] == [
        *(f"movie-r{r}-lr{lr}-{m}" for r in (4, 16) for lr in rates for m in ("q_proj.v_proj", "all-linear")),
        "alone",
    ]  # fmt: skip
    third = file.tasks[2]
    assert (third.adapter.r, third.training.learning_rate) == (4, 0.002)  # type: ignore[attr-defined]
    assert file.sweeps["movie"].configurations[third.name] == {
        "adapter.r": 4, "training.learning_rate": 0.002, "adapter.target_modules": ["q_proj", "v_proj"],
    }  # fmt: skip


def test_samples_follow_from_the_seed_and_differ(tmp_path: Path) -> None:
    def values(seed: int) -> list[tuple[int, float]]:
        swept = {
            "adapter.r": {"int_uniform": [2, 9]},
            "training.learning_rate": RATES,
            "samples": 20,
            "seed": seed,
        }
        path = tmp_path / "tasks.yaml"
        path.write_text(yaml.safe_dump({"tasks": [task(sweep=swept)]}))
        tasks: list[Any] = read_task_file(path).tasks
        return [(spec.adapter.r, spec.training.learning_rate) for spec in tasks]

    with_data(tmp_path)
    first = values(1)
    assert first == values(1) != values(2) and len(set(first)) == 20
    assert all(2 <= rank <= 9 and 1e-5 <= rate <= 1e-3 for rank, rate in first)
    assert min(rate for _, rate in first) < 1e-4, "each factor is as likely"


def test_a_sweep_may_list_its_settings(tmp_path: Path) -> None:
    file = read(
        tmp_path, task(sweep=[{"adapter.r": 4, "adapter.lora_alpha": 8}, {"data.path": "data/b.jsonl"}])
    )
    assert [spec.name for spec in file.tasks] == ["movie-r4-alpha8", "movie-b"]
    assert file.tasks[1].data.path == tmp_path / "data" / "b.jsonl"


def test_defaults_are_merged_into_every_task_and_anchors_are_left_alone(tmp_path: Path) -> None:
    own = {"name": "own", "training": {"learning_rate": 0.5}, "eval": None}
    other = {
        "name": "other",
        "adapter": {"peft_type": "IA3", "target_modules": ["k_proj"], "feedforward_modules": []},
    }
    defaults = {key: value for key, value in task(**EVALUATED).items() if key != "name"}
    swept = {"name": "swept", "sweep": {"training.max_steps": [5, 6]}}
    file = read(tmp_path, own, other, swept, defaults=defaults, **{"x-mine": {"r": 1}})
    first, second, *rest = file.tasks
    assert (first.training.learning_rate, first.training.max_steps, first.eval) == (0.5, 3, None)
    assert second.adapter.peft_type == "IA3" and second.eval is not None
    assert [spec.training.max_steps for spec in rest] == [5, 6]


def test_equal_names_and_long_ones_are_numbered(tmp_path: Path) -> None:
    swept = {"data.path": ["data/a.jsonl", "./data/a.jsonl"]}
    long = task(name="n" * 90, sweep={"training.learning_rate": [0.001, 0.01]})
    names = [spec.name for spec in read(tmp_path, task(sweep=swept), long).tasks]
    assert names == ["movie-a", "movie-a-2", f"{'n' * 90}-001", f"{'n' * 90}-002"]


@pytest.mark.parametrize(
    ("swept", "said"),
    [
        ({}, "sweep: must be a mapping such as"),
        ({"samples": 3}, "sweep: must be a mapping such as"),
        ({"r": [4]}, "sweep.r: must be a field of a section, such as adapter.r, or one of samples, seed, sampler"),
        ({"adapter.r": []}, "sweep.adapter.r: must have at least one value"),
        ({"adapter.r": 4}, "sweep.adapter.r: must be a list of values, or one of {uniform, log_uniform"),
        ({"adapter.r": [4, 4]}, "sweep.adapter.r: has 4 twice"),
        ({"adapter.r": [4, "many"]}, "adapter.r: must be a whole number of at least 1"),
        ({"adapter.rr": [4]}, "adapter.rr: unknown key; did you mean 'r'?"),
        ({"training.learning_rate": RATES}, "sweep.training.learning_rate: a range has no end of values: add samples"),
        ({"training.learning_rate": {"log_uniform": [0, 1]}, "samples": 2}, "log_uniform must begin above 0"),
        ({"training.learning_rate": {"uniform": [2, 1]}, "samples": 2}, "uniform must go from a lower number"),
        ({"adapter.r": {"int_uniform": [1, 2.5]}, "samples": 2}, "int_uniform must be two whole numbers"),
        ({"adapter.r": [2, 4], "samples": 3}, "sweep.samples: there are only 2 combinations"),
        ({"adapter.r": [2, 4], "samples": 0}, "sweep.samples: must be a whole number of at least 1"),
        ({"adapter.r": [2, 4], "seed": 1}, "sweep.seed: is of samples"),
        ({"adapter.r": list(range(1, 1002))}, "sweep: has 1001 configurations, more than 1000"),
        ({"adapter.r": [2], "sampler": {"type": "tpee", "trials": 2}}, "sweep.sampler.type: must be one of tpe"),
        ({"adapter.r": [2], "sampler": {"type": "tpe"}}, "sweep.sampler.trials: is missing"),
        ({"adapter.r": [2], "sampler": {"type": "tpe", "trials": 2}, "seed": 1}, "sweep.seed: is not for a sampler"),
        ({"adapter.r": {"int_uniform": [1, 4]}, "samples": 5}, "there are only 4 combinations: give at most 4"),
        ([{"adapter.r": 4}, {"adapter.r": 4}], "sweep[1]: is there twice"),
        ([4], "sweep[0]: must be a mapping such as"),
        ([{"name": "x"}], "sweep[0].name: must be a field of a section"),
    ],
)  # fmt: skip
def test_what_no_sweep_can_be_is_refused(swept: Any, said: str, tmp_path: Path) -> None:
    (found,) = problems(tmp_path, task(sweep=swept))
    assert said in found and found.startswith("task 'movie' (#1): ")


@pytest.mark.parametrize(
    ("scheduler", "said"),
    [
        ({"type": "halving"}, "scheduler: min_steps: halving needs the steps before its first rung"),
        ({"type": "halving", "min_steps": 0}, "scheduler: min_steps: must be a whole number of at least 1"),
        (
            {**HALVING, "min_steps": 3},
            "scheduler.min_steps: 3 is not less than its 3 steps: nothing is compared",
        ),
        ({**HALVING, "factor": 1}, "scheduler: factor: must be a whole number of at least 2"),
        ({**HALVING, "factr": 2}, "scheduler: factr: unknown key; did you mean 'factor'?"),
        ({"type": "median", "factor": 3}, "scheduler: factor: is of type: halving"),
        ({"type": "best"}, "scheduler: type: must be one of halving, median, none"),
        (
            {**HALVING, "metric": "eval_f1"},
            "task 'movie': scheduler.metric: 'eval_f1' is not measured: use one of",
        ),
    ],
)
def test_what_no_scheduler_can_be_is_refused(scheduler: Any, said: str, tmp_path: Path) -> None:
    (found,) = problems(tmp_path, task(sweep={"adapter.r": [2, 4]}, **EVALUATED), scheduler=scheduler)
    assert said in found


def test_a_scheduler_needs_a_sweep_and_its_evaluation(tmp_path: Path) -> None:
    assert problems(tmp_path, task(), scheduler=HALVING) == [
        "scheduler: compares the configurations of a sweep: add sweep to a task"
    ]
    (tmp_path / "more").mkdir()
    (found,) = problems(tmp_path / "more", task(sweep={"adapter.r": [2, 4]}), scheduler=HALVING)
    assert found == "task 'movie': scheduler.metric: eval_loss is of an evaluation: add an eval section"


def test_a_sampler_needs_an_evaluation_and_every_sweep_a_name_of_its_own(tmp_path: Path) -> None:
    sampler = {"adapter.r": [2, 4], "sampler": {"type": "tpe", "trials": 2}}
    twice = {"adapter.r": [2, 4]}, {"adapter.r": [8]}
    unnamed = {key: value for key, value in task(sweep=twice[0]).items() if key != "name"}
    found = problems(tmp_path, task(sweep=sampler), *(task(name="b", sweep=own) for own in twice), unnamed)
    assert found == [
        "task 'b' (#3): name: is that of another sweep: every sweep needs its own",
        "task (#4): name: must be text, got nothing: put quotes around it",
        "task 'movie': scheduler.metric: eval_loss is of an evaluation: add an eval section",
    ]


def test_a_kind_that_is_a_list_is_answered(tmp_path: Path) -> None:
    kinds = {"peft_type": ["LORA", "IA3"], "target_modules": ["q_proj"]}
    found = problems(tmp_path, task(adapter=kinds), defaults={"adapter": task()["adapter"]})
    assert any("adapter.peft_type: must be one of" in text for text in found)


def test_every_mistake_at_once_each_of_defaults_once(tmp_path: Path) -> None:
    defaults = {"adapter": {"peft_type": "LORA", "rr": 1, "target_modules": ["q_proj"]}, "more": {}}
    tasks = [{"name": name, "data": {"path": "data/a.jsonl"}} for name in ("a", "b")]
    swept = {**tasks[0], "name": "c", "sweep": {"data.max_length": [8, "short"]}}
    assert problems(tmp_path, *tasks, swept, defaults=defaults, schedule={}) == [
        "unknown key 'schedule' at the top level; did you mean 'scheduler'?",
        "defaults: unknown key 'more': the keys here are adapter, data, training, eval",
        "task 'c' (#3): data.max_length: must be a whole number of at least 2 and at most 1000000000, got 'short'",
        "defaults: adapter.rr: unknown key; did you mean 'r'?",
    ]


def test_the_sampler_finds_a_known_optimum_sooner_than_chance() -> None:
    """Of a surface with one valley, at a learning rate of 1e-3; medians over five seeds, 40 trials each."""

    def best(seed: int, guided: bool) -> float:
        space = {"training.learning_rate": Range("log_uniform", 1e-6, 1.0)}
        sweep = Sweep("s", {}, Path(), space, SamplerSpec(type="tpe", trials=40, seed=seed))
        trials: list[Trial] = []
        for _ in range(40):
            history = trials if guided else [Trial(own.settings) for own in trials]
            settings = ask(sweep, history, is_greater_better=False)
            loss = abs(math.log10(settings["training.learning_rate"]) + 3)
            trials.append(Trial(settings, {4: loss}, "complete"))
        return min(own.values[4] for own in trials[20:])

    guided, chance = (sorted(best(seed, own) for seed in range(5))[2] for own in (True, False))
    assert guided < chance / 2


def test_trials_follow_from_what_is_known_of_them() -> None:
    space: Any = {
        "training.learning_rate": Range("log_uniform", 1e-5, 1e-3),
        "adapter.target_modules": (["q"], "all"),
    }
    sweep = first_trials(Sweep("s", {}, Path(), space, SamplerSpec(type="tpe", trials=9, at_once=3, seed=4)))
    assert len(sweep.configurations) == 3
    trials = [Trial(own, {2: 1.0 + i}, "pruned") for i, own in enumerate(sweep.configurations.values())]
    states = [*trials, Trial(trials[0].settings, {}, "failed"), Trial(trials[0].settings)]
    chosen = ask(sweep, states, False)
    assert chosen == ask(sweep, states, False)
    assert 1e-5 <= chosen["training.learning_rate"] <= 1e-3 and chosen["adapter.target_modules"] in (
        ["q"],
        "all",
    )
