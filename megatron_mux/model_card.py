"""Model cards: the README.md of an adapter or a merged model, with what it was made of and how well it does.

Cards name files and directories without their paths: what a machine is called is nobody's business.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_mux.version import __version__

NAME = "README.md"
_PATHS = ("path", "adapter_name_or_path", "name_or_path", "base_model_name_or_path")
_PACKAGES = ("torch", "megatron-core", "transformers", "peft")
_DIGITS = 16
"""Digits of fingerprints that cards show."""
_EVALUATIONS = 20
"""Evaluations that a card lists: the first, the last, and others evenly between."""


@dataclass(frozen=True)
class Parent:
    """What something was made of: the name of a backbone or adapter, and its fingerprint."""

    name: str
    fingerprint: str


@dataclass
class TrainingRecord:
    """How a task has gone up to a step.

    Attributes:
        step: Optimizer steps.
        first_step: The first of them that is recorded: a run that goes on in a new directory knows none before.
        first_loss, loss: Training loss of the first and of the last step.
        tokens: Tokens of all steps' batches.
        evaluations: The step of each evaluation, with its metrics by their names in `metrics.jsonl`.
    """

    step: int = 0
    first_step: int = 0
    first_loss: float | None = None
    loss: float | None = None
    tokens: int = 0
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list)

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line of `metrics.jsonl`."""
        step = int(line["step"])
        if "loss" in line:
            self.first_step = self.first_step or step
            self.first_loss = line["loss"] if self.first_loss is None else self.first_loss
            self.step, self.loss = step, line["loss"]
            self.tokens += int(line.get("tokens", 0))
            return
        metrics = {
            key: value
            for key, value in line.items()
            if key.startswith("eval_") and isinstance(value, int | float)
        }
        if metrics:
            self.evaluations.append((step, metrics))


@dataclass(frozen=True)
class TaskCard:
    """What the card of a trained adapter says.

    Attributes:
        name: The task.
        backbone: What it was trained on.
        step: Optimizer steps that the adapter has seen.
        spec: The task as plain data.
        data: Fingerprint of its training records.
        records: Their number; None if that is not known.
        held_out: Number and fingerprint of its evaluation records; None if it has none.
        quantised: How the backbone's weights were quantised; empty: not at all.
        layout: How the run was divided: `{"pipeline": 2}`.
        precision: In what the run computed.
        record: How the task has gone up to this step.
    """

    name: str
    backbone: Parent
    step: int
    spec: Mapping[str, Any]
    data: str
    records: int | None
    layout: Mapping[str, int]
    precision: str
    record: TrainingRecord
    held_out: tuple[int, str] | None = None
    quantised: str = ""

    def text(self) -> str:
        """The content of README.md."""
        kind = str(self.spec["adapter"]["peft_type"])
        seed = self.spec["training"].get("seed")
        divided = ", ".join(f"{name} {size}" for name, size in self.layout.items() if size > 1)
        lines = [
            *_front(
                self.backbone.name,
                ["base_model:adapter:" + self.backbone.name, kind.lower(), "text-generation"],
            ),
            f"# {self.name}",
            "",
            f"A {kind} adapter of `{self.backbone.name}`, trained with megatron-mux.",
            "",
            "## Metrics",
            "",
            *self._metrics(),
            "## Data",
            "",
            *_table(
                [("training", *self._file("data")), ("evaluation", *self._file("eval"))],
                ("", "file", "records", "fingerprint"),
            ),
            f"- Tokens seen: {self.record.tokens:,}{self._since}",
            "",
            "## Training",
            "",
            f"- Optimizer steps: {self.step}",
            f"- Seed: {seed}",
            f"- Computed in: {self.precision or 'not recorded'}",
            f"- Parallel layout: {divided or 'one process'}",
            f"- Fingerprint of the backbone: `{_short(self.backbone.fingerprint)}`",
            f"- Quantisation of the backbone: {self.quantised or 'none'}",
            *_made_with(),
            "",
            "The task, as in tasks.yaml:",
            "",
            *_yaml({"tasks": [_without_paths(_given(self.spec))]}),
        ]
        return "\n".join(lines)

    def _metrics(self) -> list[str]:
        record = self.record
        lines = []
        if record.loss is not None and record.first_loss is not None:
            first, last = _number(record.first_loss), _number(record.loss)
            lines += [f"Training loss {first} at step {record.first_step}, {last} at step {record.step}."]
        if not record.evaluations:
            return [*(lines or ["No step was taken yet."]), ""]
        names = list(dict.fromkeys(name for _, metrics in record.evaluations for name in metrics))
        (_, before), (_, after) = record.evaluations[0], record.evaluations[-1]
        rows = [(name, _number(before.get(name)), _number(after.get(name))) for name in names]
        lines += ["", *_table(rows, ("evaluation", "before", "after"))]
        shown = _spread(record.evaluations, _EVALUATIONS)
        history = [(str(step), *(_number(metrics.get(name)) for name in names)) for step, metrics in shown]
        return [*lines, *_table(history, ("step", *names))]

    @property
    def _since(self) -> str:
        first = self.record.first_step
        return f" (from step {first} on; the steps before were another run's)" if first > 1 else ""

    def _file(self, section: str) -> tuple[str, str, str]:
        """Names of a section's files, how many records they hold, and the fingerprint of these."""
        given = self.spec.get(section) or {}
        names = sorted(set(_file_names(given)))
        count, fingerprint = (self.records, self.data) if section == "data" else self.held_out or (None, "")
        return (
            ", ".join(f"`{name}`" for name in names) or "none",
            "" if count is None else f"{count:,}",
            f"`{_short(fingerprint)}`" if fingerprint else "",
        )


