"""Reads a YAML file, and says in a sentence why it cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from megatron_mux.section import plain


def read_yaml(path: Path, outline: str) -> tuple[Any, list[str]]:
    """Read a YAML file: its value (None if it cannot be read) and its problems.

    Args:
        path: The file.
        outline: What it must hold, for a message.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return None, [f"{path}: no such file"]
    except IsADirectoryError:
        return None, [f"{path}: is a directory, not a task file"]
    except UnicodeDecodeError as error:
        return None, [f"{path}: is not UTF-8 text (byte {error.start})"]
    except OSError as error:
        return None, [f"{path}: cannot be read: {error.strerror}"]
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None, [f"{path}: is empty: it must hold {outline}"]
        twice = _duplicate_keys(node)
        value = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}: " if mark is not None else ""
        said = ", ".join(s for s in (error.context, error.problem) if s)
        return None, [f"{path}: {line}not valid YAML: {said}"]
    except (yaml.YAMLError, ValueError) as error:
        return None, [f"{path}: not valid YAML: {' '.join(str(error).split())}"]
    except RecursionError:
        return None, [f"{path}: not valid YAML: nested too deeply"]
    return value, [f"{path}: {text}" for text in twice]


def _duplicate_keys(root: yaml.Node) -> list[str]:
    """Find keys that are given twice in one mapping; YAML would silently keep the last."""
    repeated: list[str] = []
    seen: set[int] = set()
    pending = [root]
    while pending:
        node = pending.pop()
        if id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            pending += reversed(node.value)
        elif isinstance(node, yaml.MappingNode):
            pending += [value for _, value in reversed(node.value)]
            lines: dict[str, int] = {}
            for key in [
                key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"
            ]:
                line = key.start_mark.line + 1
                if key.value in lines:
                    repeated.append(
                        f"line {line}: {plain(key.value)} is given twice (first on line {lines[key.value]})"
                    )
                lines.setdefault(key.value, line)
    return repeated
