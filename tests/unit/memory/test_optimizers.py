"""What optimizers keep: against those that `Trainer` makes, after a step that is really taken; and by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from megatron_mux.choice.engine_step import step_memory
from megatron_mux.memory.forms.method import ParallelConfig, methods
from megatron_mux.memory.forms.recipe import Recipe
from megatron_mux.memory.forms.skeleton import read_architecture
from megatron_mux.memory.forms.stages import stages
from megatron_mux.memory.optimizers import DEFAULT, OPTIMIZERS, Optimizer
from megatron_mux.memory.tensors import Skeleton
from megatron_mux.memory.trace.model import configuration
from megatron_mux.memory.trace.training import _MADE
from tests.unit.memory.architectures import llama
from tests.unit.memory.configs import write
from tests.unit.memory.profiles import by_hand
from tests.unit.memory.traced import CONFIGS, LLAMA

TRACED = [name for name, one in OPTIMIZERS.items() if one.traced]


def told(name: str, directory: Path) -> TrainingArguments:
    return TrainingArguments(output_dir=str(directory), optim=name, use_cpu=True, report_to="none")


def states(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all that is kept, single numbers left out."""
    kept = (value for state in optimizer.state.values() for value in state.values())
    return sum(one.nbytes for one in kept if isinstance(one, torch.Tensor) and one.dim())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", TRACED)
def test_states_are_those_of_real_optimizers(
    name: str, config: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_config(configuration(CONFIGS[config], 2), dtype=dtype)
    kind, options = Trainer.get_optimizer_cls_and_kwargs(told(name, tmp_path), model)
    optimizer = kind(model.parameters(), **options)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    (stage,) = stages(read_architecture(Skeleton(write(tmp_path, CONFIGS[config]))), ParallelConfig())
    assert stage.values == sum(p.numel() for p in model.parameters())
    form = OPTIMIZERS[name].states(stage.values, stage.shapes, dtype.itemsize)
    assert form == states(optimizer)


@pytest.mark.parametrize("name", TRACED)
def test_what_is_traced_is_what_trainer_makes(name: str, tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    kind, options = Trainer.get_optimizer_cls_and_kwargs(told(name, tmp_path))
    ours = _MADE[name]([{"params": [parameter]}])
    assert type(ours) is kind
    for key, value in options.items():
        if key not in ("lr", "betas", "eps"):
            assert ours.defaults[key] == value


def test_names_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers.training_args import OptimizerNames

    assert set(OPTIMIZERS) <= {one.value for one in OptimizerNames}
    assert TrainingArguments(output_dir=str(tmp_path)).optim == DEFAULT


def test_eight_bits_by_hand(tmp_path: Path) -> None:
    architecture = read_architecture(Skeleton(write(tmp_path, LLAMA)))
    # Of each of two layers, in fp32: key and value projections of 64 x 32 values, and two norms; of the model, the
    # embedding of 160 x 64 and a norm. In bytes with a scale for each 256: queries, output, three of the MLP; the head.
    exact = 2 * (2 * 64 * 32 + 2 * 64) + 160 * 64 + 64
    coarse = 2 * (2 * 64 * 64 + 3 * 64 * 96) + 160 * 64
    assert exact + coarse == architecture.total
    parts = step_memory(
        architecture,
        Recipe(16, optimizer="adamw_8bit", master=False),
        ParallelConfig(),
        by_hand(architecture),
        device="cpu",
    )
    step = next(i for i in parts.phases(32) if i.name == "the optimizer's step").breakdown
    assert step["optimizer"] == 8 * exact + 2 * coarse + 2 * 4 * coarse // 256 and not step["workspace"]


def test_what_megatron_does_not_have_divides_no_layers() -> None:
    for name, one in OPTIMIZERS.items():
        found = methods(4, llama(8), Recipe(128, optimizer=name))
        assert ({m.name for m in found} == {"4DP"}) == (one.megatron is None)
        assert any(m.offload for m in found) == name.startswith("adamw_torch")
        assert any(m.recompute == "selective" for m in methods(4, llama(8), Recipe(128, "fp32", name))) == (
            one.megatron is not None
        )


def zeros(name: str, gpus: int = 4) -> set[int]:
    return {m.zero for m in methods(gpus, llama(8), Recipe(128, optimizer=name))}


def test_megatron_divides_the_states_of_adam_alone() -> None:
    """Its distributed optimizer, which Megatron-FSDP has as well, refuses any other."""
    assert zeros("adamw_torch_fused") == zeros("adamw_torch") == {0, 1, 2, 3} and zeros("sgd") == {0}
    assert zeros("adamw_torch", 1) == {0}


@pytest.fixture
def one_rank() -> Iterator[None]:
    if dist.is_initialized():  # by another file's tests in this process, of one rank as well
        yield
        return
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["adafactor", "adagrad", "rmsprop"])
@pytest.mark.usefixtures("one_rank")
def test_others_are_divided_where_fsdp_can_step_them(name: str, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    arguments = TrainingArguments(str(tmp_path), optim=name, use_cpu=True, report_to="none")
    kind, more = Trainer.get_optimizer_cls_and_kwargs(arguments)
    optimizer = kind(model.parameters(), **more)
    model(torch.ones(2, 8)).sum().backward()
    try:
        optimizer.step()
        steps = True
    except RuntimeError as error:
        assert "mixed torch.Tensor and DTensor" in str(error)
        steps = False
    assert zeros(name) == ({0, 2, 3} if steps else {0})


@pytest.mark.parametrize("name", [name for name, one in OPTIMIZERS.items() if type(one) is not Optimizer])
def test_ranks_that_divide_states_have_a_share_each(name: str, tmp_path: Path) -> None:
    architecture = read_architecture(Skeleton(write(tmp_path, LLAMA)))

    def kept(**degrees: Any) -> int:
        parts = step_memory(
            architecture,
            Recipe(16, optimizer=name),
            ParallelConfig(**degrees),
            by_hand(architecture),
            device="cpu",
        )
        return parts.worst(32).breakdown["optimizer"]

    assert kept() == kept(data=4)
    assert kept(data=4, zero=1) == pytest.approx(kept() / 4, rel=0.01)