def merged_card(
    backbone: Parent, adapter: Parent, config: Mapping[str, Any], directory: Path, quantised: str = ""
) -> str:
    """The card of a backbone with an adapter merged into it.

    Args:
        backbone: What it was.
        adapter: What was merged into it.
        config: The adapter's.
        directory: The adapter's, whose own card becomes a part of this one.
        quantised: How the backbone's weights were quantised; empty: not at all.
    """
    dequantised = f" Before, the backbone was dequantised ({quantised})." if quantised else ""
    kind = str(config.get("peft_type"))
    rows = [
        (role, parent.name, f"`{_short(parent.fingerprint)}`")
        for role, parent in (("backbone", backbone), ("adapter", adapter))
    ]
    return "\n".join(
        [
            *_front(backbone.name, ["merge", kind.lower(), "text-generation"], library="transformers"),
            f"# {backbone.name} with {adapter.name}",
            "",
            f"`{backbone.name}` with the {kind} adapter `{adapter.name}` merged into its weights.{dequantised}",
            "",
            "## Made of",
            "",
            *_table(rows, ("", "name", "fingerprint")),
            *_made_with(),
            "",
            *_of_parent(adapter.name, directory),
        ]
    )


def combined_card(
    base_model: str, parents: Sequence[tuple[Parent, float, Path]], how: Mapping[str, Any], rank: int
) -> str:
    """The card of an adapter that combines several.

    Args:
        base_model: What they adapt.
        parents: The adapters, their weights, and their directories.
        how: Method and its settings.
        rank: Of the result.
    """
    rows = [(parent.name, f"{weight:g}", f"`{_short(parent.fingerprint)}`") for parent, weight, _ in parents]
    settings = ", ".join(f"{name} {value}" for name, value in how.items() if value is not None)
    lines = [
        *_front(base_model, ["base_model:adapter:" + base_model, "lora", "merge", "text-generation"]),
        f"# {' + '.join(parent.name for parent, _, _ in parents)}",
        "",
        f"A LoRA adapter of rank {rank} of `{base_model}`, combined from {len(parents)} others ({settings}).",
        "",
        "## Made of",
        "",
        *_table(rows, ("adapter", "weight", "fingerprint")),
        *_made_with(),
        "",
    ]
    for parent, _, directory in parents:
        lines += _of_parent(parent.name, directory)
    return "\n".join(lines)


def base_model_name(given: str | None) -> str:
    """What `base_model_name_or_path` is called: a name on the hub as it is, a directory without its path."""
    given = given or "unknown"
    return Path(given).name if Path(given).is_absolute() or given.startswith(".") else given


def _front(base_model: str, tags: Iterable[str], library: str = "peft") -> list[str]:
    from huggingface_hub import ModelCardData

    data = ModelCardData(
        base_model=base_model,
        library_name=library,
        pipeline_tag="text-generation",
        tags=["megatron-mux", *tags],
    )
    return ["---", data.to_yaml().rstrip(), "---", ""]


def _made_with() -> list[str]:
    versions = [f"megatron-mux {__version__}"]
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return [f"- Made with: {', '.join(versions)}", f"- Date: {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"]


def _of_parent(name: str, directory: Path) -> list[str]:
    """The card of a parent, if it is one of ours, without front matter and title, one level of headings deeper."""
    try:
        text = (directory / NAME).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return []
    front, _, text = text.partition("\n---\n")
    if "\n- megatron-mux\n" not in front:
        return []  # what peft writes is a form to fill in
    lines = text.strip().splitlines()
    fenced, found = False, [f"## From the card of {name}", ""]
    for line in lines[1:] if lines and lines[0].startswith("# ") else lines:
        fenced ^= line.startswith("```")
        found.append("#" + line if line.startswith("#") and not fenced else line)
    return [*found, ""]


def _table(rows: Sequence[Sequence[str]], headings: Sequence[str]) -> list[str]:
    rule = "|".join("---" for _ in headings)
    return [f"| {' | '.join(headings)} |", f"|{rule}|", *(f"| {' | '.join(row)} |" for row in rows), ""]


def _yaml(content: Mapping[str, Any]) -> list[str]:
    import yaml

    return ["```yaml", yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True).rstrip(), "```", ""]


def _given(value: Any) -> Any:
    """Plain data without the fields that are None, which tasks.yaml leaves out."""
    if isinstance(value, Mapping):
        return {key: _given(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_given(item) for item in value]
    return value


def _without_paths(value: Any, key: str = "") -> Any:
    """Plain data with names of files in place of their paths."""
    if isinstance(value, Mapping):
        return {_without_paths(name): _without_paths(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_paths(item, key) for item in value]
    return Path(value).name if _is_path(value, key) else value


def _file_names(value: Any, key: str = "") -> Iterable[str]:
    """Names of the files that a section names."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _file_names(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from _file_names(item, key)
    elif _is_path(value, key):
        yield Path(value).name


def _is_path(value: Any, key: str) -> bool:
    """Whether a field, by its name or its value, holds a path."""
    return isinstance(value, str) and (key in _PATHS or Path(value).is_absolute())


def _spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many of the items, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _short(fingerprint: str) -> str:
    return fingerprint[:_DIGITS] or "none"
