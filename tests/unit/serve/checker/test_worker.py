"""What the process finds wrong with tasks and files, with a tiny backbone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_mux.serve.checker.worker import answer, check_fields, check_files
from megatron_mux.serve.jobs.fields import Fault
from tests import tiny_models
from tests.end_to_end.workplace import write_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)
QUESTION = [{"role": "user", "content": "w1 w2"}]
PAIR = {
    "input": {"messages": QUESTION, "tools": [], "parallel_tool_calls": True},
    "preferred_output": [{"role": "assistant", "content": "w3"}],
    "non_preferred_output": [{"role": "assistant", "content": "w4 w5"}],
}
CHAT = {"messages": [*QUESTION, {"role": "assistant", "content": "w3"}]}


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tiny_models.make(tmp_path_factory.mktemp("models"), "llama")
    write_tokenizer(made)
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "files").mkdir()
    return tmp_path / "files"


def upload(files: Path, name: str, rows: Sequence[Any]) -> str:
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    (files / name).write_text("".join(f"{line}\n" for line in lines))
    return str(files / name)


def task(file: str, held_out: str = "", **sections: Any) -> dict[str, Any]:
    return {
        "name": "ftjob-1",
        "adapter": {"peft_type": "LORA", "target_modules": "all-linear", **sections.get("adapter", {})},
        "data": {"path": file, "max_length": 32, **sections.get("data", {})},
        "training": {"per_device_train_batch_size": 2, "num_train_epochs": 3, **sections.get("training", {})},
        **({"eval": {"path": held_out, **sections.get("eval", {})}} if held_out else {}),
    }


@pytest.mark.parametrize(
    ("sections", "param", "words"),
    [
        ({"adapter": {"r": 0}}, "adapter.r", "a whole number of at least 1"),
        ({"adapter": {"target_modules": ["nope"]}}, "adapter.target_modules", "'nope' is no module"),
        ({"adapter": {"peft_type": "HIRA"}}, "adapter.peft_type", "not support"),
        ({"training": {"optim": "x"}}, "training.optim", "must be one of"),
        ({"training": {"max_steps": 3}}, "training", "not both"),
        ({"training": {"router_aux_loss_coef": 0.1}}, "training.router_aux_loss_coef", "experts"),
        ({"training": {"loss": "dpo"}, "eval": {"metrics": ["rouge"]}}, "eval.metrics", "leave them out"),
    ],
)
def test_wrong_fields(backbone: Path, sections: dict[str, Any], param: str, words: str) -> None:
    (fault,) = check_fields(backbone, task("/state/files/file-1", "/state/files/file-2", **sections))
    assert fault.param == param
    assert fault.message.startswith(f"{param}")
    assert words in fault.message


def test_all_wrong_fields_come_at_once_and_files_are_not_looked_at(backbone: Path) -> None:
    wrong = task(
        "/state/files/file-1", adapter={"r": "x"}, training={"learning_rate": -1}, data={"shuffle": 2}
    )
    params = {fault.param for fault in check_fields(backbone, wrong)}
    assert params == {"adapter.r", "training.learning_rate", "data.shuffle"}
    assert check_fields(backbone, task("/state/files/file-1")) == []


def test_files_of_conversations_are_counted(backbone: Path, files: Path, tmp_path: Path) -> None:
    long = {"messages": [*QUESTION, {"role": "assistant", "content": "w1 " * 50}]}
    given = task(upload(files, "file-1", [CHAT] * 4 + [long]), upload(files, "file-2", [CHAT]))
    found = check_files(backbone, given, tmp_path / "cache")
    assert "faults" not in found
    assert (found["total_steps"], found["records"]) == (9, 5)
    assert found["tokens"] == 4 * 7 + 32
    assert [note[:7] for note in found["notes"]] == ["file-1:"]
    assert "longer than 32 tokens" in found["notes"][0]


def test_all_bad_lines_of_both_files_are_named_without_paths(
    backbone: Path, files: Path, tmp_path: Path
) -> None:
    broken = upload(files, "file-1", [CHAT, "{", {"question": "w1"}, *["[]"] * 40])
    held_out = upload(files, "file-2", [{"messages": []}])
    faults = check_files(backbone, task(broken, held_out), tmp_path / "cache")["faults"]
    assert {(fault.param, fault.code) for fault in faults} == {
        ("training_file", "invalid_training_file"),
        ("validation_file", "invalid_validation_file"),
    }
    messages = [fault.message for fault in faults]
    assert messages[0].startswith("file-1: line 2: not valid JSON")
    assert messages[1].startswith("file-1: line 3: no known form")
    assert any("42 bad rows in all" in message for message in messages)
    assert messages[-1].startswith("file-2: line 1: ")
    assert not any(str(tmp_path) in message or str(backbone) in message for message in messages)


@pytest.mark.parametrize("content", ["", "\n\n", "PK\x03\x04", "PAR1", "{" * 100_000, '{"text": "\\ud800"}'])
def test_files_that_hold_no_records(backbone: Path, files: Path, tmp_path: Path, content: str) -> None:
    (files / "file-1").write_text(content)
    request = {"do": "files", "backbone": str(backbone), "cache": str(tmp_path / "cache")}
    found = answer({**request, "task": task(str(files / "file-1"))})
    (message, param, code) = found["faults"][0]
    assert (param, code) == ("training_file", "invalid_training_file")
    assert message.startswith("file-1: ")
    assert str(tmp_path) not in message


def test_lines_that_would_take_much_memory_are_refused(
    backbone: Path, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_mux.serve.checker.worker._LONGEST_LINE", 2**20)
    path = upload(files, "file-1", [CHAT, {"text": "w1 " * 400_000}])
    (fault,) = check_files(backbone, task(path), tmp_path / "cache")["faults"]
    assert fault == Fault("file-1: line 2: has more than 1 MiB", "training_file", "invalid_training_file")


def test_preferences_in_openais_format_are_those_of_ours(backbone: Path, files: Path, tmp_path: Path) -> None:
    given = task(upload(files, "file-1", [PAIR] * 3), training={"loss": "dpo"})
    found = check_files(backbone, given, tmp_path / "cache")
    assert (found["total_steps"], found["records"]) == (6, 3)
    ours = {"prompt": QUESTION, "chosen": PAIR["preferred_output"], "rejected": PAIR["non_preferred_output"]}
    plain = task(upload(files, "file-2", [ours] * 3), training={"loss": "dpo"})
    assert check_files(backbone, plain, tmp_path / "cache")["tokens"] == found["tokens"]


def test_bad_lines_of_preferences_are_told_in_openais_words(
    backbone: Path, files: Path, tmp_path: Path
) -> None:
    rows = [PAIR, "", "{", {**PAIR, "preferred_output": 3}, {"input": {}, "preferred_output": []}]
    given = task(upload(files, "file-1", rows), training={"loss": "dpo"})
    faults = check_files(backbone, given, tmp_path / "cache")["faults"]
    messages = [fault.message for fault in faults]
    assert [message[:16] for message in messages] == [f"file-1: line {n}: " for n in (3, 4, 5)]
    assert '"preferred_output" must be' in messages[1]
    assert "'non_preferred_output'" in messages[2] or '"non_preferred_output"' in messages[2]


def test_a_check_that_fails_says_so(backbone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer({"do": "fields", "backbone": str(backbone), "task": {"data": 3}})
    assert found == {"failed": True}
    assert "Traceback" in capsys.readouterr().err


def test_the_process_answers_lines(backbone: Path) -> None:
    request = {
        "do": "fields",
        "backbone": str(backbone),
        "task": task("/f/file-1", adapter={"r": 0}),
        "cache": None,
    }
    command = [sys.executable, "-m", "megatron_mux.serve.checker.worker", "files"]
    done = subprocess.run(
        command, input=f"{json.dumps(request)}\n", capture_output=True, text=True, check=True
    )
    ready, found = map(json.loads, done.stdout.splitlines())
    assert ready == {"ready": True}
    assert found["faults"][0][1] == "adapter.r"
