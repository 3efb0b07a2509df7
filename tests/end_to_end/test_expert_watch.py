"""Runs that place experts by themselves and move them: what they log, what they keep, and that nothing else changes."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.end_to_end.forked import Fault, Server
from tests.end_to_end.harness import assert_close
from tests.end_to_end.ranks import run_ranks
from tests.end_to_end.test_profile_experts import write_placement
from tests.end_to_end.workplace import Workplace, furnish

RANKS = ("--expert-model-parallel-size", "2")


def task(data: str, size: int, steps: int, **adapter: Any) -> dict[str, Any]:
    training = {"per_device_train_batch_size": size, "learning_rate": 0.003, "max_steps": steps, "seed": 1}
    sections = {"adapter": {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], **adapter}}
    return {**sections, "data": {"path": data, "max_length": 24}, "training": training}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A workplace with a Mixtral, and two tasks that each use few experts: one for a while, the other to the end."""
    made = furnish(tmp_path_factory.mktemp("expert-watch"), "mixtral")
    drawn = random.Random(3)
    for name, words in (("early.jsonl", ("w7", "w8")), ("late.jsonl", ("w11", "w12"))):
        made.write_records(name, [{"text": " ".join(drawn.choices(words, k=20))} for _ in range(16)])
    late = task(f"{made.root}/late.jsonl", 2, 24, target_parameters=["mlp.experts.down_proj"])
    tasks = {"early": task(f"{made.root}/early.jsonl", 16, 8), "late": late}
    made.write_tasks("tasks.yaml", tasks)
    (made.root / "watched").mkdir()
    made.write_tasks("watched/tasks.yaml", tasks)
    (made.root / "watched" / "STOP").touch()
    # The second rank computes so slowly that popular experts belong on the first.
    workers = [{"node": node, "capacity": 10, "seconds_per_row": s} for node, s in (("a", 0.0), ("b", 1e-3))]
    content = {"workers": workers, "bandwidth": {"within_node": 1e9, "between_nodes": 1e8}}
    (made.root / "topology.json").write_text(json.dumps(content))
    return made


def lines_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "expert_access.jsonl").read_text().splitlines()]


def run(
    place: Workplace, server: Server, name: str, *more: str | Path, faults: Mapping[int, Fault] | None = None
) -> tuple[Path, str]:
    """A run on two ranks that is saved under a name; its directory and what it said."""
    save = place.root / name
    words = place.arguments("--save", save, "--log-interval", "2", "--save-interval", "14", *RANKS, *more)
    if "--mux-watch" in more:
        where = words.index("--mux-tasks")
        del words[where : where + 2]
    runs = run_ranks(server, words, 2, faults)
    wanted = [1, -signal.SIGKILL] if faults else [0, 0]
    assert [own.status for own in runs] == wanted, "".join(own.errors for own in runs)
    return save, runs[0].output


def test_placed_at_the_start_and_moved_when_the_skew_changes(place: Workplace, server: Server) -> None:
    """Also killed after experts have moved, and continued with them where they were when it was saved.

    Tasks come to a directory that is watched: there are none before the first step.
    """
    kept, _ = run(place, server, "kept")
    asked: tuple[str | Path, ...] = ("--mux-expert-placement", "auto", "--mux-watch", place.root / "watched")
    asked += ("--mux-expert-topology", place.root / "topology.json")
    fault = Fault("megatron_mux.engine.train_step:TrainStep.backward", 18, "kill before")
    save, said = run(place, server, "moved", *asked, faults={1: fault})
    assert "experts are placed: transfers of a step are predicted to take" in said
    moves = [line for line in lines_of(save) if "moved" in line]
    assert moves[-1]["steps"] == {"late": 12}  # the early task is done at 8; then rows have to be enough
    assert all(f"{len(line['moved'])} expert(s) moved" in said for line in moves)
    file = json.loads((save / "expert_placement.json").read_text())
    where = file["placement"]
    assert file["workers_are"] == "expert ranks"
    assert all(worker in where[layer][expert] for layer, expert, _, worker in moves[-1]["moved"])
    _, said = run(place, server, "moved", *asked, "--load", save)
    assert "experts are where" in said and "placing experts" not in said
    lines = lines_of(save)
    # Whether a further move pays depends on how long the last ones took.
    assert [line for line in lines if "moved" in line][: len(moves)] == moves
    counted = [line for line in lines if "access" in line]
    assert max(counted[0]["drift"]) == 0 and max(counted[-1]["drift"]) > 0.3
    # Rows of all ranks, once each, wherever their experts are; the last layer computes labelled ones only.
    rows = np.sum([line["rows"] for line in counted], axis=0)
    assert rows.tolist() == np.sum([line["rows"] for line in lines_of(kept)], axis=0).tolist()
    assert rows.tolist() == [(8 * 16 + 24 * 2) * 21] * 3 + [(8 * 16 + 24 * 2) * 20]
    for name, step in (("early", 8), ("late", 24)):
        file = f"{name}/checkpoint-{step}/adapter_model.safetensors"
        assert_close(load_file(save / file), load_file(kept / file), 1e-4, name)


def test_bad_input_is_refused(place: Workplace, server: Server) -> None:
    """By name, before anything is written."""
    topology = json.loads((place.root / "topology.json").read_text())
    for name, workers in (
        ("three.json", topology["workers"][:1] * 3),
        ("small.json", [{"node": "a", "capacity": 9}] * 2),
    ):
        (place.root / name).write_text(json.dumps({**topology, "workers": workers}))
    auto, file = ("--mux-expert-placement", "auto"), "--mux-expert-topology"
    full = write_placement(place, "full.json", [[[0], [0], [0], [1], [1]]] * 4)
    moving = ("--mux-expert-placement", full, "--mux-replace-experts", "auto")
    for words, complaint in (
        ((*auto, file, place.root / "three.json"), "workers: has 3 entries, but there are 2 expert ranks"),
        ((*auto, file, place.root / "small.json"), "workers: have a capacity of 18 experts together"),
        ((*auto, file, place.root / "none.json"), "none.json cannot be read"),
        (
            (*moving, file, place.root / "topology.json"),
            "full.json: placement: worker 0 holds 12 experts, but its capacity is 10",
        ),
        ((*auto, "--mux-backbone-weights", "offloaded"), "only resident experts move"),
        (
            (file, place.root / "topology.json"),
            "needs --mux-expert-placement auto or --mux-replace-experts auto",
        ),
    ):
        save = place.root / "refused"
        one = server.run(place.arguments("--save", save, *RANKS, *words))
        assert one.status == 2 and complaint in one.errors and not save.exists(), (words, one.errors)
