"""Sessions are predicted as they are measured, whatever the backbone; on a GPU that is not there, too."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_mux import runtime
from megatron_mux.backbone.model import Backbone
from megatron_mux.errors import UserError
from megatron_mux.gpus import Gpu
from megatron_mux.memory.worker import WorkerError
from megatron_mux.split import session_prediction
from megatron_mux.split.body import Body
from megatron_mux.split.session_memory import Memory, profile
from megatron_mux.split.session_prediction import BodyPlace, SessionPredictor
from tests import tiny_models
from tests.unit.split.caller import proposal

LORA = {"peft_type": "LORA", "r": 4, "target_modules": "all-linear"}
ASKED: dict[str, Any] = {"adapter": LORA, "cut_back": 0, "train_rows": 96, "rows": 96, "longest": 50}


def loaded(directory: Path, name: str, layers: int, dtype: torch.dtype = torch.float32) -> Body:
    """A body without the first layer."""
    path = tiny_models.make(directory, name, num_hidden_layers=layers)
    parallel = runtime.initialize(device="cpu")
    backbone = Backbone.load(path, parallel, dtype, split=(1, layers - 1, 0), stage=1, ends=False)
    return Body(backbone, parallel)


@pytest.mark.parametrize(
    ("name", "layers"),
    [("gpt2", 6), ("gemma3_text", 4), ("mixtral", 4), ("qwen3_moe", 4), ("deepseek_v3", 4)],
)
def test_every_family_takes_what_is_predicted(name: str, layers: int, tmp_path: Path) -> None:
    body, asked = loaded(tmp_path, name, layers), proposal(**ASKED)
    own = asked.body(body.backbone.shape)
    body.add("a", asked.adapter_spec(), asked.training, own, 9)
    measured = profile(body, "a", asked, own, smaller=False)
    assert SessionPredictor(BodyPlace.of(body, own))(asked) == measured


def test_a_gpu_keeps_less_than_a_cpu(tmp_path: Path) -> None:
    """It computes attention without the weights of pairs; what lasts is the same but for what its kernels round to."""
    place = BodyPlace.of(loaded(tmp_path, "llama", 6, torch.bfloat16), range(1, 6))
    asked = proposal(**ASKED)
    on_cpu = SessionPredictor(place)(asked)
    on_gpu = SessionPredictor(replace(place, device="cuda", gpu=Gpu()))(asked)
    assert on_gpu.lasting == on_cpu.lasting and on_gpu.hidden == on_cpu.hidden
    assert 0 < on_gpu.forward < on_gpu.graph < on_gpu.backward < on_cpu.backward


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls of the process for dry runs, which always answers the same."""
    calls: list[Any] = []

    class Process:
        def submit(self, *call: Any) -> Future[Memory]:
            calls.append(call)
            future = Future[Memory]()
            if "fails" in call[-1]:
                future.set_exception(WorkerError("IndexError: no such thing"))
            else:
                future.set_result(Memory(1, 2, 3, 4, 5, 6))
            return future

    monkeypatch.setattr(session_prediction, "kept_worker", Process)
    return calls


def test_what_is_known_is_not_asked_again(answered: list[Any], tmp_path: Path) -> None:
    predict = SessionPredictor(BodyPlace.of(loaded(tmp_path, "llama", 4), range(1, 4)))
    first = predict(proposal(**ASKED))
    assert predict(proposal(**ASKED, task="other", run="ef" * 8, step=3)) == first and len(answered) == 1
    predict(proposal(**{**ASKED, "train_rows": 95}))
    assert len(answered) == 2


def test_what_cannot_be_computed_is_refused(answered: list[Any], tmp_path: Path) -> None:
    predict = SessionPredictor(BodyPlace.of(loaded(tmp_path, "llama", 4), range(1, 4)))
    with pytest.raises(UserError, match="leave no layer of 4"):
        predict(proposal(**{**ASKED, "cut_back": 3}))
    with pytest.raises(UserError, match="the task cannot be computed: IndexError: no such thing"):
        predict(proposal(**{**ASKED, "adapter": {**LORA, "target_modules": ["fails"]}}))
    assert len(answered) == 1


def test_an_adapter_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    predict = SessionPredictor(BodyPlace.of(loaded(tmp_path, "llama", 4), range(1, 4)))
    with pytest.raises(UserError, match="nowhere"):
        predict(proposal(**{**ASKED, "adapter": {**LORA, "target_modules": ["nowhere"]}}))
