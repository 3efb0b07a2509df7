"""What tests of `tools/estimate_memory.py` share: models, tasks, and one process that traces for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_mux.memory.trace import tracer as tracer_module
from megatron_mux.memory.trace.tracer import Tracer
from tests.end_to_end.test_plans import tool
from tests.unit.memory.configs import CONFIGS, write

Call = Callable[..., tuple[int, str, str]]

OPT = CONFIGS["facebook/opt-1.3b"]
LLAMA_70B = {
    **CONFIGS["llama-7b"],
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is kept between calls is not the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRON_MUX_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


class _Shared(Tracer):
    """Lives on when a tool is done with it: torch is imported once for all tests."""

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module", autouse=True)
def tracer() -> Iterator[None]:
    """One process with torch for all calls within this one."""
    shared = _Shared()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracer_module, "Tracer", lambda: shared)
        yield
    Tracer.__exit__(shared, None, None, None)


@pytest.fixture
def estimate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    """Runs the tool on a config with flags, the last of which win: status, output, errors."""
    usual = ["--gpus", "4", "--gpu-memory", "16,384 MB", "--sequence-length", "512"]

    def call(config: object, *more: str) -> tuple[int, str, str]:
        write(tmp_path, config)
        capsys.readouterr()
        status = tool("estimate_memory").main(["--model", str(tmp_path), *usual, *more])
        said = capsys.readouterr()
        return status, said.out, said.err

    return call


OURS = {
    "model_type": "llama", "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
TASKS = """
tasks:
  - name: a
    adapter: {peft_type: LORA, r: 8, target_modules: [q_proj, v_proj]}
    data: {path: missing.jsonl, max_length: 64}
    training: {max_steps: 1}
  - {name: b, adapter: {peft_type: PREFIX_TUNING, num_virtual_tokens: 4}, data: {path: x, max_length: 64},
     training: {max_steps: 1, optim: sgd}}
"""


SHALLOW = {**OURS, "num_hidden_layers": 2}
TWO = ("--gpus", "2")
"""Few layers, and few divisions of them: tables of each take seconds."""
ONE_TASK = """
tasks:
  - name: a
    adapter: {peft_type: LORA, r: 8, target_modules: [q_proj, v_proj]}
    data: {path: missing.jsonl, max_length: 64}
    training: {max_steps: 1, per_device_train_batch_size: 4}
"""


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    """A task file; its data need not be there."""
    file = tmp_path / "tasks.yaml"
    file.write_text(TASKS)
    return str(file)
