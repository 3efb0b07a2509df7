"""Chooses settings of a sweep by the results of earlier configurations, with Optuna."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megatron_mux.tasks.sweep import Dimension, Range, Settings, Sweep, rounded, unseen

_TRIES = 20
_NUMBERS = 2**31
_STRIDE = 1_000_003


@dataclass(frozen=True)
class Trial:
    """A configuration that was chosen before.

    Attributes:
        values: The deciding figure by steps, as far as it is known; None: it was not finite.
        state: `pruned`: its scheduler stopped it; `failed` counts for nothing.
    """

    settings: Settings
    values: Mapping[int, float | None] = field(default_factory=dict)
    state: Literal["running", "complete", "pruned", "failed"] = "running"


def ask(sweep: Sweep, trials: Sequence[Trial], is_greater_better: bool) -> Settings:
    """Choose the next settings, other than those of `trials`; they follow from these and the sampler's seed alone.

    Args:
        sweep: Has a sampler.
        trials: All earlier ones, in their order.
        is_greater_better: Whether a better adapter has the deciding figure higher.
    """
    import optuna

    assert sweep.sampler is not None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions = {key: _distribution(own) for key, own in sweep.space.items()}
    states = {
        "running": optuna.trial.TrialState.RUNNING,
        "complete": optuna.trial.TrialState.COMPLETE,
        "pruned": optuna.trial.TrialState.PRUNED,
        "failed": optuna.trial.TrialState.FAIL,
    }
    seed = (sweep.sampler.seed * _STRIDE + len(trials)) % _NUMBERS
    sampler = optuna.samplers.TPESampler(seed=seed)
    study = optuna.create_study(direction="maximize" if is_greater_better else "minimize", sampler=sampler)
    for trial in trials:
        last = trial.values[max(trial.values)] if trial.values else None
        # A trial that diverged is not told with an earlier figure, which may be a good one.
        state = trial.state if last is not None or trial.state == "running" else "failed"
        study.add_trial(
            optuna.trial.create_trial(
                state=states[state],
                params={key: _parameter(sweep.space[key], trial.settings[key]) for key in sweep.space},
                distributions=distributions,
                value=last if state == "complete" else None,
                intermediate_values={step: own for step, own in trial.values.items() if own is not None},
            )
        )
    seen = [trial.settings for trial in trials]
    for _ in range(_TRIES):
        chosen = study.ask(distributions).params
        settings = {key: _setting(own, chosen[key]) for key, own in sweep.space.items()}
        if settings not in seen:
            return settings
    return unseen(sweep.space, seen, random.Random(seed))


def first_trials(sweep: Sweep) -> Sweep:
    """The sweep with the configurations that train first: nothing is known of any yet."""
    assert sweep.sampler is not None
    trials: list[Trial] = []
    for _ in range(min(sweep.sampler.at_once, sweep.sampler.trials)):
        trials.append(Trial(ask(sweep, trials, False)))
    named: dict[str, Settings] = {}
    for trial in trials:
        named[sweep.name_of(trial.settings, named)] = trial.settings
    return replace(sweep, configurations=named)


def _distribution(dimension: Dimension) -> Any:
    """A dimension as Optuna has it; of a list the position is chosen, since lists may hold lists."""
    from optuna import distributions

    if not isinstance(dimension, Range):
        return distributions.CategoricalDistribution(tuple(range(len(dimension))))
    if dimension.kind == "int_uniform":
        return distributions.IntDistribution(int(dimension.low), int(dimension.high))
    return distributions.FloatDistribution(dimension.low, dimension.high, log=dimension.kind == "log_uniform")


def _parameter(dimension: Dimension, setting: Any) -> Any:
    return setting if isinstance(dimension, Range) else dimension.index(setting)


def _setting(dimension: Dimension, parameter: Any) -> Any:
    if not isinstance(dimension, Range):
        return dimension[parameter]
    return parameter if dimension.kind == "int_uniform" else dimension.within(rounded(parameter))
