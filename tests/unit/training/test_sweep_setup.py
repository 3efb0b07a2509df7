"""What of a sweep is refused before a run, and where."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_mux.checkpoint import Manifest, SavedTask
from megatron_mux.errors import UserError
from megatron_mux.tasks import read_task_file
from megatron_mux.training.joining import read_joining
from megatron_mux.training.sweep_setup import check_comparisons, check_sweeps, with_saved_trials

SAMPLED = {"adapter.r": [4, 8], "sampler": {"type": "tpe", "trials": 2, "at_once": 1}}


def file(directory: Path, sweep: dict[str, Any], **top: Any) -> Path:
    (directory / "d.jsonl").write_text('{"text": "a"}\n')
    task = {
        "name": "s",
        "adapter": {"peft_type": "LORA"},
        "data": {"path": "d.jsonl"},
        "training": {"max_steps": 4},
        "eval": {"path": "d.jsonl"},
        "sweep": sweep,
    }
    path = directory / "tasks.yaml"
    path.write_text(json.dumps({**top, "tasks": [task]}))
    return path


def test_what_a_sampler_chooses_needs_a_place(tmp_path: Path) -> None:
    sampled = read_task_file(file(tmp_path, SAMPLED))
    with pytest.raises(UserError, match=r"sweep.sampler of s: trials are kept on disk: use --save DIR"):
        check_sweeps(sampled, saves=False)
    check_sweeps(sampled, saves=True)


def test_a_scheduler_that_would_compare_nothing_is_refused_once_the_data_tell(tmp_path: Path) -> None:
    path = file(tmp_path, {"adapter.r": [4, 8]}, scheduler={"type": "halving", "min_steps": 40})
    text = path.read_text().replace(
        '{"max_steps": 4}', '{"num_train_epochs": 2, "per_device_train_batch_size": 1}'
    )
    path.write_text(text)
    found = read_task_file(path)
    opened: list[Any] = [SimpleNamespace(spec=spec, data=range(20)) for spec in found.tasks]
    with pytest.raises(UserError) as caught:
        check_comparisons(found, opened)
    assert len(caught.value.problems) == 1 and "task 's': scheduler.min_steps: 40" in str(caught.value)
    check_comparisons(found, [SimpleNamespace(spec=spec, data=range(21)) for spec in found.tasks])  # type: ignore[misc]


def test_trials_that_could_not_be_chosen_now_are_refused(tmp_path: Path) -> None:
    entry = SavedTask("s-r16", 4, "finished", "", "", {}, "")
    entry.configuration.sweep, entry.configuration.settings = "s", {"adapter.r": 16}
    with pytest.raises(UserError, match=r"sweep of s: s-r16 .* is not of its values: set them back"):
        with_saved_trials(read_task_file(file(tmp_path, SAMPLED)), Manifest(1, "b", [entry], {}))


@pytest.mark.parametrize(
    ("sweep", "top"),
    [(SAMPLED, {}), ({"adapter.r": [4, 8]}, {"scheduler": {"type": "halving", "min_steps": 1}})],
)
def test_a_file_that_joins_has_no_scheduler_and_no_sampler(
    sweep: dict[str, Any], top: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"belongs to the file that a run begins with"):
        read_joining(file(tmp_path, sweep, **top))
    assert len(read_joining(file(tmp_path, {"adapter.r": [4, 8]}))) == 2


def test_a_sampler_needs_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_mux.tasks.sweep_reading.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"sweep.sampler: tpe needs the package optuna"):
        read_task_file(file(tmp_path, SAMPLED))
