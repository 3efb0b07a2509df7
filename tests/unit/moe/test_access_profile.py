"""Access profiles: what is wrong in a file is refused by the name of its entry."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_mux.errors import UserError
from megatron_mux.moe.access_profile import AccessProfile, ModelIdentity, read_profile
from tests.unit.moe.instances import profile_content, zipf_access


def content(**more: Any) -> dict[str, Any]:
    return profile_content(zipf_access(2, 4, 2, 0.5, 0), 2, **more)


def refusal(tmp_path: Path, found: Any) -> str:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(found))
    with pytest.raises(UserError) as caught:
        read_profile(path)
    assert all(problem.startswith(str(path)) for problem in caught.value.problems)
    return str(caught.value).removeprefix(f"{path}: ")


def test_a_profile_is_read_and_comes_back_the_same(tmp_path: Path) -> None:
    pairs = np.zeros((2, 4, 4))
    pairs[:, [0, 1], [1, 0]] = 7
    sets = [[{"experts": [0, 1], "count": 7}]] * 2
    path = tmp_path / "profile.json"
    path.write_text(
        json.dumps(content(coactivation=pairs.tolist(), routed_sets=sets, layers=[1, 2], drift=[1]))
    )
    profile = read_profile(path)
    assert profile.layer_indices == (1, 2)
    assert profile.routed_sets is not None and profile.routed_sets[1][0].experts == (0, 1)
    again = AccessProfile.model_validate(json.loads(profile.model_dump_json()))
    assert np.array_equal(again.access, profile.access)
    assert again.coactivation is not None and np.array_equal(again.coactivation, pairs)


def with_entry(value: Any) -> dict[str, Any]:
    found = content()
    found["access"][1][3] = value
    return found


@pytest.mark.parametrize("value", [math.nan, -0.1, math.inf, "0.5", None, True, [0.5]])
def test_an_entry_that_is_no_probability_is_named(tmp_path: Path, value: Any) -> None:
    assert refusal(tmp_path, with_entry(value)).startswith(
        "access[1][3]: must be a number of at least 0, got "
    )


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            {"access": [[0.5, 0.5, 0.5, 0.5]]},
            "access: has the shape 1 x 4, but the model has 2 layers x 4 experts",
        ),
        ({"access": [[1, 1], [1, 1, 0]]}, "access[1]: has 3 entries, but must have 2, one for each expert"),
        ({"access": [[1, 1, 0, 0], 3]}, "access[1]: must be a list with an entry for each expert, got 3"),
        ({"access": []}, "access: has 0 entries, but must have at least one"),
        ({"top_k": 3}, "top_k: is 3, but model.top_k is 2"),
        ({"top_k": "2"}, "top_k: input should be a valid integer"),
        ({"tokens": 0}, "tokens: "),
        ({"layers": [2, 1]}, "layers: must be the 2 rising indices"),
        ({"scores": [[1, 1, 1]]}, "scores: has the shape 1 x 3"),
        (
            {"coactivation": [[[0.0, 1], [0, 0]]]},
            "coactivation[0][0][1]: is 1, but [1][0] of the same layer is 0",
        ),
        ({"routed_sets": [[{"experts": [0, 1], "count": 1}]]}, "routed_sets: has 1 entries"),
        ({"routed_sets": [[{"experts": [0, 1], "count": 1}], []]}, "routed_sets[1]: is empty"),
        (
            {"routed_sets": [[{"experts": [0, 0], "count": 1}]] * 2},
            "routed_sets[0][0].experts: must be 2 different",
        ),
        (
            {"routed_sets": [[{"experts": [0, 4], "count": 1}]] * 2},
            "routed_sets[0][0].experts: must be experts from 0",
        ),
        ({"routed_sets": [[{"experts": [0, 1], "count": 0}]] * 2}, "routed_sets[0][0].count: "),
        ({"by_task": {"movie": [[1.0, 1, 1, 0]] * 2}}, "by_task.movie[0]: sums to 3"),
        ({"by_task": {"movie": [[1.0, 1, math.nan, 0]] * 2}}, "by_task.movie[0][2]: must be a number"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    assert refusal(tmp_path, content(**more)).startswith(said)


@pytest.mark.parametrize(
    ("value", "said"),
    [(1.5, "access[1][3]: must be a probability of at most 1"), (0.0, "access[1]: sums to ")],
)
def test_probabilities_that_cannot_be_are_named(tmp_path: Path, value: float, said: str) -> None:
    assert refusal(tmp_path, with_entry(value)).startswith(said)


def test_missing_and_unknown_entries_are_named(tmp_path: Path) -> None:
    found = content()
    del found["access"], found["model"]["experts"]
    found["model"]["expert"] = 4
    lines = refusal(tmp_path, found)
    for name in ("model.experts: is missing", "model.expert: is not known", "access: is missing"):
        assert name in lines


def test_models_differ_by_what_both_know() -> None:
    model = ModelIdentity(family="mixtral", layers=2, experts=4, top_k=2)
    known = model.model_copy(update={"fingerprint": "a", "hidden_size": 8})
    assert model.differences(known) == [] == known.differences(model)
    other = known.model_copy(update={"fingerprint": "b", "experts": 8})
    assert known.differences(other) == ["experts 4 instead of 8", "fingerprint 'a' instead of 'b'"]
