"""Task files with defaults, sweeps and a scheduler: what they mean, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import megatron_mux
from megatron_mux.errors import UserError
from megatron_mux.tasks import TaskFile, read_task_file
from megatron_mux.tasks.scheduler import SchedulerSpec
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


@pytest.mark.parametrize(
    ("space", "count"),
    [
        ({"adapter.r": list(range(1, 301))}, 300),
        ({"training.learning_rate": {"uniform": [0.001, 0.00105]}}, 6),
        ({"training.learning_rate": {"log_uniform": [0.000998, 0.00102]}, "adapter.r": [2, 4]}, 10),
        # 0.001004999 is reached by rounding to 0.001 alone: hardly ever.
        ({"training.learning_rate": {"uniform": [0.00100499999, 0.001014]}}, 2),
        ({"training.warmup_ratio": {"uniform": [0, 1]}}, 1000),
    ],
)
def test_no_sample_is_drawn_twice(space: dict[str, Any], count: int, tmp_path: Path) -> None:
    drawn = (
        read(tmp_path, task(sweep={**space, "samples": count, "seed": 3}))
        .sweeps["movie"]
        .configurations.values()
    )
    assert len(drawn) == len({tuple(own.values()) for own in drawn}) == count


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


def test_defaults_are_merged_into_configurations(tmp_path: Path) -> None:
    """Of another kind of adapter none, as in a task; of one field of a mapping the others stay."""
    defaults = {
        "adapter": {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]},
        "eval": {"path": "data/b.jsonl", "generate": {"samples": 7}},
    }
    ia3 = {"adapter.target_modules": ["k_proj"], "adapter.feedforward_modules": []}
    other = {"adapter.peft_type": "IA3", **ia3, "eval.generate.max_new_tokens": 5}
    swept = {"name": "s", "data": {"path": "data/a.jsonl"}, "sweep": [{"adapter.peft_type": "LORA"}, other]}
    first, second = read(tmp_path, swept, defaults=defaults).tasks
    assert first.adapter.r == 8 and second.adapter.peft_type == "IA3"  # type: ignore[attr-defined]
    assert second.eval is not None and second.eval.generate is not None
    assert (second.eval.generate.samples, second.eval.generate.max_new_tokens) == (7, 5)


def test_equal_names_and_long_ones_are_numbered(tmp_path: Path) -> None:
    swept = {"data.path": ["data/a.jsonl", "./data/a.jsonl"]}
    long = task(name="n" * 90, sweep={"training.learning_rate": [0.001, 0.01]})
    names = [spec.name for spec in read(tmp_path, task(sweep=swept), long).tasks]
    assert names == ["movie-a", "movie-a-2", f"{'n' * 90}-001", f"{'n' * 90}-002"]


def test_lists_are_shortened_before_names_are_numbered(tmp_path: Path) -> None:
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    swept = {"adapter.target_modules": [modules, ["q_proj"]], "training.learning_rate": [0.0001]}
    more = {"training.weight_decay": [0.01], "training.warmup_ratio": [0.1]}
    names = [spec.name for spec in read(tmp_path, task(sweep={**swept, **more})).tasks]
    assert names == [
        f"movie-{own}-lr0.0001-weight_decay0.01-warmup_ratio0.1" for own in ("q_proj.6more", "q_proj")
    ]


def test_a_path_that_looks_like_a_number_stays_a_path(tmp_path: Path) -> None:
    for name in ("1e5", "2e5"):
        (tmp_path / name).write_text('{"text": "x"}\n')
    listed = [{"data.path": "1e5", "data.split": "1e3"}]
    files = task(name="a", sweep={"data.path": ["1e5", "2e5"]}), task(name="b", sweep=listed)
    assert [spec.name for spec in read(tmp_path, *files).tasks] == ["a-1e5", "a-2e5", "b-1e5-split1e3"]


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
        ({"adapter.r": [2], "sampler": {"type": "tpe", "trials": 1}, "seed": 1}, "sweep.seed: is not for a sampler"),
        ({"adapter.r": [2], "sampler": "tpe"}, "sweep.sampler: must be a mapping of type, trials, at_once, seed, got"),
        ({"adapter.r": [2, 4], "adapter.use_rslora": [True, False], "sampler": {"type": "tpe", "trials": 5}},
         "sweep.sampler.trials: there are only 4 combinations: give at most 4"),
        ({"trainng.learning_rate": [1]}, "did you mean 'training.learning_rate'?"),
        ({"adapter.r": [2], "sample": 3}, "sweep.sample: must be a field of a section"),
        ({"adapter.r": [2], "sample": 3}, "; did you mean 'samples'?"),
        ({"adapter.r": {"uniform": [4, 16]}, "samples": 50}, "adapter.r: must be a whole number of at least 1"),
        ({"adapter.r": {"uniform": [4, 16]}, "samples": 50}, " (uniform draws fractions: use int_uniform)"),
        ({"training.warmup_steps": {"uniform": [2, 9]}, "samples": 50}, "warmup_steps must be a whole number, or a"),
        ({"training.learning_rate": {"uniform": [1, 1.01]}, "samples": 3}, "there are only 2 combinations"),
        ({"adapter.r": {"int_uniform": [1, 4]}, "samples": 5}, "there are only 4 combinations: give at most 4"),
        ([{"adapter.r": 4}, {"adapter.r": 4}], "sweep[1]: is there twice"),
        ([4], "sweep[0]: must be a mapping such as"),
        ([{"name": "x"}], "sweep[0].name: must be a field of a section"),
    ],
)  # fmt: skip
def test_what_no_sweep_can_be_is_refused(swept: Any, said: str, tmp_path: Path) -> None:
    (found,) = problems(tmp_path, task(sweep=swept, **EVALUATED))
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
            {"type": "median"},
            "eval.eval_steps: 500 leaves no evaluation before its last step (3), where median compares",
        ),
        (
            {"type": "median", "min_steps": 3},
            "scheduler.min_steps: 3 is not less than its 3 steps: nothing is compared",
        ),
        (
            {**HALVING, "metric": "eval_f1"},
            "task 'movie': scheduler.metric: 'eval_f1' is not measured: use one of",
        ),
    ],
)
def test_what_no_scheduler_can_be_is_refused(scheduler: Any, said: str, tmp_path: Path) -> None:
    (found,) = problems(tmp_path, task(sweep={"adapter.r": [2, 4, 6, 8]}, **EVALUATED), scheduler=scheduler)
    assert said in found


def test_median_needs_evaluations_to_compare_at_and_three_others(tmp_path: Path) -> None:
    evaluated = {"eval": {"path": "data/b.jsonl", "eval_steps": 2}, "training": {"max_steps": 4}}
    swept = task(sweep={"adapter.r": [2, 4, 6, 8]}, **evaluated)
    assert len(read(tmp_path, swept, scheduler={"type": "median", "min_steps": 2}).tasks) == 4
    fewer = {**swept, "sweep": {"adapter.r": [2, 4, 6]}}
    path = tmp_path / "tasks.yaml"
    path.write_text(yaml.safe_dump({"tasks": [fewer], "scheduler": {"type": "median", "min_steps": 3}}))
    with pytest.raises(UserError) as caught:
        read_task_file(path)
    assert [text.partition("'movie': ")[2] for text in caught.value.problems] == [
        "scheduler.type: median compares with three others, and there are 3 configurations: add some, or use halving",
        "eval.eval_steps: 2 leaves no evaluation between step 3 and its last (4), where median compares: give fewer",
    ]


def test_a_scheduler_finds_no_fault_with_a_sweep_that_could_not_be_read(tmp_path: Path) -> None:
    wrong = task(sweep={"adapter.r": [], "sampler": None}, **EVALUATED)
    assert problems(tmp_path, wrong, scheduler={"type": "median"}) == [
        "task 'movie' (#1): sweep.adapter.r: must have at least one value, got an empty list"
    ]


def test_steps_of_epochs_are_compared_with_those_of_the_scheduler_once_known(tmp_path: Path) -> None:
    swept = task(sweep={"adapter.r": [2, 4]}, training={"num_train_epochs": 1}, **EVALUATED)
    file = read(tmp_path, swept, scheduler={**HALVING, "min_steps": 1000})
    scheduler, spec = file.scheduler, file.tasks[0]
    assert isinstance(scheduler, SchedulerSpec) and not scheduler.problem_of_steps(spec, 1001)
    assert "1000 is not less than its 9 steps" in scheduler.problem_of_steps(spec, 9)


@pytest.mark.parametrize("decides", ["halving", "sampler"])
def test_figures_of_different_records_are_not_compared(decides: str, tmp_path: Path) -> None:
    swept: dict[str, Any] = {"eval.path": ["data/a.jsonl", "data/b.jsonl"]}
    if decides == "sampler":
        swept["sampler"] = {"type": "tpe", "trials": 2}
    top = {"scheduler": HALVING} if decides == "halving" else {}
    assert problems(tmp_path, task(sweep=swept, **EVALUATED), **top) == [
        "task 'movie': sweep.eval.path: figures of different records cannot be compared: leave it out of the sweep"
    ]


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


def test_a_wrong_sweep_hides_no_other_mistake(tmp_path: Path) -> None:
    wrong = task(sweep={"adapter.r": []}, training={"learning_rat": 1})
    unread = task(name="b", sweep={"data.path": [], "adapter.peft_type": [], "eval.path": ["data/b.jsonl"]})
    del unread["data"], unread["adapter"]
    scheduler = {"type": "halving", "factor": 1, "metrc": "x"}
    assert problems(tmp_path, wrong, unread, scheduler=scheduler, defaults={"training": {"max_step": 1}}) == [
        "task 'movie' (#1): sweep.adapter.r: must have at least one value, got an empty list",
        "task 'movie' (#1): training.learning_rat: unknown key; did you mean 'learning_rate'?",
        "task 'b' (#2): sweep.data.path: must have at least one value, got an empty list",
        "task 'b' (#2): sweep.adapter.peft_type: must have at least one value, got an empty list",
        "defaults: training.max_step: unknown key; did you mean 'max_steps'?",
        "scheduler: factor: must be a whole number of at least 2 and at most 1000000000, got 1",
        "scheduler: metrc: unknown key; did you mean 'metric'?",
        "scheduler: min_steps: halving needs the steps before its first rung: give it",
        "task 'movie': scheduler.metric: eval_loss is of an evaluation: add an eval section",
    ]


def test_a_wrong_field_hides_no_missing_evaluation(tmp_path: Path) -> None:
    assert problems(tmp_path, task(sweep={"adapter.rr": [2, 3]}), scheduler=HALVING) == [
        "task 'movie' (#1): adapter.rr: unknown key; did you mean 'r'?",
        "task 'movie': scheduler.metric: eval_loss is of an evaluation: add an eval section",
    ]


def test_all_that_is_wrong_with_an_evaluation_and_its_scheduler_is_said(tmp_path: Path) -> None:
    found = problems(
        tmp_path, task(sweep={"adapter.r": [2, 4]}), scheduler={"type": "none", "factor": 2, "min_steps": 1}
    )
    assert found[:2] == [
        "scheduler: factor: is of type: halving: leave it out",
        "scheduler: min_steps: is of type: halving or median: leave it out",
    ]


def test_a_swept_value_is_not_one_of_the_defaults(tmp_path: Path) -> None:
    found = problems(tmp_path, task(sweep={"training.seed": ["x"]}), defaults={"training": {"seed": 1}})
    assert [text.partition(": training.seed")[0] for text in found] == ["task 'movie' (#1)"]


def test_names_that_collide_with_those_of_configurations_are_said(tmp_path: Path) -> None:
    swept, already = task(sweep={"adapter.r": [4, 8]}), "already: every task needs its own"
    assert problems(tmp_path, task(name="movie-r4"), swept, task(name="movie-r8")) == [
        f"task 'movie' (#2): name: 'movie-r4', of a configuration, is taken by task #1 {already}",
        f"task 'movie-r8' (#3): name: is taken by a configuration of task #2 {already}",
    ]


def test_where_a_sweep_belongs_is_said(tmp_path: Path) -> None:
    swept = task(sweep={"adapter.r": [2, 4]})
    found = problems(
        tmp_path, {**task(), "swep": {}}, {**task(name="b"), "grid": {}}, sweep={"adapter.r": [2]}
    )
    assert found == [
        "unknown key 'sweep' at the top level: it belongs in a task",
        "task 'movie' (#1): swep: unknown key; did you mean 'sweep'?",
        "task 'b' (#2): grid: unknown key: the keys here are name, adapter, data, training, eval, sweep",
    ]
    with pytest.raises(
        UserError, match=r"task 'movie': sweep: is read from task files only: .* give its path"
    ):
        megatron_mux.train(backbone="none", tasks=[swept], save=tmp_path / "run")
