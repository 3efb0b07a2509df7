"""Adapters combined from their files are those of `peft`'s `add_weighted_adapter` in a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.lora import LoraModel
from safetensors.torch import load_file
from torch import Tensor

from megatron_mux.errors import UserError
from megatron_mux.merging.combine import METHODS, Recipe, combine
from tests.end_to_end.conftest import PathOf
from tests.end_to_end.families import lora
from tests.reference import peft_solo
from tools import combine_adapters

WEIGHTS = [0.7, -0.4]
SEED = 11

# Two adapters of a backbone each: other scales, and modules that only one of them has.
EQUAL = [lora(["q_proj", "o_proj"], 4, use_rslora=True), lora(["q_proj", "up_proj"], 4, lora_alpha=3)]
TRANSPOSED = [lora(["c_attn", "c_fc"], 4), lora(["c_attn"], 4, lora_alpha=3)]
IN_GPT2 = ("dare_linear", "ties_svd", "dare_ties_svd", "magnitude_prune_svd")
UNEQUAL = [lora(["q_proj", "v_proj"], 3, rank_pattern={"v_proj": 5}), lora(["v_proj"], 4)]


def saved(backbone: Path, section: dict[str, Any], seed: int, directory: Path) -> Path:
    initial = peft_solo.random_adapter(backbone, section, seed)
    model: Any = peft_solo.wrap(peft_solo.load_model(backbone), section, initial)
    model.save_pretrained(directory)
    return directory


def in_peft(
    backbone: Path, directories: list[Path], recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Tensor]:
    """The update of each module's weight, by `peft`."""
    model: Any = PeftModel.from_pretrained(peft_solo.load_model(backbone), directories[0], "a")
    model.load_adapter(directories[1], "b")
    inject = LoraModel.inject_adapter

    def and_seed(self: LoraModel, *args: Any, **options: Any) -> None:
        inject(self, *args, **options)
        torch.manual_seed(SEED)  # the initial values that it has just drawn are of no use

    monkeypatch.setattr(LoraModel, "inject_adapter", and_seed)
    model.add_weighted_adapter(
        ["a", "b"],
        WEIGHTS,
        "both",
        combination_type=recipe.method,
        density=recipe.density,
        majority_sign_method=recipe.majority_sign_method,
        svd_rank=recipe.svd_rank,
    )
    tensors: dict[str, Tensor] = get_peft_model_state_dict(model, adapter_name="both")
    return tensors


@pytest.mark.parametrize("method", METHODS)
def test_a_combination_is_that_of_peft(
    method: str, path_of: PathOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = "gpt2" if method in IN_GPT2 else "llama"
    sections = TRANSPOSED if family == "gpt2" else UNEQUAL if method in ("cat", "svd") else EQUAL
    backbone = path_of(family)
    directories = [saved(backbone, each, i, tmp_path / str(i)) for i, each in enumerate(sections)]
    recipe = Recipe(
        method,
        None if method in ("linear", "cat", "svd") else 0.6,
        "frequency" if family == "gpt2" else "total",
        5 if method == "ties_svd" else None,
        SEED,
    )
    names = dict(zip("ab", directories, strict=True))
    combine(names, WEIGHTS, recipe, tmp_path / "both", backbone)
    ours = load_file(tmp_path / "both/adapter_model.safetensors")
    theirs = in_peft(backbone, directories, recipe, monkeypatch)
    assert ours.keys() == theirs.keys()
    for key, found in ours.items():
        wanted = theirs[key]
        rank = found.shape[0 if "lora_A" in key else 1]
        if method == "cat":  # peft fills up with zeros
            wanted, rest = wanted.split(
                [rank, wanted.shape[0 if "lora_A" in key else 1] - rank], 0 if "lora_A" in key else 1
            )
            assert not rest.any()
        if "svd" not in method:
            assert torch.equal(found, wanted), key
        elif "lora_B" in key:  # factors may differ in sign
            a = key.replace("lora_B", "lora_A")
            torch.testing.assert_close(found @ ours[a], wanted @ theirs[a], rtol=0, atol=2e-6)


def test_peft_loads_the_combination_as_the_sum(path_of: PathOf, tmp_path: Path) -> None:
    """Concatenation is exact: the weighted sum of both updates, each module with the rank that it needs."""
    backbone = path_of("llama")
    sections = [lora(["q_proj", "o_proj"], 4, use_rslora=True), UNEQUAL[0]]
    directories = [saved(backbone, each, i, tmp_path / str(i)) for i, each in enumerate(sections)]
    words = ["--adapter", f"a={directories[0]}", f"b={directories[1]}", "--weights", "0.7", "-0.4"]
    assert combine_adapters.main([*words, "--method", "cat", "--output", str(tmp_path / "both")]) == 0
    states = []
    for directory in (*directories, tmp_path / "both"):
        model: Any = PeftModel.from_pretrained(peft_solo.load_model(backbone), directory)
        states.append(model.merge_and_unload().state_dict())
    bare = peft_solo.load_model(backbone).state_dict()
    for name, weight in bare.items():
        wanted = weight + 0.7 * (states[0][name] - weight) - 0.4 * (states[1][name] - weight)
        torch.testing.assert_close(states[2][name], wanted, rtol=0, atol=2e-6)
    config = json.loads((tmp_path / "both/adapter_config.json").read_text())
    assert config["r"] == 9 and config["rank_pattern"]
    assert "| a | 0.7 |" in (tmp_path / "both/README.md").read_text()


def test_what_cannot_be_combined_is_refused(
    path_of: PathOf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backbone = path_of("llama")
    plain = saved(backbone, lora(["q_proj"], 4), 0, tmp_path / "plain")
    wide = saved(backbone, lora(["q_proj"], 8), 0, tmp_path / "wide")
    other = saved(path_of("gpt2"), lora(["c_attn"], 4), 0, tmp_path / "other")
    dora = saved(backbone, lora(["q_proj"], 4, use_dora=True), 0, tmp_path / "dora")

    def refused(one: Path, two: Path, message: str, **fields: Any) -> None:
        with pytest.raises(UserError, match=message):
            combine({"a": one, "b": two}, WEIGHTS, Recipe(**fields), tmp_path / "both", backbone)
        assert not list(tmp_path.glob("*both*"))

    refused(plain, wide, "one rank, not a 4, b 8: use cat or svd", method="ties", density=0.5)
    refused(plain, dora, "has use_dora")
    refused(plain, other, "has no transformer.h.0.attn.c_attn")
    refused(plain, plain, "give --density", method="ties")
    refused(plain, plain, "--density: linear prunes nothing", density=0.5)
    refused(plain, plain, "--svd-rank: cat factors nothing", method="cat", svd_rank=2)
    refused(plain, plain, "must be one of linear, cat", method="mean")
    words = ["--adapter", f"a={plain}", f"b={wide}", "--output", str(tmp_path / "both"), "--weights", "1"]
    assert combine_adapters.main(words) == 2
    assert "1 weights for 2 adapters" in capsys.readouterr().err
