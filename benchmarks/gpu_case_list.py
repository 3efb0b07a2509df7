"""The cases of `gpu_cases.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LORA: dict[str, Any] = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
OPTIMIZERS = ("adamw_torch_fused", "adamw_8bit", "lion_32bit", "adafactor", "sgd")
Task = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A run of `pretrain_mux.py`.

    Attributes:
        name: Its name in the results.
        model: `llama` or `mixtral`.
        tasks: Entries of tasks.yaml.
        flags: Of the command line.
    """

    name: str
    model: str
    tasks: Sequence[Task]
    flags: tuple[str, ...]

    @property
    def precision(self) -> str:
        """`fp32`, `tf32` or `half`."""
        if "--mux-tf32" in self.flags:
            return "tf32"
        return "half" if "--bf16" in self.flags or "adamw_8bit" in str(self.tasks) else "fp32"


def task(name: str, adapter: dict[str, Any], data: Path, training: Task | None = None, **more: Any) -> Task:
    """An entry of tasks.yaml: eight steps of four short records."""
    usual = {
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "linear",
        "max_steps": 8,
    }
    about = {"path": str(data), "max_length": 96}
    return {
        "name": name,
        "adapter": adapter,
        "data": about,
        "training": {**usual, **(training or {})},
        **more,
    }


def _kinds(data: Path) -> list[Task]:
    movie, glosses = data / "movie.jsonl", data / "glosses.jsonl"
    qv = ["q_proj", "v_proj"]
    ia3 = {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
    vera = {"peft_type": "VERA", "r": 32, "target_modules": qv, "projection_prng_key": 0}
    bottleneck = {"bottleneck_size": 32, "target_modules": ["o_proj", "down_proj"]}
    return [
        task("lora", {**LORA, "lora_dropout": 0.1}, movie),
        task("all", {**LORA, "r": 16, "target_modules": "all-linear"}, glosses),
        task("dora", {**LORA, "use_dora": True}, glosses),
        task("vera", vera, movie),
        task("ia3", {"peft_type": "IA3", **ia3}, data / "austen.jsonl"),
        task("prefix", {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 8}, movie),
        task("bottleneck", {"peft_type": "BOTTLENECK", **bottleneck}, data / "dialogue.jsonl"),
        task("diff", {"peft_type": "DIFF_PRUNING", "sparsity": 0.9, "target_modules": ["q_proj"]}, movie),
    ]


def cases(scratch: Path) -> list[Case]:
    """All cases, of models and data in `scratch`; the longest first."""
    data = scratch / "in"
    movie, glosses, pairs = (data / f"{name}.jsonl" for name in ("movie", "glosses", "pairs"))
    kinds = _kinds(data)
    two = [task("a", LORA, movie), task("b", {**LORA, "target_modules": "all-linear"}, glosses)]
    preference = [
        *(task(loss, LORA, pairs, {"loss": loss, "learning_rate": 1e-4}) for loss in ("dpo", "orpo", "kto")),
        *two,
    ]
    experts = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    mixture = [
        task("attention", LORA, movie),
        task("experts", {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"], **experts}, glosses),
    ]
    evaluated = [
        task(name, LORA, file, eval={"path": str(file.with_suffix(".eval.jsonl")), "eval_steps": 4})
        for name, file in (("a", movie), ("b", glosses))
    ]
    rows = [
        task("rows", {**LORA, "modules_to_save": ["lm_head"]}, movie),
        task("tokens", {**LORA, "trainable_token_indices": [5, 6, 7]}, glosses),
        *two,
    ]
    fp32, bf16 = ("--mux-fp32",), ("--bf16",)
    return [
        Case("kinds-fp32", "llama", kinds, fp32),
        Case("kinds-bf16", "llama", kinds, bf16),
        Case("preference-fp32", "llama", preference, fp32),
        Case("preference-bf16", "llama", preference, bf16),
        Case("rows", "llama", rows, fp32),
        Case("optimizers", "llama", [task(name, LORA, movie, {"optim": name}) for name in OPTIMIZERS], fp32),
        Case("experts-fp32", "mixtral", mixture, fp32),
        Case("experts-bf16", "mixtral", mixture, bf16),
        *(Case(name, "llama", two, ("--mux-backbone-dtype", name, *bf16)) for name in ("nf4", "int8", "fp8")),
        Case("evaluation", "llama", evaluated, fp32),
        Case("offloaded", "llama", two, ("--mux-backbone-weights", "offloaded", *bf16)),
        Case("recomputation", "llama", two, ("--recompute-granularity", "full", *bf16)),
        Case("chunks", "llama", two, ("--mux-chunk-size", "64", *bf16)),
        Case("temporal", "llama", two, ("--mux-policy", "temporal", *fp32)),
        Case("tf32", "llama", two, (*fp32, "--mux-tf32")),
    ]
