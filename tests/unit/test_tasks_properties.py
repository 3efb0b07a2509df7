"""`tasks.yaml`: whatever is in it, it is understood or answered, and what is understood survives JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megatron_mux.errors import UserError
from megatron_mux.tasks import TaskSpec, load_task_file
from tests.unit.task_files import task

names = st.sampled_from(["q_proj", "v_proj", "down_proj", "fc1"])
positive = st.floats(1e-8, 10)
targets = st.none() | st.just("all-linear") | st.lists(names, min_size=1, max_size=3, unique=True)
lora = st.fixed_dictionaries(
    {"peft_type": st.just("LORA")},
    optional={
        "r": st.integers(1, 512),
        "lora_alpha": positive | st.integers(1, 64),
        "lora_dropout": st.floats(0, 0.99),
        "use_rslora": st.booleans(),
        "target_modules": targets,
    },
)
others = st.one_of(
    st.builds(lambda n: {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": n}, st.integers(1, 100)),
    st.builds(lambda t: {"peft_type": "IA3", "target_modules": t}, targets),
    st.builds(
        lambda n, t: {"peft_type": "BOTTLENECK", "bottleneck_size": n, "target_modules": t},
        st.integers(1, 9),
        targets,
    ),
    st.builds(
        lambda s, t: {"peft_type": "DIFF_PRUNING", "sparsity": s, "target_modules": t},
        st.floats(0, 0.99),
        targets,
    ),
)
training = st.fixed_dictionaries(
    {},
    optional={
        "per_device_train_batch_size": st.integers(1, 64),
        "gradient_accumulation_steps": st.integers(1, 8),
        "learning_rate": positive | st.just("1e-3"),
        "lr_scheduler_type": st.sampled_from(["linear", "cosine", "constant_with_warmup"]),
        "warmup_steps": st.integers(0, 10) | st.floats(0, 0.99),
        "max_grad_norm": st.floats(0, 5),
        "router_aux_loss_coef": st.floats(0, 1),
        "optim": st.sampled_from(["adamw_torch", "sgd"]),
        "num_train_epochs": st.floats(0.01, 5),
        "seed": st.integers(0, 2**32 - 1),
    },
)
valid_tasks = st.builds(
    lambda a, t, e: task(adapter=a, training=t, eval=e),
    lora | others,
    training,
    st.none() | st.just({"path": "x", "eval_steps": 3}),
)


@given(valid_tasks)
def test_a_task_survives_json(value: dict[str, Any]) -> None:
    spec = TaskSpec.model_validate(value)
    again = TaskSpec.model_validate(json.loads(json.dumps(spec.plain())))
    assert again == spec
    assert not again.differences(spec)
    assert TaskSpec.model_validate(spec.model_dump()) == spec


yaml_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | names, inner, max_size=3)
    ),
    max_leaves=8,
)
paths_of_fields = st.sampled_from(
    [("name",), ("adapter",), ("adapter", "peft_type"), ("adapter", "target_modules"), ("adapter", "r"),
     ("adapter", "adapter_name_or_path"), ("data",), ("data", "path"), ("training",), ("training", "max_steps"),
     ("training", "learning_rate"), ("training", "warmup_steps"), ("eval",), ("eval", "path"), ("other",)]
)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@example(("adapter",), {"peft_type": []})
@example(("adapter", "adapter_name_or_path"), "\0")
@example(("data", "path"), "~nobody-of-that-name/x")
@given(paths_of_fields, yaml_values)
def test_any_value_anywhere_is_answered_not_crashed_on(
    tmp_path: Path, where: tuple[str, ...], value: Any
) -> None:
    content = task()
    target = content
    for key in where[:-1]:
        target = target.setdefault(key, {})
    target[where[-1]] = value
    path = tmp_path / "tasks.yaml"
    path.write_text(yaml.safe_dump({"tasks": [content]}))
    try:
        load_task_file(path)
    except UserError as error:
        assert all(p.startswith(f"{path}: ") and "\n" not in p for p in error.problems)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.text(alphabet=st.sampled_from(list("tasks:- \n[]{}&*!|>'\"#%@,1e\t?~<")), max_size=60)
    | st.text(max_size=30)
)
def test_any_text_is_answered_not_crashed_on(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tasks.yaml"
    path.write_text(text, encoding="utf-8", errors="replace")
    with pytest.raises(UserError):
        load_task_file(path)
