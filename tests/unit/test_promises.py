"""Every promise to users is in tests/promises.md, with tests that exist."""

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import pytest

from megatron_mux.adapters.registry import KINDS
from megatron_mux.arguments.megatron_flags import flags_by
from megatron_mux.cli.main import COMMANDS
from megatron_mux.section import Section
from megatron_mux.tasks import data, evaluation, spec, training

PAGE = (TESTS := Path(__file__).parents[1]).joinpath("promises.md").read_text()
parsed = cache(lambda file: ast.parse((TESTS / file).read_text()).body)
SECTIONS: dict[str, type[Section]] = {"eval": evaluation.EvalSpec, "eval.generate": evaluation.GenerateSpec}
SECTIONS |= {"data": data.DataSpec, "data.mixture": data.WeightedSource, "training": training.TrainingSpec}


def test_each_promise_has_tests_that_exist_or_none() -> None:
    for _, _, tests, also in (row.split("|") for row in re.findall(r"^\| (?!promise)(.*) \|$", PAGE, re.M)):
        assert re.fullmatch(r" (\*\*none\*\*|`[\w/]+\.py::\w+`( `[\w/]+\.py::\w+`)*) ", tests)
        for file, name in re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", tests + also):
            assert not name or name in [n.name for n in parsed(file) if isinstance(n, ast.FunctionDef)], file


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_is_promised(command: str) -> None:
    trains = command in ("train", "serve-instance")
    text = PAGE if trains else PAGE.split(f"### `megatron-mux {command}`")[1].split("\n##")[0]
    flags = importlib.import_module(COMMANDS[command].module).build_parser()._option_string_actions
    inert = {"-h", "--help", *flags_by("fixed"), *flags_by("without effect")}
    assert not [flag for flag in flags if flag not in inert and f"`{flag}`" not in text]


def test_every_field_is_promised() -> None:
    fields = [f"{name}.{field}" for name, kind in (SECTIONS | KINDS).items() for field in kind.model_fields]
    assert not [field for field in [*spec.TaskSpec.model_fields, *fields] if f"`{field}`" not in PAGE]
