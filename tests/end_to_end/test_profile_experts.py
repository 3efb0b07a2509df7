"""Experts from the profile of tasks to a run with a placement, its traces and its refusals."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_mux.backbone.registry import read_backbone_info
from megatron_mux.moe.access_profile import read_profile
from megatron_mux.moe.profile_tasks import identity
from tests.end_to_end.forked import Fault, Server
from tests.end_to_end.harness import assert_close
from tests.end_to_end.ranks import run_ranks
from tests.end_to_end.test_plans import tool
from tests.end_to_end.workplace import Workplace, furnish

ROOT = Path(__file__).resolve().parents[2]
TASKS: dict[str, dict[str, Any]] = {
    name: {
        "adapter": {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], **adapter},
        "data": {"path": data, "max_length": 24},
        "training": {"per_device_train_batch_size": 4, "learning_rate": 0.003, "max_steps": 6, "seed": 1},
    }
    for name, data, adapter in (
        ("experts", "pairs.jsonl", {"target_parameters": ["mlp.experts.down_proj"]}),
        ("attention", "texts.jsonl", {}),
    )
}
TASKS["attention"]["training"] |= {"optim": "sgd", "learning_rate": 0.1}
RANKS = ("--expert-model-parallel-size", "2")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A workplace with a Mixtral."""
    made = furnish(tmp_path_factory.mktemp("experts"), "mixtral")
    made.write_tasks("tasks.yaml", TASKS)
    return made


def profile_experts(server: Server, words: Sequence[object]) -> None:
    """Run the tool in a process of its own, which joins a world and leaves it."""
    script = [server.python, ROOT / "tools" / "profile_experts.py", *words]
    subprocess.run([str(word) for word in script], check=True)


