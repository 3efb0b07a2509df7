"""Every adapter that a run saves has a model card: how well it does, what it was made of, nothing of the machine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

import megatron_mux
from megatron_mux.merging.merge import merge
from megatron_mux.model_card import Parent, TaskCard, TrainingRecord
from tests.end_to_end.forked import Server
from tests.end_to_end.workplace import TASKS, furnish


def card_of(directory: Path) -> Any:
    return ModelCard((directory / "README.md").read_text())


def test_saved_adapters_have_cards(server: Server, tmp_path: Path) -> None:
    workplace = furnish(tmp_path)
    save = tmp_path / "run"
    training = {**TASKS["lora"]["training"], "max_steps": 4}
    tasks = workplace.write_tasks(
        "two.yaml",
        {
            "lora": {
                **TASKS["lora"],
                "training": training,
                "eval": {"path": "held-out.jsonl", "eval_steps": 2},
            },
            "diff": {**TASKS["diff"], "training": {**TASKS["diff"]["training"], "max_steps": 2}},
        },
    )
    done = server.run(workplace.arguments("--save", save, "--save-interval", "2", tasks=tasks))
    assert done.status == 0, done.output
    metrics = [json.loads(line) for line in (save / "lora/metrics.jsonl").read_text().splitlines()]
    for step in (2, 4):
        lines = [line for line in metrics if line["step"] <= step]
        losses = [line for line in lines if "loss" in line]
        evaluations = [line for line in lines if "eval_loss" in line]
        text = card_of(save / f"lora/checkpoint-{step}").text
        assert (
            f"Training loss {losses[0]['loss']:.4g} at step 1, {losses[-1]['loss']:.4g} at step {step}."
            in text
        )
        before, after = evaluations[0], evaluations[-1]
        for name in ("eval_loss", "eval_accuracy"):
            assert f"| {name} | {before[name]:.4g} | {after[name]:.4g} |" in text
        assert f"- Tokens seen: {sum(line['tokens'] for line in losses):,}" in text
        assert f"- Optimizer steps: {step}" in text
        assert (
            len([line for line in text.splitlines() if line.startswith(("| 0 ", "| 2 ", "| 4 "))])
            == 1 + step // 2
        )
    check_provenance(save / "lora/checkpoint-4", workplace.root)
    assert "diff_pruning" in card_of(save / "diff/checkpoint-2").data.tags
    merge(workplace.backbone, save / "lora/checkpoint-4", tmp_path / "merged")
    merged = card_of(tmp_path / "merged")
    assert merged.data.base_model == "backbone" and merged.data.library_name == "transformers"
    assert "| adapter | lora/checkpoint-4 |" in merged.text and "### Metrics" in merged.text


def check_provenance(directory: Path, root: Path) -> None:
    """The card names what was used, by names without paths, and the task can be read back."""
    card = card_of(directory)
    assert card.data.library_name == "peft" and card.data.base_model == "backbone"
    assert "lora" in card.data.tags and "megatron-mux" in card.data.tags
    assert str(root) not in card.content and "/" + root.parts[1] + "/" not in card.content
    for role, name in (("training", "pairs"), ("evaluation", "held-out")):
        count = len((root / f"{name}.jsonl").read_text().splitlines())
        assert re.search(rf"\| {role} \| `{name}.jsonl` \| {count} \| `[0-9a-f]{{16}}` \|", card.text)
    assert f"megatron-mux {megatron_mux.__version__}" in card.text and "- Seed: 1" in card.text
    given: dict[str, Any] = yaml.safe_load(card.text.partition("```yaml\n")[2].partition("```")[0])
    (task,) = given["tasks"]
    assert task["data"]["path"] == "pairs.jsonl"
    assert task["adapter"]["r"] == 4 and task["training"]["learning_rate"] == pytest.approx(0.003)


def test_files_of_mixtures_are_named_without_their_paths() -> None:
    spec = {
        "name": "mixed",
        "adapter": {"peft_type": "LORA", "adapter_name_or_path": "/home/me/start"},
        "data": {"mixture": [{"path": ["/home/me/a.jsonl", "b/c.jsonl"]}, {"path": "/home/me/d.parquet"}]},
        "training": {"seed": 1},
    }
    record = TrainingRecord()
    for step in (3, 4):  # a run that goes on in another directory
        record.add({"step": step, "loss": 1.0 / step, "tokens": 10})
    backbone = Parent("SmolLM2", "ab" * 32)
    text = TaskCard("mixed", backbone, 4, spec, "cd" * 32, None, {"data": 2}, "float32", record).text()
    assert "| training | `a.jsonl`, `c.jsonl`, `d.parquet` |" in text and "/home" not in text
    assert "- Parallel layout: data 2" in text
    assert "- Tokens seen: 20 (from step 3 on; the steps before were another run's)" in text
