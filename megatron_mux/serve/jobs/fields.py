"""Which fields of `tasks.yaml` a client may send, and the task that a request becomes.

A field that has no row in `SECTIONS` is refused; a test compares the rows with the schema.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron_mux.section import number, shown

if TYPE_CHECKING:
    from megatron_mux.serve.jobs.requests import JobRequest

DEFAULT_ADAPTER: Mapping[str, Any] = {
    "peft_type": "LORA",
    "r": 16,
    "lora_alpha": 32,
    "target_modules": "all-linear",
}
"""The adapter of a request without an `adapter` section.

LoRA on attention alone, peft's default, learns less than on all linear modules at equal memory (QLoRA, section 4); rank
16 with twice its alpha is a usual size for thousands of records. A section that is given replaces all of it: what it
leaves out has peft's defaults, which belong together."""

DEFAULT_EPOCHS = 3
DEFAULT_BATCH_SIZE = 8
DEFAULT_BETA = 0.1
"""What "auto" stands for; as in `tasks.yaml`."""

RATE, PREFERENCE_RATE = 1e-4, 5e-6
"""Learning rates that `learning_rate_multiplier` multiplies, "auto" being 1: of supervised tasks and of preferences.

With LoRA both are about ten times those of full fine-tuning; a preference drifts from its reference at higher ones."""

DEFAULT_EVAL_STEPS = 100
"""Steps between evaluations, which there are at the beginning and at the end besides. `transformers` has 500, which few
jobs of a service reach."""

_PLAIN_NAME = re.compile(r"[\w.-]{1,256}")
"""Also as regular expressions these take no time: only dots are special in them."""
_MOST_FAULTS = 100
_LONGEST_PARAM = 120

_PREFERENCES = ("dpo", "orpo", "kto")


@dataclass(frozen=True)
class Fault:
    """Something that is wrong with a request or a file, as OpenAI's error objects say it.

    Attributes:
        message: A sentence for people.
        param: The field, as the client wrote it.
        code: A word for programs.
    """

    message: str
    param: str | None = None
    code: str | None = None


@dataclass(frozen=True)
class Row:
    """What becomes of a field that a client sends.

    Attributes:
        use: `accepted`; `mapped`: it comes from another field of the request; `refused`.
        reason: Of the latter two; completes "training.report_to: ".
        check: Says what is wrong with a value, before the task itself is checked; empty if nothing is.
        inner: The rows of a section within this one.
    """

    use: Literal["accepted", "mapped", "refused"]
    reason: str = ""
    check: Callable[[Any], str] | None = None
    inner: Mapping[str, Row] = field(default_factory=dict)


def _names(value: Any) -> str:
    """Refuse regular expressions: one can be made so that matching it takes for ever."""
    names = value if isinstance(value, list) else [value]
    odd = [name for name in names if isinstance(name, str) and not _PLAIN_NAME.fullmatch(name)]
    if odd:
        return f"a server matches no regular expressions: give a list of plain names, got {shown(odd[0])}"
    return ""


def _named(value: Any) -> str:
    """The same for the keys of a mapping."""
    return _names(list(value)) if isinstance(value, dict) else ""


def _accept(names: str, check: Callable[[Any], str] | None = None) -> dict[str, Row]:
    return {name: Row("accepted", check=check) for name in names.split()}


def _refuse(reason: str, names: str) -> dict[str, Row]:
    return {name: Row("refused", reason) for name in names.split()}


ADAPTER: Mapping[str, Row] = {
    **_accept(
        "peft_type r lora_alpha lora_dropout use_rslora use_dora init_lora_weights ensure_weight_tying"
    ),
    **_accept(
        "num_virtual_tokens bottleneck_size non_linearity scaling sparsity l0_weight layers_to_transform"
    ),
    **_accept("projection_prng_key save_projection vera_dropout d_initial alpha"),
    **_accept("target_modules exclude_modules feedforward_modules modules_to_save", _names),
    **_accept("layers_pattern target_parameters", _names),
    **_accept("rank_pattern alpha_pattern trainable_token_indices", _named),
    **_refuse(
        "jobs cannot start from a fine-tuned model yet, and a server reads no path of a client: leave it out",
        "adapter_name_or_path",
    ),
}
"""The section `adapter`, of all kinds."""

_SOURCE: Mapping[str, Row] = {
    **_accept("split templates chat_template_kwargs columns"),
    **_refuse("names a configuration of a directory, and a file has none: leave it out", "name"),
}

DATA: Mapping[str, Row] = {
    **_SOURCE,
    **_accept("max_length truncation_side shuffle"),
    "path": Row("mapped", "is given by training_file: leave it out"),
    **_refuse(
        "a job has one training file: join the files before they are uploaded", "mixture stopping_strategy"
    ),
}

TRAINING: Mapping[str, Row] = {
    **_accept("loss loss_type beta label_smoothing discopop_tau precompute_ref_log_probs desirable_weight"),
    **_accept(
        "undesirable_weight disable_dropout truncation_mode load_best_model_at_end metric_for_best_model"
    ),
    **_accept(
        "greater_is_better early_stopping_patience early_stopping_threshold per_device_train_batch_size"
    ),
    **_accept("gradient_accumulation_steps learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps"),
    **_accept(
        "warmup_ratio weight_decay max_grad_norm optim loraplus_lr_ratio loraplus_weight_decay adam_beta1"
    ),
    **_accept(
        "adam_beta2 adam_epsilon label_smoothing_factor neftune_noise_alpha router_aux_loss_coef max_steps"
    ),
    **_accept("num_train_epochs seed"),
    **_refuse(
        "a server reports to no tracker: read the job's events, or its result files",
        "report_to run_name project",
    ),
    **_refuse("a server writes to no directory of a client's choice: leave it out", "logging_dir"),
    **_refuse(
        "the server decides when a job is saved: leave it out", "save_strategy save_steps save_total_limit"
    ),
    **_refuse("the number of a job's steps never changes: leave it out", "lr_scheduler_on_resume"),
}