def test_profile_counts_what_transformers_routes(place: Workplace, server: Server, tmp_path: Path) -> None:
    """Also the drift of two tasks over steps that the tool takes: of AdamW, and of SGD as in Theorem 1."""
    file, picture, drift = tmp_path / "profile.json", tmp_path / "experts.svg", tmp_path / "drift.svg"
    words = ["--backbone", place.backbone, "--tasks", place.tasks, "--output", file, "--picture", picture]
    profile_experts(server, [*words, "--drift-steps", 4, "--drift-picture", drift])
    check_drift(json.loads(file.read_text())["drift"])
    assert drift.read_text().count("<polyline") == 2 * (4 + 2)
    profile = read_profile(file)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(place.backbone, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(place.backbone)
    counts, tokens = np.zeros(profile.access.shape), 0
    for line in (place.root / "texts.jsonl").read_text().splitlines():
        ids = tokenizer(json.loads(line)["text"]).input_ids[:23] + [tokenizer.eos_token_id]
        found = model(torch.tensor([ids]), output_router_logits=True).router_logits
        tokens += len(ids)
        for layer, logits in enumerate(found):
            chosen = logits.topk(profile.top_k, dim=-1).indices.flatten()
            counts[layer] += np.bincount(chosen, minlength=profile.model.experts)
    assert np.abs(profile.by_task["attention"] - counts / tokens).max() < 1e-12
    assert profile.coactivation is not None and profile.scores is not None
    assert np.allclose(profile.coactivation.diagonal(axis1=1, axis2=2) / profile.tokens, profile.access)
    assert picture.read_text().count("<title>") == 3 * profile.access.size


def check_drift(found: dict[str, Any]) -> None:
    for name, task in found.items():
        assert [step["step"] for step in task["steps"]] == [1, 2, 3, 4]
        assert task["compared"] == 3 * 4 * task["probe_tokens"] * 5  # the first step has nothing to go by
        assert 0 <= task["violations"] < task["compared"] / 10
        assert np.allclose(np.array(task["access"]).sum(axis=2), 2) and len(task["access"]) == 5
        for step in task["steps"]:
            sgd = name == "attention"
            if sgd:  # the update is the clipped gradient times the rate
                clipped = step["gradient_norm"] * min(1.0, 1.0 / (step["gradient_norm"] + 1e-6))
                assert step["update_norm"] == pytest.approx(step["learning_rate"] * clipped, rel=1e-3)
            for layer in step["layers"]:
                assert (layer["bound_mean"] is None) == (step["step"] == 1)
                assert (layer["paper_mean"] is None) == (step["step"] == 1 or not sgd)
                assert 0 <= layer["mean"] <= layer["largest"] <= 1
                if layer["paper_mean"] is not None:  # one L for both: never less
                    assert layer["paper_mean"] >= layer["bound_mean"] * (1 - 1e-6)
        assert sum(step["layers"][0]["mean"] for step in task["steps"]) > 0


def write_placement(place: Workplace, name: str, placement: list[Any], **changes: Any) -> Path:
    model = identity(read_backbone_info(place.backbone)).model_dump()
    path = place.root / name
    path.write_text(json.dumps({"model": model, "workers": 2, "placement": placement, **changes}))
    return path


def placed(place: Workplace, server: Server) -> Path:
    """What the tools make of the tasks and of two workers on two nodes."""
    profile, topology, output = (
        place.root / name for name in ("profile.json", "topology.json", "placed.json")
    )
    words = ["--backbone", place.backbone, "--tasks", place.tasks, "--output", profile]
    profile_experts(server, words)
    workers = [{"node": node, "capacity": 11} for node in "ab"]
    links = {"within_node": 1e9, "between_nodes": 1e8}
    uplinks = {node: {"up": 1e8, "down": 1e8} for node in "ab"}
    content = {"workers": workers, "master_node": "a", "bandwidth": links, "uplinks": uplinks}
    topology.write_text(json.dumps(content))
    words = ["--profile", profile, "--topology", topology, "--objective", "full", "--output", output]
    assert tool("place_experts").main([str(word) for word in words]) == 0
    assert json.loads(output.read_text())["nodes"] == ["a", "b"]
    return output


def test_adapters_come_out_the_same_wherever_experts_are(place: Workplace, server: Server) -> None:
    """Also killed once the save of step 2 is complete, and continued under another placement."""
    first = write_placement(
        place, "uneven.json", [[[1], [1], [0], [1], [1]], *[[[0], [1], [0, 1], [1], [0]]] * 3]
    )
    other = placed(place, server)
    kept, moved = place.root / "kept", place.root / "moved"
    fault = Fault("megatron_mux.engine.train_step:TrainStep.backward", 5, "kill before")
    for save, more, faults, wanted in (
        (kept, (), {}, [0, 0]),
        (moved, ("--mux-expert-placement", first), {1: fault}, [1, -signal.SIGKILL]),
        (moved, ("--mux-expert-placement", other, "--load", moved), {}, [0, 0]),
    ):
        words = place.arguments("--save", save, "--save-interval", "2", *RANKS, *more)
        runs = run_ranks(server, words, 2, faults)
        assert [own.status for own in runs] == wanted, "".join(own.errors for own in runs)
    for name in TASKS:
        found, reference = (
            load_file(directory / name / "checkpoint-6" / "adapter_model.safetensors")
            for directory in (moved, kept)
        )
        assert_close(found, reference, 1e-4, name)


@pytest.mark.parametrize(
    ("placement", "changes", "complaint"),
    [
        ([[[0], [1], [0], [1], []]] * 4, {}, "placement[0][4]: leaves the expert out"),
        ([[[0], [1], [0], [1], [0]]] * 4, {"workers": 3}, "is for 3 workers, but there are 2"),
        (
            [[[0], [1], [0], [1], [0]]] * 4,
            {"model": {"family": "qwen3_moe", "layers": 4, "experts": 5, "top_k": 2}},
            "is for another model: family 'qwen3_moe' instead of 'mixtral'",
        ),
    ],
)
def test_a_wrong_placement_is_refused(
    placement: list[Any], changes: dict[str, Any], complaint: str, place: Workplace, server: Server
) -> None:
    file = write_placement(place, "wrong.json", placement, **changes)
    save = place.root / "refused"
    runs = run_ranks(server, place.arguments("--save", save, *RANKS, "--mux-expert-placement", file), 2)
    assert [own.status for own in runs] == [2, 2] and not save.exists()
    assert complaint in runs[0].errors
