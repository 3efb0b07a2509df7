"""The other types of preference losses, and a fresh adapter, come out as with TRL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_mux.backbone.model import Backbone
from megatron_mux.engine import Engine
from megatron_mux.runtime import Parallel
from megatron_mux.tasks.preference import LOSS_TYPES
from tests.end_to_end.harness import adapter
from tests.end_to_end.preference_tasks import LENGTH, LORA, TRAINING, Preferences, furnished, steps_of
from tests.reference import solo
from tests.reference.trl_solo import train_trl

STEPS = 3
CLOSE = 1e-4  # relative, of losses and rewards
NOISE = 1e-5  # absolute, of rewards near zero: differences of sums of about 30
ELSEWHERE = ("sigmoid", "ipo", "robust", "kto")  # in test_preference.py
MORE = {"exo_pair": {"label_smoothing": 1e-3}}

FIELDS: dict[str, dict[str, Any]] = {
    kind: {"loss": loss, "loss_type": kind, **MORE.get(kind, {})}
    for loss, kinds in LOSS_TYPES.items()
    for kind in kinds
    if kind not in ELSEWHERE
} | {"fresh": {"loss": "dpo"}}


def test_losses_and_rewards_are_those_of_trl(parallel: Parallel, tmp_path: Path) -> None:
    place, records = furnished(tmp_path)
    preferences = Preferences(place)
    engine = Engine(Backbone.load(place.backbone, parallel), parallel)
    start = dict.fromkeys(FIELDS, solo.random_adapter(place.backbone, LORA, seed=1))
    engine.register_tasks(
        [
            preferences.task(name, steps=STEPS, initial=None if name == "fresh" else start[name], **more)
            for name, more in FIELDS.items()
        ]
    )
    start["fresh"] = adapter(engine, "fresh")  # its B is zero: TRL's reference, a copy of it, is the backbone
    results = steps_of(engine, STEPS)
    for name, more in FIELDS.items():
        training = {**TRAINING, "max_steps": STEPS, **more}
        wanted = train_trl(
            place.backbone, LORA, training, records[more["loss"]], start[name], LENGTH, tmp_path / name
        )
        for step, result in enumerate(results[name]):
            at = f"{name} step {step + 1}"
            assert result.loss == pytest.approx(wanted.losses[step], rel=CLOSE), at
            for key, value in result.metrics.items():
                assert value == pytest.approx(wanted.logs[step][key], rel=CLOSE, abs=NOISE), f"{at} {key}"
        assert {"rewards/chosen", "rewards/rejected", "rewards/margins"} <= result.metrics.keys(), name