EVAL: Mapping[str, Row] = {
    **_SOURCE,
    **_accept("eval_steps per_device_eval_batch_size metrics"),
    "path": Row("mapped", "is given by validation_file: leave it out"),
    "generate": Row("accepted", inner=_accept("max_new_tokens samples")),
}

SECTIONS: Mapping[str, Mapping[str, Row]] = {
    "adapter": ADAPTER,
    "data": DATA,
    "training": TRAINING,
    "eval": EVAL,
}
"""All fields of a task, by section."""


def faults_of_section(
    where: str, given: Mapping[str, Any], rows: Mapping[str, Row] | None = None
) -> list[Fault]:
    """What of a section a client may not send.

    Args:
        where: Its name, a key of `SECTIONS`.
        given: What the client sent.
        rows: Those of the section; by default as `SECTIONS` has them.
    """
    rows = SECTIONS[where] if rows is None else rows
    faults: list[Fault] = []
    for name, value in given.items():
        if len(faults) >= _MOST_FAULTS:
            break
        param = f"{where}.{name}"[:_LONGEST_PARAM]
        row = rows.get(name)
        if row is None:
            near = difflib.get_close_matches(name[:_LONGEST_PARAM], rows, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            faults.append(Fault(f"{param}: unknown field{hint}", param, "unknown_parameter"))
        elif row.use != "accepted":
            faults.append(Fault(f"{param}: {row.reason}", param, "unsupported_parameter"))
        elif wrong := row.check(value) if row.check else "":
            faults.append(Fault(f"{param}: {wrong}", param, "invalid_value"))
        elif row.inner and isinstance(value, dict):
            faults += faults_of_section(param, value, row.inner)
    return faults


def to_task(
    request: JobRequest, job_id: str, seed: int, training_path: Path, validation_path: Path | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The task that a request asks for.

    Fields of the request's sections count before defaults. The task is not checked yet.

    Args:
        request: One that `parse_request` has returned.
        job_id: The task's name.
        seed: The request's, or one that was drawn.
        training_path: The content of `training_file`.
        validation_path: The content of `validation_file`, if there is one.

    Returns:
        The task as `tasks.yaml` would say it, and OpenAI's hyperparameters as numbers. `n_epochs` is None where
        `training.max_steps` sets the length.
    """
    task: dict[str, Any] = {
        "name": job_id,
        "adapter": dict(DEFAULT_ADAPTER),
        "data": {**request.data, "path": str(training_path)},
        "training": {**_training(request), "seed": seed},
    }
    if request.adapter is not None:
        task["adapter"] = {"peft_type": "LORA", **request.adapter}
    if validation_path is not None:
        task["eval"] = {
            "eval_steps": DEFAULT_EVAL_STEPS,
            **(request.eval or {}),
            "path": str(validation_path),
        }
    return task, _resolved(task["training"])


def as_written(faults: Iterable[Fault], request: JobRequest) -> list[Fault]:
    """Faults of a task with its fields called as the client wrote them.

    Args:
        faults: What the checker found.
        request: Where the task came from.
    """
    return [_as_written(fault, request) for fault in faults]


def _as_written(fault: Fault, request: JobRequest) -> Fault:
    section, _, name = (fault.param or "").partition(".")
    if section != "training" or name in request.training:
        return fault
    where, _ = request.chosen
    written = {
        "num_train_epochs": f"{where}.n_epochs",
        "per_device_train_batch_size": f"{where}.batch_size",
        "learning_rate": f"{where}.learning_rate_multiplier",
        "beta": f"{where}.beta",
        "seed": "seed",
        "loss": "method.type",
    }.get(name)
    if written is None:
        return fault
    return replace(fault, message=fault.message.replace(f"training.{name}", written), param=written)


def _training(request: JobRequest) -> dict[str, Any]:
    """The `training` section but for the seed."""
    given = {name: value for name, value in request.training.items() if value is not None}
    _, chosen = request.chosen
    loss = given.get("loss", "dpo" if request.method_type == "dpo" else "sft")
    rate = PREFERENCE_RATE if loss in _PREFERENCES else RATE
    made = {
        "loss": loss,
        "learning_rate": rate * (chosen.learning_rate_multiplier or 1),
        "per_device_train_batch_size": chosen.batch_size or DEFAULT_BATCH_SIZE,
    }
    if given.get("max_steps", -1) == -1:
        given.pop("max_steps", None)
        made["num_train_epochs"] = chosen.n_epochs or DEFAULT_EPOCHS
    if loss in _PREFERENCES:
        made["beta"] = getattr(chosen, "beta", None) or DEFAULT_BETA
    return {**made, **given}


def _resolved(training: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's hyperparameters of a task, whose fields may yet be of wrong types: these become None."""

    def value(name: str) -> float | None:
        found = number(training.get(name))
        return found if isinstance(found, int | float) and not isinstance(found, bool) else None

    rate, size = value("learning_rate"), value("per_device_train_batch_size")
    parts = value("gradient_accumulation_steps") or 1
    base = PREFERENCE_RATE if "beta" in training else RATE
    resolved = {
        "n_epochs": value("num_train_epochs"),
        "batch_size": None if size is None else size * parts,
        "learning_rate_multiplier": None if rate is None else float(f"{rate / base:.12g}"),
    }
    if "beta" in training:
        resolved["beta"] = value("beta")
    return resolved
