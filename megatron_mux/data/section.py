"""The fields of tasks.yaml that say where records come from, and how rows of files become records."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, model_validator

from megatron_mux.section import FilePaths, Refused, Section, problem, shown

SHAPE_KEYS = (
    "prompt",
    "completion",
    "text",
    "messages",
    "conversations",
    "instruction",
    "input",
    "output",
    "tools",
    "chat_template_kwargs",
    "system",
    "history",
)
"""Keys that have a meaning in a record (`megatron_mux.data.records`); any others are ignored."""

RECORD_KEYS = (*SHAPE_KEYS, "chosen", "rejected", "label")
"""The same, with those of preference records (`megatron_mux.data.preference`)."""

OPENAI_KEYS = ("input", "preferred_output", "non_preferred_output")
"""Those of a pair in OpenAI's format."""

REFUSED_KEYS = ("history", "documents", "functions", "images", "image", "videos", "video", "audios", "audio")
"""Keys that change what a conversation means, and that chat templates of texts do not render."""

_TEMPLATES = ("text", "prompt", "completion")
OF_RECORDS = (
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "return_dict", "return_assistant_tokens_mask",
)  # fmt: skip
"""Arguments of `apply_chat_template` that records, or the tokeniser itself, give."""


def _columns(value: Any) -> Any:
    if not isinstance(value, dict) or not all(isinstance(v, str) and v for v in value.values()):
        raise problem(
            f"must map keys of a record to columns, such as {{prompt: question}}, got {shown(value)}"
        )
    for key in value:
        if key not in RECORD_KEYS:
            raise problem(
                f"{shown(key)} is no key of a record: map from {', '.join(RECORD_KEYS)} to columns of the file"
            )
    return value


def template_columns(template: str) -> list[str]:
    """List the columns that a template such as `Q: {question}` names.

    Raises:
        ValueError: It is no such template.
    """
    found = []
    for _, name, form, conversion in Formatter().parse(template):
        if name is None:
            continue
        if not name or form or conversion or not all(part.isidentifier() for part in name.split(" ")):
            raise ValueError(
                f"{{{name}{'!' + conversion if conversion else ''}{':' + form if form else ''}}}"
            )
        found.append(name)
    return found


def _templates(value: Any) -> Any:
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise problem(
            f"must map {', '.join(_TEMPLATES)} to texts with {{column}} in them, got {shown(value)}"
        )
    for key, template in value.items():
        if key not in _TEMPLATES:
            raise problem(f"makes {', '.join(_TEMPLATES)}, not {shown(key)}")
        try:
            named = template_columns(template)
        except ValueError as error:
            raise problem(
                f"{key}: must be a text with {{column}} in it; braces that stand for themselves are doubled "
                f"({{{{ and }}}}): {error}"
            ) from None
        if not named:
            raise problem(f"{key}: names no {{column}}: every record would be the same")
    return value


def _chat_arguments(value: Any) -> Any:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise problem(f"must be a mapping, such as {{enable_thinking: false}}, got {shown(value)}")
    for key in value:
        if key == "documents":
            raise problem("documents are not supported: put them into a message")
        if key in OF_RECORDS:
            raise problem(f"{key} cannot be set here: it comes from the records")
    return value


SOURCE_REFUSED: Mapping[str, Refused] = {
    "type": Refused("a record's keys tell its form: leave it out, or map them with columns and templates"),
    "ds_type": Refused("the kind of a file shows in the file itself: leave it out"),
    "data_files": Refused("write the files, or a glob, as path"),
    "dataset_text_field": Refused("write columns: {text: NAME}"),
    "field_messages": Refused("write columns: {messages: NAME}"),
    "format": Refused("write templates: {prompt: ..., completion: ...}"),
    "formatting_func": Refused("write templates: {text: ...}"),
    "documents": Refused("documents are not supported: put them into a message"),
    "chat_template": Refused(
        "the backbone's tokenizer has the template: change chat_template.jinja beside it"
    ),
    "streaming": Refused("files are read in pieces anyway: leave it out"),
}


class SourceSection(Section):
    """How rows of files become records."""

    name: str | None = None
    """Configuration of a Hub data set directory that has several."""
    split: str | None = None
    """`train`, or a part such as `train[:90%]` or `train[100:200]`; needed where there are several."""
    columns: Annotated[dict[str, str], BeforeValidator(_columns)] = Field(default_factory=dict)
    """For keys of a record, the columns they come from: `{prompt: question, completion: answer}`. Other columns are
    then ignored."""
    templates: Annotated[dict[str, str], BeforeValidator(_templates)] = Field(default_factory=dict)
    """Texts made of columns: `{prompt: "Q: {question}\\nA:"}`, for `text`, `prompt` or `completion`."""
    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(_chat_arguments)] = Field(
        default_factory=dict
    )
    """Variables for the chat template, such as `{enable_thinking: false}`; those of a record come first."""

    refused: ClassVar[Mapping[str, Refused]] = SOURCE_REFUSED

    @model_validator(mode="after")
    def _once(self) -> SourceSection:
        for key in self.templates:
            if key in self.columns:
                raise problem(f"columns and templates both give {key}: leave one out")
        return self


class DataSource(SourceSection):
    """Files, and how their rows become records."""

    path: FilePaths
    """A file, a directory, a glob, or a list of them: JSON Lines, JSON, CSV, TSV, parquet, Arrow, a directory that
    `datasets` saved, or one of the Hub."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """What `path` names."""
        return (self.path,) if isinstance(self.path, Path) else self.path

    @property
    def source(self) -> DataSource:
        """The fields of this class alone."""
        return DataSource.model_construct(**{name: getattr(self, name) for name in DataSource.model_fields})

    @property
    def label(self) -> str:
        """Name the source in a message."""
        first, *more = map(str, self.paths)
        return f"{first} (and {len(more)} more)" if more else first
