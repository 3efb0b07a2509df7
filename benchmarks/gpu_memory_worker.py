"""Measures the GPU memory of one training run, in a process of its own.

Reads one JSON object from standard input, and prints one. The input has either `case` (a `Case` as a dictionary), which
`transformers.Trainer` trains without any of megatron-mux, or `run_spec` (a `RunSpec` as a dictionary), which our engine
trains. `limit` is the bytes that the process may use on the GPU, including its context (null: no limit). `history` is
whether to record the allocator's history, which is then replayed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

import torch
from torch import nn

from megatron_mux import runtime

STEPS = 3
"""Steps of a run. The optimizer's states exist from the second step on."""


def main() -> int:
    """Train, measure, and print the result."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to standard error
    _import()
    asked = json.loads(sys.stdin.readline())
    print(json.dumps(measure(asked)), file=output, flush=True)
    runtime.shutdown()
    return 0


def _import() -> None:
    """Import what either program needs, before anything is asked for."""
    import accelerate  # noqa: F401
    import megatron.core  # noqa: F401
    import peft  # noqa: F401
    import transformers  # noqa: F401

    import megatron_mux.engine  # noqa: F401


def measure(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Train one case or run spec; returns its GPU memory in bytes."""
    free, total = torch.cuda.mem_get_info()
    outside = total - free  # so far only this process's context; no other process uses the GPU
    if asked["limit"] is not None:
        torch.cuda.set_per_process_memory_fraction((asked["limit"] - outside) / total)
    if asked["history"]:
        torch.cuda.memory._record_memory_history(context=None, max_entries=10_000_000)
    found: dict[str, Any] = {"context_before": outside, "fits": True}
    try:
        if "run_spec" in asked:
            train_together(asked["run_spec"], torch.device("cuda"))
        else:
            train(asked["case"], torch.device("cuda"))
    except torch.OutOfMemoryError as error:
        found |= {"fits": False, "why": str(error).split(". ")[0]}
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    found |= {
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
        # Larger than before training: kernels are loaded into the context when first used.
        "outside": total - free - torch.cuda.memory_reserved(),
    }
    if asked["history"]:
        try:
            found |= replay_history(torch.cuda.memory._snapshot()["device_traces"][0])
        except Exception as error:  # keep what was measured
            found["replay_failed"] = f"{type(error).__name__}: {error}"
    return found


def replay_history(trace: list[dict[str, Any]]) -> dict[str, Any]:
    """Replay a history and compare the reserved memory after each event with the device's."""
    from benchmarks.allocator_history import from_snapshot
    from megatron_mux.memory.caching.settings import Settings

    recording = from_snapshot(trace)
    settings = Settings.parse(os.environ.get("PYTORCH_ALLOC_CONF", ""))
    pairs = enumerate(zip(recording.replayed(settings), recording.reserved, strict=True))
    differ = next((index for index, (mine, theirs) in pairs if mine != theirs), None)
    return {"events": len(recording.events), "first_event_replayed_otherwise": differ}


def train(case: Mapping[str, Any], device: torch.device) -> None:
    """Train a case for `STEPS` steps, as a user of `transformers` and `peft` does."""
    from transformers import Trainer

    model = with_random_weights(build(case), device)
    batch, length, vocabulary = case["batch"], case["length"], model.config.get_text_config().vocab_size
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(
            model=model,
            args=arguments(case, directory, device),
            train_dataset=records(STEPS * batch, length, vocabulary, case["padded"]),  # type: ignore[arg-type]
        )
        trainer.train()


def build(case: Mapping[str, Any]) -> nn.Module:
    """Make the model, with parameters on the meta device and buffers in host memory."""
    from accelerate import init_empty_weights
    from peft import PeftType, get_peft_model
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    fields = dict(case["config"])
    config = CONFIG_MAPPING[fields.pop("model_type")](**fields)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, case["weights"]), attn_implementation=case["attention"]
        )
        if case["adapter"] is None:
            return model  # type: ignore[no-any-return]
        fields = dict(case["adapter"])
        kind = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(fields.pop("peft_type"))]
        return get_peft_model(model, kind(task_type="CAUSAL_LM", **fields))


