"""A task: one tenant's PEFT job."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Union

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from megatron_mux.adapters.kind import AdapterSpec
from megatron_mux.adapters.registry import KINDS
from megatron_mux.optimizers.registry import OPTIMIZERS
from megatron_mux.section import Refused, Section, problem, shown
from megatron_mux.tasks.data import DataSpec
from megatron_mux.tasks.evaluation import EvalSpec
from megatron_mux.tasks.training import TrainingSpec

# Names become directories in --save DIR, where the run keeps these of its own.
_RESERVED = frozenset(
    {
        *("manifests", "plan.json", "run.json", "run.lock", "warnings.log"),
        *("schedule.json", "schedule.svg", "schedule.trace.json", "subgraphs.svg"),
        *("results.csv", "curves.svg", "sweep.jsonl"),
    }
)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
LONGEST_NAME = 100
"""Maximum length of a task's name."""


def _name(value: Any) -> Any:
    if not isinstance(value, str):
        raise problem(f"must be text, got {shown(value)}: put quotes around it")
    if not _NAME.fullmatch(value) or len(value) > LONGEST_NAME:
        raise problem(
            "must be made of letters, digits, '-', '_' and '.', begin with a letter, a digit or '_', and have at most "
            f"{LONGEST_NAME} characters, got {shown(value)}"
        )
    if value in _RESERVED:
        raise problem(f"{value!r} is what the run calls a file of its own: choose another name")
    return value


def problem_of_name(value: Any) -> str:
    """Why no task can be called that; empty if one can."""
    try:
        _name(value)
    except PydanticCustomError as error:
        return str(error)
    return ""


if TYPE_CHECKING:
    AnyAdapter = AdapterSpec
else:
    AnyAdapter = Annotated[Union[tuple(KINDS.values())], Field(discriminator="peft_type")]  # noqa: UP007
    """The section of any kind; `peft_type` says which."""


class TaskSpec(Section):
    """One validated task of `tasks.yaml`."""

    name: Annotated[str, BeforeValidator(_name)]
    """Unique in the run; also the task's directory under `--save`."""
    adapter: AnyAdapter
    """PEFT method and its hyper-parameters."""
    data: DataSpec
    """Training data."""
    training: TrainingSpec = Field(default_factory=lambda: TrainingSpec.model_validate({}))
    """Batch size, optimizer, schedule, steps, seed."""
    eval: EvalSpec | None = None
    """Held-out data."""

    refused: ClassVar[Mapping[str, Refused]] = {
        "sweep": Refused("is read from task files only: write the task to one and give its path")
    }

    @model_validator(mode="after")
    def _suits_a_preference(self) -> TaskSpec:
        training, measured = self.training, self.eval
        if not training.is_preference:
            return self
        if measured is not None and (measured.generates is not None or measured.metrics != ["accuracy"]):
            raise problem(
                f"eval.metrics, eval.generate: with loss: {training.loss} an evaluation measures the loss and rewards: "
                "leave them out"
            )
        for name in ("mixture", "truncation_side"):
            if getattr(self.data, name) != DataSpec.model_fields[name].default:
                raise problem(f"data.{name}: is not supported with loss: {training.loss}: leave it out")
        for name, value in self.adapter if training.disable_dropout else ():
            if name.endswith("_dropout") and value:
                raise problem(
                    f"adapter.{name}: TRL turns dropout off for loss: {training.loss}: set it to 0, or set "
                    "training.disable_dropout: false"
                )
        return self

    @model_validator(mode="after")
    def _compares_what_is_measured(self) -> TaskSpec:
        figures = self.training.figures if self.training.is_preference else ()
        if wrong := self.training.problem_of_metric(self.eval, figures):
            raise problem(wrong)
        return self

    @property
    def sequences_per_step(self) -> int:
        """Sequences of one optimizer step, over all ranks and accumulation steps: two for a pair of completions."""
        training = self.training
        records = training.per_device_train_batch_size * training.gradient_accumulation_steps
        return records * training.sequences_per_record

    @property
    def starts_from_reference(self) -> bool:
        """Whether a frozen copy of the adapter that it starts from stays its reference."""
        return self.training.needs_reference and self.adapter.adapter_name_or_path is not None

    def total_steps(self, n_records: int) -> int:
        """Optimizer steps of the whole task on `n_records` usable sequences, counted as transformers does.

        An epoch's last batch may be short and counts as a step; a fraction of an epoch is rounded up to whole steps.
        """
        if self.training.max_steps is not None:
            return self.training.max_steps
        assert self.training.num_train_epochs is not None
        return math.ceil(self.training.num_train_epochs * math.ceil(n_records / self.sequences_per_step))

    def plain(self) -> dict[str, Any]:
        """The task as plain JSON data; `TaskSpec.model_validate` reads it back."""
        return self.model_dump(mode="json")

    def differences(self, other: TaskSpec) -> list[str]:
        """List the fields in which `other` differs: `training.learning_rate: 0.001, not 0.01` (ours, not theirs).

        Of fields that affect the task's updates: not its name, paths of files, or evaluation, nor its length, which is
        compared in steps (`training.resumed`). What the data file holds is fingerprinted by `TaskDataset.fingerprint`.
        """
        ours, theirs = self._deciding(), other._deciding()
        changes = []
        for section in ours:
            for key in sorted(ours[section].keys() | theirs[section].keys()):
                mine, its = ours[section].get(key), theirs[section].get(key)
                if mine != its:
                    changes.append(f"{section}.{key}: {mine}, not {its}")
        return changes

    def _deciding(self) -> dict[str, dict[str, Any]]:
        data = self.plain()
        del data["adapter"]["adapter_name_or_path"], data["data"]["path"]
        for source in data["data"]["mixture"] or ():
            del source["path"]
        training = data["training"]
        training["optim"] = OPTIMIZERS[training["optim"]].names[0]  # another name of it decides alike
        for name in (*TrainingSpec.undecided, *TrainingSpec.length_fields):
            del training[name]
        return {section: data[section] for section in ("adapter", "data", "training")}
