"""Sessions take what is predicted, whatever the backbone; on a GPU that is not there, too."""

from __future__ import annotations

import asyncio
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
from megatron_mux.memory.worker import LostProcess, WorkerError
from megatron_mux.split.protocol.agreement import Proposal
from megatron_mux.split.protocol.wire import RefusedError
from megatron_mux.split.server import session_prediction
from megatron_mux.split.server.admission import examine
from megatron_mux.split.server.body import Body
from megatron_mux.split.server.session_memory import Memory, profile
from megatron_mux.split.server.session_prediction import BodyPlace, SessionPredictor
from tests import tiny_models
from tests.unit.fusion.backbone import info
from tests.unit.split.caller import proposal
from tests.unit.split.counted import meter

LORA = {"peft_type": "LORA", "r": 4, "target_modules": "all-linear"}
ASKED: dict[str, Any] = {"adapter": LORA, "cut_back": 0, "train_rows": 96, "rows": 96, "longest": 50}


def predicted(place: BodyPlace, asked: Proposal) -> Memory:
    return asyncio.run(SessionPredictor(place)(asked))


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
    counted = profile(body, "a", asked, own, meter(torch.device("cpu")))
    assert predicted(BodyPlace.of(body, own), asked) == counted


def test_a_gpu_keeps_less_than_a_cpu(tmp_path: Path) -> None:
    """It computes attention without the weights of pairs; what lasts is the same."""
    place = BodyPlace.of(loaded(tmp_path, "llama", 6, torch.bfloat16), range(1, 6))
    asked = proposal(**ASKED)
    on_cpu = predicted(place, asked)
    on_gpu = predicted(replace(place, device="cuda", gpu=Gpu()), asked)
    assert on_gpu.lasting == on_cpu.lasting and on_gpu.hidden == on_cpu.hidden
    assert 0 < on_gpu.forward < on_gpu.graph < on_gpu.backward < on_cpu.backward


def test_buffers_of_an_optimizer_do_not_grow_with_layers(tmp_path: Path) -> None:
    body = loaded(tmp_path, "llama", 6)
    lion = {"max_steps": 9, "optim": "lion_32bit"}
    asked = proposal(**{**ASKED, "adapter": {**LORA, "r": 2000}, "training": lion})
    own = asked.body(body.backbone.shape)
    body.add("a", asked.adapter_spec(), asked.training, own, 9)
    assert predicted(BodyPlace.of(body, own), asked).lasting == body.bytes_of("a")


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> list[Future[Memory]]:
    """Answers of the process that predicts, to be given in tests."""
    asked: list[Future[Memory]] = []

    class Process:
        def submit(self, *call: Any) -> Future[Memory]:
            asked.append(Future())
            return asked[-1]

    monkeypatch.setattr(session_prediction, "prediction_worker", Process)
    return asked


PLACE = BodyPlace(info(4), torch.float32, "cpu", Gpu(), 1, (range(1, 4),))
MEMORY = Memory(1, 2, 3, 4, 5, 6)


def test_what_is_known_is_not_asked_again(answered: list[Future[Memory]]) -> None:
    async def ask() -> None:
        predict = SessionPredictor(PLACE)
        first = asyncio.ensure_future(predict(proposal(**ASKED)))
        await asyncio.sleep(0)
        answered[0].set_result(MEMORY)
        assert await first == MEMORY
        assert await predict(proposal(**ASKED, task="other", run="ef" * 8, step=3)) == MEMORY
        assert len(answered) == 1
        other = asyncio.ensure_future(predict(proposal(**{**ASKED, "train_rows": 95})))
        await asyncio.sleep(0)
        assert len(answered) == 2
        other.cancel()
        with pytest.raises(asyncio.CancelledError):
            await other
        assert answered[1].cancelled(), "nobody waits for it"

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("error", "code", "retry", "why"),
    [
        (WorkerError("IndexError: none"), "proposal", False, "the task cannot be computed: IndexError: none"),
        (UserError("targets nothing"), "proposal", False, "targets nothing"),
        (LostProcess("ended by SIGKILL"), "full", True, "lost the process"),
    ],
)
def test_what_cannot_be_predicted_is_refused(
    answered: list[Future[Memory]], error: Exception, code: str, retry: bool, why: str
) -> None:
    async def ask() -> None:
        predict = SessionPredictor(PLACE)
        asked = asyncio.ensure_future(
            examine(proposal(**ASKED), info(4).shape, range(1, 4), 1 << 20, predict)
        )
        await asyncio.sleep(0)
        answered[0].set_exception(error)
        await asked

    with pytest.raises(RefusedError, match=why) as refused:
        asyncio.run(ask())
    assert (refused.value.code, refused.value.retry) == (code, retry)


@pytest.mark.parametrize(
    ("changes", "layers", "code", "why"),
    [
        ({"cut_back": 3}, range(1, 4), "proposal", "leave no layer of 4"),
        ({}, range(2, 4), "proposal", "holds layers 2 to 3: it needs at least --cut-front 2"),
        ({"cut_back": 0}, range(1, 3), "proposal", "--cut-back 1"),
        ({"rows": 1 << 20}, range(1, 4), "too_large", "a request of 1048576 tokens"),
    ],
)
def test_what_does_not_fit_the_server_is_not_predicted(
    answered: list[Future[Memory]], changes: dict[str, Any], layers: range, code: str, why: str
) -> None:
    asked = proposal(**{**ASKED, **changes})
    with pytest.raises(RefusedError, match=why) as refused:
        examined = examine(asked, info(4).shape, layers, 1 << 20, SessionPredictor(PLACE))
        asyncio.run(asyncio.wait_for(examined, 10))
    assert refused.value.code == code and not answered


def test_an_adapter_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    place = BodyPlace.of(loaded(tmp_path, "llama", 4), range(1, 4))
    with pytest.raises(UserError, match="nowhere"):
        predicted(place, proposal(**{**ASKED, "adapter": {**LORA, "target_modules": ["nowhere"]}}))
