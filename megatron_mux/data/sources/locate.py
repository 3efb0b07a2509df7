"""From a path in a task file to the data files of its split, and the part of them that is asked for."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from megatron_mux.data.section import DataSource
from megatron_mux.data.sources.columnar import Arrow, Parquet
from megatron_mux.data.sources.json_array import JsonArray
from megatron_mux.data.sources.json_lines import JsonLines
from megatron_mux.data.sources.source import Source
from megatron_mux.data.sources.table_text import TableText
from megatron_mux.errors import UserError

ONLY_SPLIT = "train"
"""The split of files by themselves, as in `datasets`."""

_DELIMITERS = {".csv": ",", ".tsv": "\t", ".tab": "\t"}
# First bytes of files that hold data in a wrapping.
_PACKED = {
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
}
_SPLIT_NAME = re.compile(r"[^\[\]+]+")


def open_file(path: Path, columns: Sequence[str] | None = None) -> Source:
    """Open a data file as what its first bytes, or else its name, say it is.

    Args:
        path: The file.
        columns: Those that are read of tables that can be read by column; None: those that a record may have.

    Raises:
        UserError: It cannot be read, or is of no kind that is known.
    """
    lines = JsonLines(path)  # the kind without a mark of its own
    try:
        begin = lines.file.peek(4096)
    except OSError:
        begin = b""
    for mark, packing in _PACKED.items():
        if begin.startswith(mark):
            lines.close()
            raise UserError(f"{path}: is packed ({packing}): unpack it")
    kind: Any = None
    if begin.startswith(b"PAR1"):
        kind = Parquet
    elif begin.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        kind = Arrow
    elif path.suffix.lower() in _DELIMITERS:
        lines.close()
        return TableText(path, _DELIMITERS[path.suffix.lower()])
    elif begin.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        lines.close()
        return JsonArray(path)
    if kind is None:
        return lines
    lines.close()
    opened: Source = kind(path, columns)
    return opened


def locate(source: DataSource) -> tuple[list[tuple[Path, str]], str]:
    """Find the files of a source.

    Args:
        source: What a task file says.

    Returns:
        The files of all splits that are asked for, in order, each with its split; and what is asked for, such as
        `train[:90%]`.

    Raises:
        UserError: There are none, or it is open which are meant.
    """
    splits: dict[str, list[Path]] = {}
    for path in source.paths:
        for split, files in _splits(path, source.name).items():
            splits.setdefault(split, []).extend(files)
    asked = source.split
    if asked is None:
        if len(splits) > 1:
            raise UserError(f"{source.label}: has the splits {', '.join(splits)}: say which one with split")
        asked = next(iter(splits))
    named = [name.strip() for name in _SPLIT_NAME.findall(re.sub(r"\[[^]]*\]", "", asked))]
    for name in named:
        if name not in splits:
            raise UserError(f"{source.label}: split: {name!r} is not there, only {', '.join(splits)}")
    if not named:
        raise UserError(f"{source.label}: split: must be such as train or train[:90%], got {asked!r}")
    return [(file, name) for name in dict.fromkeys(named) for file in splits[name]], asked


def row_ranges(asked: str, counts: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """Resolve slices such as `train[:90%]+test[10:20]` as `datasets` does.

    Args:
        asked: The slices.
        counts: Rows of each split.

    Returns:
        Split, first row and the row after the last, for each slice.

    Raises:
        ValueError: It is not written so.
    """
    from datasets import ReadInstruction  # slow to import

    try:
        found = ReadInstruction.from_spec(asked).to_absolute(dict(counts))
    except (AssertionError, IndexError) as error:
        raise ValueError(" ".join(str(error).split())) from error
    return [
        (one.splitname, one.from_ or 0, counts[one.splitname] if one.to is None else one.to) for one in found
    ]


def is_sliced(asked: str) -> bool:
    """Whether a text names parts of splits, or several splits, instead of a whole one."""
    return "[" in asked or "+" in asked


def _splits(path: Path, name: str | None) -> dict[str, list[Path]]:
    """The files of each split that a path has."""
    if not os.path.exists(path):
        if not has_magic(str(path)):
            raise UserError(f"{path}: no such file")
        files = [file for found in sorted(glob(str(path), recursive=True)) if (file := Path(found)).is_file()]
        if not files:
            raise UserError(f"{path}: no file matches")
        return {ONLY_SPLIT: files}
    if not path.is_dir():
        return {ONLY_SPLIT: [path]}
    try:
        if (path / "dataset_dict.json").is_file():
            names = json.loads((path / "dataset_dict.json").read_text())["splits"]
            return {split: _saved(path / split) for split in names}
        if (path / "state.json").is_file():
            return {ONLY_SPLIT: _saved(path)}
        if (path / "config.json").is_file():
            raise UserError(f"{path}: holds a model, not a data set")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: is damaged: what datasets saved cannot be read: {error}") from error
    return _hub_directory(path, name)


def _saved(directory: Path) -> list[Path]:
    """The files of a data set that `datasets.save_to_disk` wrote."""
    return [
        directory / file["filename"]
        for file in json.loads((directory / "state.json").read_text())["_data_files"]
    ]


def _hub_directory(path: Path, name: str | None) -> dict[str, list[Path]]:
    """The files of a directory that is laid out as data sets on the Hub are: `datasets` knows the rules."""
    from datasets import load_dataset_builder
    from datasets.utils.logging import get_verbosity, set_verbosity, set_verbosity_error

    before = get_verbosity()
    set_verbosity_error()
    try:
        builder = load_dataset_builder(str(path), name)
    except Exception as error:  # whatever is in the directory may fail in any way
        said = " ".join(str(error).split())
        raise UserError(
            f"{path}: is no directory of data files that datasets can load: {said or type(error).__name__}"
        ) from error
    finally:
        set_verbosity(before)
    found = {
        str(split): [Path(str(file)) for file in files]
        for split, files in (builder.config.data_files or {}).items()
    }
    if not found:
        raise UserError(f"{path}: holds no data files")
    return found


def files_of(source: DataSource) -> list[Path]:
    """The files of all splits that are asked for.

    Raises:
        UserError: See `locate`.
    """
    return [file for file, _ in locate(source)[0]]
