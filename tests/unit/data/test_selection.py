"""Which rows a section of tasks.yaml names, and what becomes of their columns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_mux.data.messages import Messages
from megatron_mux.data.records import PromptCompletion, record_of
from megatron_mux.data.section import DataSource
from megatron_mux.data.sources.selection import Selection
from megatron_mux.errors import UserError


def source(path: Any, **fields: Any) -> DataSource:
    return DataSource.model_validate({"path": path, **fields})


def texts(where: DataSource) -> list[str]:
    selection = Selection(where)
    rows: Any = list(selection.rows())
    assert [row.number for row in rows] == list(range(len(rows)))
    selection.close()
    return [row.value["text"] for row in rows]


def write(path: Path, *values: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": value}) + "\n" for value in values))
    return path


def dataset(*values: str) -> Dataset:
    return Dataset.from_list([{"text": value} for value in values])


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file, shards, what `datasets` saves, and directories as on the Hub."""
    root = tmp_path_factory.mktemp("layouts")
    write(root / "one.jsonl", "a", "b", "c")
    write(root / "shards" / "2.jsonl", "c")
    dataset("a", "b").to_parquet(root / "shards" / "1.parquet")
    dataset("a", "b", "c").save_to_disk(root / "saved", num_shards=2)
    DatasetDict(train=dataset("a", "b", "c", "d"), test=dataset("e")).save_to_disk(root / "splits")
    (root / "hub" / "data").mkdir(parents=True)
    for name, values in (
        ("train-00000-of-00002", "ab"),
        ("train-00001-of-00002", "c"),
        ("test-00000-of-00001", "e"),
    ):
        dataset(*values).to_parquet(root / "hub" / "data" / f"{name}.parquet")
    (root / "configs").mkdir()
    configs = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in "xy")
    (root / "configs" / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    for name in "xy":
        write(root / "configs" / f"{name}.jsonl", name)
    return root


@pytest.mark.parametrize(
    ("path", "fields", "wanted"),
    [
        ("one.jsonl", {}, "abc"),
        ("one.jsonl", {"split": "train"}, "abc"),
        (["shards/2.jsonl", "one.jsonl"], {}, "cabc"),
        ("shards/*", {}, "abc"),
        ("**/2.jsonl", {}, "c"),
        (["shards/*.parquet", "shards/2.jsonl"], {"split": "train[1:]"}, "bc"),
        ("saved", {}, "abc"),
        ("splits", {"split": "test"}, "e"),
        ("splits", {"split": "train[:50%]"}, "ab"),
        ("splits", {"split": "train[-1:]+test+train[1:3]"}, "debc"),
        ("hub", {"split": "train"}, "abc"),
        ("hub", {"split": "train[2:]"}, "c"),
        ("configs", {"name": "y"}, "y"),
    ],
)
def test_where_rows_come_from(layouts: Path, path: Any, fields: dict[str, str], wanted: str) -> None:
    paths = [layouts / one for one in ([path] if isinstance(path, str) else path)]
    where = source(paths if len(paths) > 1 else paths[0], **fields)
    assert texts(where) == list(wanted)
    again = Selection(where)
    assert again.fingerprint() == Selection(where).fingerprint()


@pytest.mark.parametrize(
    ("path", "fields", "said"),
    [
        ("splits", {}, "has the splits train, test: say which one with split"),
        ("splits", {"split": "dev"}, "split: 'dev' is not there, only train, test"),
        ("splits", {"split": "train[:x]"}, "split: must be such as train[:90%]"),
        ("splits", {"split": "[:1]"}, "split: must be such as train"),
        ("one.jsonl", {"split": "test"}, "split: 'test' is not there, only train"),
        ("configs", {}, "is no directory of data files that datasets can load: Config name is missing"),
        ("no*thing", {}, "no file matches"),
        ("nothing", {}, "no such file"),
    ],
)
def test_what_is_not_there(layouts: Path, path: str, fields: dict[str, str], said: str) -> None:
    with pytest.raises(UserError) as caught:
        texts(source(layouts / path, **fields))
    assert str(caught.value).startswith(f"{layouts / path}: {said}")


_BOUND = st.none() | st.integers(-12, 12) | st.integers(-100, 100).map("{}%".format)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=3), start=_BOUND, stop=_BOUND)
def test_slices_are_those_of_datasets(tmp_path: Path, sizes: list[int], start: Any, stop: Any) -> None:
    from datasets import ReadInstruction

    names = [[f"{i} {j}" for j in range(size)] for i, size in enumerate(sizes)]
    files = [write(tmp_path / f"{i}.jsonl", *own) for i, own in enumerate(names)]
    asked = f"train[{'' if start is None else start}:{'' if stop is None else stop}]"
    rows = [name for own in names for name in own]
    try:
        (part,) = ReadInstruction.from_spec(asked).to_absolute({"train": len(rows)})
    except (AssertionError, ValueError):
        with pytest.raises(UserError, match="split: must be such as"):
            texts(source(files, split=asked))
        return
    assert texts(source(files, split=asked)) == rows[part.from_ : part.to]