def with_random_weights(model: nn.Module, device: torch.device) -> nn.Module:
    """Move the model to a device in the order of `Module.to`, with random weights made on the device."""
    made: dict[int, torch.Tensor] = {}

    def materialize(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor.to(device)
        if id(tensor) not in made:
            made[id(tensor)] = torch.empty_like(tensor, device=device).normal_(0.0, 0.02)
        return made[id(tensor)]

    model._apply(materialize)
    model.tie_weights()  # type: ignore[operator]
    return model


def arguments(case: Mapping[str, Any], directory: str, device: torch.device) -> Any:
    """Make the arguments of `Trainer`."""
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=directory,
        per_device_train_batch_size=case["batch"],
        max_steps=STEPS,
        optim=case["optimizer"],
        max_grad_norm=case["clip"] or 0.0,
        bf16=case["autocast"] == "bfloat16",
        fp16=case["autocast"] == "float16",
        gradient_checkpointing=case["recompute"],
        gradient_checkpointing_kwargs={"use_reentrant": False} if case["recompute"] else None,
        learning_rate=1e-4,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
        use_cpu=device.type == "cpu",
    )


def records(count: int, length: int, vocabulary: int, padded: bool) -> list[dict[str, torch.Tensor]]:
    """Make records of random tokens that are all labels; with `padded` the last token is padding."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        tokens = torch.randint(0, vocabulary, (length,), generator=generator)
        mask = torch.ones(length, dtype=torch.long)
        if padded:
            mask[-1] = 0
        found.append({"input_ids": tokens, "attention_mask": mask, "labels": tokens.clone()})
    return found


def train_together(run_spec: Mapping[str, Any], device: torch.device) -> None:
    """Train a run spec with our engine on one rank, with random weights."""
    from typing import cast

    from megatron_mux.backbone.model import load_stages
    from megatron_mux.data.dataset import TaskDataset
    from megatron_mux.dry_run.run_spec import RunSpec, TaskRecords
    from megatron_mux.dry_run.stand_ins import LengthsOnlyDataset
    from megatron_mux.engine import Engine, Planning, Task
    from megatron_mux.fusion.plan import Plan
    from megatron_mux.tasks import TaskSpec

    tasks = [TaskRecords(**task) for task in run_spec["tasks"]]
    given = RunSpec(**{**run_spec, "tasks": tasks, "plan": Plan.from_json(run_spec["plan"])})
    parallel = runtime.initialize(1, 1, device=device)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(given.config))
        dtype, split = getattr(torch, given.dtype), given.plan.split or None
        stages = load_stages(
            Path(directory), parallel, dtype, given.recompute, split, given.residence, config_only=True
        )
    for stage in stages:
        tensors = [parameter.data for parameter in stage.model.parameters()]
        for tensor in tensors:
            if tensor.untyped_storage().nbytes():
                tensor.normal_(0.0, 0.02)
        for group in stage.offload.groups.values():
            assert group.fetched is not None
            group.fetched.share.random_(0, 60)  # bytes that are numbers below 0.01 in any precision
    planning = Planning("auto", given.plan.stages, given=given.plan)
    engine = Engine(stages, parallel, planning)
    engine.register_tasks(
        [
            Task(
                TaskSpec.model_validate(one.task),
                cast(TaskDataset, LengthsOnlyDataset(one.lengths, one.labels)),
            )
            for one in given.tasks
        ]
    )
    for _ in range(STEPS):
        for name, result in engine.step().items():
            if result.status == "failed":
                raise RuntimeError(f"{name}: {result.reason}")


if __name__ == "__main__":
    sys.exit(main())
