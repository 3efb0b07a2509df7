"""What a sampler chooses, and from what it follows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import pytest

from megatron_mux.tasks.sampler import Trial, ask, first_trials
from megatron_mux.tasks.sweep import Range, SamplerSpec, Settings, Sweep


def test_the_sampler_finds_a_known_optimum_sooner_than_chance() -> None:
    """Of a surface with one valley, at a learning rate of 1e-3; medians over five seeds, 40 trials each."""

    def best(seed: int, guided: bool) -> float:
        space = {"training.learning_rate": Range("log_uniform", 1e-6, 1.0)}
        sweep = Sweep("s", {}, Path(), space, SamplerSpec(type="tpe", trials=40, seed=seed))
        trials, losses = list[Trial](), list[float]()
        for _ in range(40):
            history = trials if guided else [Trial(own.settings) for own in trials]
            settings = ask(sweep, history, is_greater_better=False)
            losses.append(abs(math.log10(settings["training.learning_rate"]) + 3))
            trials.append(Trial(settings, {4: losses[-1]}, "complete"))
        return min(losses[20:])

    guided, chance = (sorted(best(seed, own) for seed in range(5))[2] for own in (True, False))
    assert guided < chance / 2


def test_trials_follow_from_what_is_known_of_them() -> None:
    """Also from their figures: Optuna's first ten choices, at least, are random whatever these are."""
    space: Any = {
        "training.learning_rate": Range("log_uniform", 1e-5, 1e-3),
        "adapter.target_modules": (["q"], "all"),
    }
    sampler = SamplerSpec(type="tpe", trials=99, at_once=16, seed=4)
    settings = [*first_trials(Sweep("s", {}, Path(), space, sampler)).configurations.values()]
    assert len(settings) == 16

    def chosen(sign: float) -> Settings:
        values = [{1: 0.5, 2: sign * own["training.learning_rate"]} for own in settings]
        trials = [Trial(own, value, "complete") for own, value in zip(settings, values, strict=True)]
        states = [*trials, Trial(settings[0], {}, "failed"), Trial(settings[0])]
        first, again = (ask(Sweep("s", {}, Path(), space, sampler), states, False) for _ in range(2))
        assert first == again and first["adapter.target_modules"] in (["q"], "all")
        return first

    assert chosen(1.0)["training.learning_rate"] < chosen(-1.0)["training.learning_rate"]


@pytest.mark.parametrize("state", ["complete", "pruned"])
def test_a_trial_that_ends_without_a_finite_figure_counts_as_failed(
    state: Literal["complete", "pruned"],
) -> None:
    """An earlier good one says nothing of it."""
    space = {"training.learning_rate": Range("log_uniform", 1e-6, 1.0)}
    sweep = Sweep("s", {}, Path(), space, SamplerSpec(type="tpe", trials=40))
    known: list[Trial] = []
    for _ in range(12):
        settings = ask(sweep, known, False)
        known.append(Trial(settings, {4: settings["training.learning_rate"]}, "complete"))
    settings = {"training.learning_rate": 0.9}
    diverged, failed = Trial(settings, {2: -5.0, 4: None}, state), Trial(settings, {}, "failed")
    assert ask(sweep, [*known, diverged], False) == ask(sweep, [*known, failed], False)


@pytest.mark.parametrize("tries", [20, 0])
def test_a_sampler_chooses_no_combination_twice(tries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_mux.tasks.sampler._TRIES", tries)
    space: Any = {"adapter.r": (2, 4, 8), "adapter.target_modules": (["q"], "all")}
    sweep = Sweep("s", {}, Path(), space, SamplerSpec(type="tpe", trials=6, at_once=3))
    trials = [Trial(own, {2: 1.0}, "complete") for own in first_trials(sweep).configurations.values()]
    while len(trials) < 6:
        trials.append(Trial(ask(sweep, trials, False), {2: 1.0}, "complete"))
    assert len({repr(trial.settings) for trial in trials}) == 6