def test_columns_and_templates(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("question,answer,text,score\na,b,c,1\n")
    row = (path, {"prompt": "question", "completion": "answer"})
    mapped = Selection(source(row[0], columns=row[1]))
    (only,) = mapped.rows()
    assert mapped.read(only.value, record_of) == PromptCompletion("a", "b")
    made = Selection(
        source(path, columns={"completion": "answer"}, templates={"prompt": "Q: {question} {{{score}}}\nA:"})
    )
    (only,) = made.rows()
    assert made.read(only.value, record_of) == PromptCompletion("Q: a {1}\nA:", "b")
    assert len({mapped.fingerprint(), made.fingerprint(), Selection(source(path)).fingerprint()}) == 3


def test_chat_template_kwargs_of_a_record_come_first(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    turns = [{"role": "user", "content": "a"}]
    path.write_text(json.dumps([{"messages": turns}, {"messages": turns, "chat_template_kwargs": {"a": 2}}]))
    selection = Selection(source(path, chat_template_kwargs={"a": 1, "b": 1}))
    first, second = (selection.read(row.value, record_of) for row in selection.rows())
    assert isinstance(first, Messages) and isinstance(second, Messages)
    assert (first.template_kwargs, second.template_kwargs) == ({"a": 1, "b": 1}, {"a": 2, "b": 1})


def _lines(path: Path) -> Path:
    path = path / "a.jsonl"
    path.write_text('{"q": "a", "n": null}\n{"q": 3, "n": 1}\n{"r": 1}\n')
    return path


def _table(path: Path) -> Path:
    Dataset.from_list([{"q": "a", "n": None}, {"q": "b", "n": 2.5}]).to_parquet(path / "a.parquet")
    return path / "a.parquet"


@pytest.mark.parametrize(
    ("make", "fields", "said"),
    [
        (
            _lines,
            {"columns": {"text": "q"}},
            [
                "line 2: \"text\" must be text, got a JSON number (text is column 'q')",
                "line 3: has no column 'q', only 'r'",
            ],
        ),
        (
            _table,
            {"templates": {"text": "{n}"}},
            ["row 1: column 'n' must be text or a number, as data.templates uses it, got null"],
        ),
        (_table, {}, [f"row {i}: no known form: " for i in (1, 2)]),
    ],
)
def test_bad_rows_are_named_with_file_row_and_column(
    tmp_path: Path, tokenizer: Any, make: Callable[[Path], Path], fields: dict[str, Any], said: list[str]
) -> None:
    from megatron_mux.data.tokenised_file import tokenise_file

    path = make(tmp_path)
    good = write(tmp_path / "good.jsonl", "a")
    for paths in (path, [good, path]) if not fields else (path,):
        with pytest.raises(UserError) as caught:
            tokenise_file(source(paths, **fields), tokenizer, tmp_path / "tokens")
        assert len(caught.value.problems) == len(said)
        for problem, wanted in zip(caught.value.problems, said, strict=True):
            assert problem.startswith(f"{path}: {wanted}")
