"""README and docs/: the examples in their code blocks are ones that the program takes."""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

import megatron_mux
from megatron_mux.adapters.kind import AdapterSpec
from megatron_mux.adapters.registry import KINDS
from megatron_mux.arguments.parser import build_parser
from megatron_mux.cli.main import COMMANDS
from megatron_mux.tasks import TrainingSpec, load_task_file
from megatron_mux.tasks.preference import PreferenceFields
from megatron_mux.training.commands import CommandQueue
from tests.end_to_end.workplace import TASKS, furnish

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples/launch/README.md"]


def blocks(language: str) -> list[tuple[str, str]]:
    """The page and text of every code block in a language."""
    pattern = re.compile(rf"^```{language}\n(.*?)^```", re.DOTALL | re.MULTILINE)
    return [(page.name, text) for page in PAGES for text in pattern.findall(page.read_text())]


def commands() -> list[tuple[str, list[str]]]:
    """Commands of this project that bash blocks run, with their words; without what is left out as `...`."""
    found = []
    for _, text in blocks("bash"):
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            for i, word in enumerate(words):
                if word == "megatron-mux" or (word == "megatron_mux.cli" and "..." not in words):
                    found.append((words[i + 1], words[i + 2 :]))
                elif word == "pretrain_mux.py":
                    found.append((word, words[i + 1 :]))
    return found


def test_task_files_are_valid(tmp_path: Path) -> None:
    found = [(page, text) for page, text in blocks("yaml") if re.search("^tasks:", text, re.MULTILINE)]
    texts = [text for _, text in found]
    assert len(texts) >= 2 and "sweeps.md" in [page for page, _ in found]
    for text in texts:
        path = tmp_path / "tasks.yaml"
        path.write_text(text)
        assert load_task_file(path, data_later=True)


@pytest.mark.parametrize(("script", "words"), commands(), ids=lambda value: str(value)[:60])
def test_commands_are_parsed(script: str, words: list[str]) -> None:
    if script == "pretrain_mux.py":
        build_parser().parse_args(words)
    else:
        importlib.import_module(COMMANDS[script].module).build_parser().parse_args(words)


def test_python_is_python_and_runs_where_it_stands_alone() -> None:
    for page, text in blocks("python"):
        code = compile(text, page, "exec")
        if page == "pipeline.md" and text.startswith("from megatron_mux"):
            exec(code, {})


def test_the_engine_trains_from_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ((page, text),) = [found for found in blocks("python") if "Engine(" in found[1]]
    workplace = furnish(tmp_path)
    workplace.backbone.rename(tmp_path / "DIR")
    training = {"per_device_train_batch_size": 2, "max_steps": 2}
    tasks = {name: {**TASKS[name], "training": training} for name in ("lora", "prefix")}
    workplace.write_tasks("tasks.yaml", tasks)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found: dict[str, Any] = {}
    exec(compile(text, page, "exec"), found)
    printed = re.findall(r"^(\w+) (\d+) \d+\.\d+$", capsys.readouterr().out, re.MULTILINE)
    assert printed == [(name, str(step)) for step in (1, 2) for name in tasks]
    assert found["engine"].tasks == ()
    assert found["config"]["peft_type"] == "PREFIX_TUNING"
    assert all(tensor.isfinite().all() for tensor in found["tensors"].values())


def test_ten_lines_of_python_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ((page, text),) = [found for found in blocks("python") if "megatron_mux.train(" in found[1]]
    assert len(text.splitlines()) <= 10
    workplace = furnish(tmp_path)
    workplace.backbone.rename(tmp_path / "DIR")
    (tmp_path / "pairs.jsonl").rename(tmp_path / "sentiment.jsonl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(
        "megatron_mux.runtime.shutdown", lambda: None
    )  # the world is that of other tests, too
    found: dict[str, Any] = {}
    exec(compile(text, page, "exec"), found)
    (result,) = found["results"].values()
    assert (result.name, result.status, result.step) == ("sentiment", "finished", 4)
    assert result.loss == result.history[-1]["loss"] and len(result.history) == 4
    assert (tmp_path / result.adapter / "adapter_model.safetensors").is_file()
    with pytest.raises(megatron_mux.UserError, match="task 1: must be a mapping"):
        megatron_mux.train(backbone="DIR", tasks=["tasks.yaml"], save="x")  # type: ignore[list-item]
    with pytest.raises(
        megatron_mux.UserError, match="commands, callbacks: are not passed to the 2 processes"
    ):
        megatron_mux.train(
            backbone="DIR", tasks=found["sentiment"], save="x", processes=2, commands=CommandQueue()
        )
    with pytest.raises(megatron_mux.UserError, match="several tasks have this name"):
        megatron_mux.train(backbone="DIR", tasks=[found["sentiment"]] * 2, save="x")
    with pytest.raises(megatron_mux.UserError, match=r"task 'sentiment': adapter\.r: "):
        megatron_mux.train(
            backbone="DIR", tasks=[{**found["sentiment"], "adapter": {"peft_type": "LORA", "r": 0}}], save="x"
        )


def test_the_table_of_layers_has_the_packages_of_the_contract() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(one["layers"] for one in settings["contracts"] if one["type"] == "layers")
    contract = {}
    for number, layer in enumerate(reversed(layers)):
        names = {name.strip() for name in re.split(r"[|:]", layer)}
        contract[number] = {name for name in names if not name.startswith("(")}  # those may be missing
    rows = re.findall(r"^\| (\d) \| (.*) \|$", (ROOT / "docs/design.md").read_text(), re.MULTILINE)
    assert {int(number): set(re.findall(r"`(\w+)`", names)) for number, names in rows} == contract


def test_the_table_of_adapters_has_every_kind_and_field() -> None:
    page = (ROOT / "docs/adapters.md").read_text()
    rows = re.findall(r"^\| `([A-Z0-9_]+)`.*? \| (.*?) \|", page, re.MULTILINE)
    found = {kind: sorted(re.findall(r"`(\w+)`", fields)) for kind, fields in rows}
    common = AdapterSpec.model_fields.keys()
    assert found == {name: sorted(kind.model_fields.keys() - common) for name, kind in KINDS.items()}


def test_the_page_on_training_has_every_field_and_names_no_other() -> None:
    page = (ROOT / "docs/training.md").read_text()
    fields = set(TrainingSpec.model_fields) - set(PreferenceFields.model_fields) - {"router_aux_loss_coef"}
    assert not [name for name in fields if f"`{name}`" not in page]
    table = page[page.index("## Every field") :]
    known = fields | set(TrainingSpec.refused)
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert not [name for row in rows for name in re.findall(r"`(\w+)`", row) if name not in known]
    names = set(inspect.signature(TrainingArguments).parameters)
    assert not names - known, "fields of TrainingArguments that are neither taken nor refused by name"


def test_every_command_has_its_flags_documented() -> None:
    flags = (ROOT / "docs/flags.md").read_text()
    documented = dict(
        re.findall(r":module: (\S+)\n   :func: build_parser\n   :prog: megatron-mux (\S+)", flags)
    )
    assert documented == {command.module: name for name, command in COMMANDS.items()}
