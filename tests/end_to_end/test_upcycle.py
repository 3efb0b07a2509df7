"""examples/moe/upcycle.py: what it makes loads in transformers and in our engine, and routes alike."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_mux.backbone.model import Backbone
from megatron_mux.batch.pack import PackedSequence, pack
from megatron_mux.batch.packed_batch import activate
from megatron_mux.runtime import initialize
from tests import tiny_models, warm
from tests.end_to_end.workplace import write_tokenizer
from tests.logits import all_logits

SCRIPT = Path(__file__).resolve().parents[2] / "examples/moe/upcycle.py"


def write_data(folder: Path) -> None:
    """The quickstart's files, of words that the tiny tokenizer knows."""
    folder.mkdir()
    many = " ".join(f"w{i}" for i in range(40))
    turns = [{"role": "user", "content": many}, {"role": "assistant", "content": many}]
    records: dict[str, list[dict[str, Any]]] = {
        "movie": [{"prompt": many, "completion": label} for label in (" positive", " negative") * 17],
        "dialogue": [{"messages": turns}] * 17,
        "glosses": [{"instruction": "Define the noun.", "input": "w1", "output": many}] * 17,
        "austen": [{"text": f"Emma {many}"}] * 17,
    }
    for name, rows in records.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("upcycled")
    tiny_models.make(folder, "llama")
    write_tokenizer(folder / "llama")
    write_data(folder / "data")
    flags = ["--backbone", folder / "llama", "--data", folder / "data", "--output", folder / "moe", "--tiny"]
    with warm.Server() as server:
        subprocess.run([server.python, str(SCRIPT), *map(str, flags)], check=True)
    yield folder


def test_it_loads_in_transformers_and_in_the_engine(made: Path) -> None:
    from transformers import MixtralForCausalLM

    reference = MixtralForCausalLM.from_pretrained(made / "moe", dtype=torch.float32)
    reference.set_experts_implementation("eager")
    vocab = reference.config.vocab_size
    tokens = torch.randint(3, vocab, (24,), generator=torch.Generator().manual_seed(0))
    backbone = Backbone.load(made / "moe", initialize(device="cpu"))
    sequence = PackedSequence("task", 0, tokens, torch.ones(24, dtype=torch.bool), 1.0)
    batch = pack([sequence], ("task",), {"task": 0}).to()
    with activate(batch), torch.no_grad():
        found = all_logits(backbone, batch, backbone.forward(batch))
    with torch.no_grad():
        wanted = reference(tokens.unsqueeze(0)).logits[0]
    assert (found - wanted).abs().max() <= 5e-4


def test_it_reports_what_routers_have_learned_and_leaves_nothing_else(made: Path) -> None:
    told = json.loads((made / "moe/routing.json").read_text())
    assert len(told["layers_kept"]) == 2 and len(told["kinds"]) == 4
    for routing in told["routing"].values():
        assert all(0 < value <= 1 for value in (*routing["score_entropy"], *routing["use_entropy"]))
    assert not (made / "moe.unfinished").exists()


def test_an_existing_output_is_refused(made: Path) -> None:
    flags = ["--output", str(made / "moe"), "--tiny"]
    refused = subprocess.run(
        [sys.executable, str(SCRIPT), *flags], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2 and "exists already" in refused.stderr
