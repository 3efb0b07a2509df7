"""A task with tokens that the embedding lacks, beside two good ones: it alone is refused, before it starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.end_to_end.complaints import complaints
from tests.end_to_end.forked import Server
from tests.end_to_end.test_loop import DRIVER, python
from tests.end_to_end.workplace import TASKS, Workplace, furnish

SAID = "line 2: becomes token 96 ('<tool_a>'), which the backbone's embedding of 96 rows lacks"


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """Its tokenizer has a token more than the embedding has rows."""
    workplace = furnish(tmp_path_factory.mktemp("bad-tokens"))
    tokenizer: Any = AutoTokenizer.from_pretrained(workplace.backbone)
    tokenizer.add_tokens(["<more>"] + [f"<more{i}>" for i in range(2)] + ["<tool_a>"])
    assert tokenizer.convert_tokens_to_ids("<tool_a>") == 96
    tokenizer.save_pretrained(workplace.backbone)
    good, bad = {"prompt": "w1 w2", "completion": "w3"}, {"prompt": "w1", "completion": "<tool_a> w2"}
    workplace.write_records("bad.jsonl", [good, bad, good])
    pairs = [{"prompt": "w1 ", "chosen": word, "rejected": "w3"} for word in ("w2", "<tool_a>", "w4")]
    workplace.write_records("bad-pairs.jsonl", pairs)
    return workplace


def bad_tasks(workplace: Workplace) -> dict[str, dict[str, Any]]:
    """Bad in the training file, in the evaluation file, and in a file of preferences."""
    root, task = workplace.root, TASKS["lora"]
    training = {"loss": "dpo", "max_steps": 3, "per_device_train_batch_size": 2}
    adapter = {**task["adapter"], "lora_dropout": 0.0}
    good, bad = {"path": str(root / "pairs.jsonl"), "max_length": 24}, str(root / "bad.jsonl")
    return {
        "bad-training": {**task, "data": {**good, "path": bad}, "eval": {"path": good["path"]}},
        "bad-evaluation": {**task, "data": good, "eval": {"path": bad}},
        "bad-preference": {
            "adapter": adapter,
            "data": {"path": str(root / "bad-pairs.jsonl"), "max_length": 24},
            "training": training,
        },
    }


def test_at_the_start_every_bad_task_is_named(spoilt: Workplace, server: Server) -> None:
    bad = bad_tasks(spoilt)
    good = {name: TASKS[name] for name in ("lora", "diff")}
    found = complaints(server, spoilt.arguments(tasks=spoilt.write_tasks("all.yaml", {**good, **bad})))
    assert len(found) == 3
    for name, line in zip(bad, found, strict=True):
        assert f"task {name!r}: " in line and SAID in line


def test_at_joining_the_others_go_on_as_alone(spoilt: Workplace, server: Server, tmp_path: Path) -> None:
    watched, staged = tmp_path / "watched", tmp_path / "staged"
    watched.mkdir()
    staged.mkdir()
    tasks = spoilt.write_tasks("good.yaml", {name: TASKS[name] for name in ("lora", "diff")})
    alone = server.run(spoilt.arguments("--save", tmp_path / "alone", "--no-mux-rolling", tasks=tasks))
    assert alone.status == 0, alone.errors
    for name, task in bad_tasks(spoilt).items():
        (staged / f"{name}.yaml").write_text(json.dumps({"tasks": [{"name": name, **task}]}))
    flags: list[str | Path] = ["--no-mux-rolling", "--mux-watch", watched, "--save", tmp_path / "beside"]
    run = python(server, "-c", DRIVER, watched, staged, *spoilt.arguments(*flags, tasks=tasks))
    assert run.returncode == 0, run.stderr
    for name in bad_tasks(spoilt):
        assert any(f"{name}.yaml refused: " in line and SAID in line for line in run.stdout.splitlines()), (
            run.stdout
        )
    for checkpoint in ("lora/checkpoint-14", "diff/checkpoint-12"):
        files = [tmp_path / which / checkpoint / "adapter_model.safetensors" for which in ("alone", "beside")]
        assert files[0].read_bytes() == files[1].read_bytes(), checkpoint
