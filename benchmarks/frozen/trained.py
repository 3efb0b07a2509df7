"""Compare what two commits left of the same runs: tensors, losses, keys of metrics, files of saves."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

_PASSING = ("cache", "tls", "server")  # directories that are not of a run
_TENSORS = "*/**/checkpoint-*/adapter_model.safetensors"


def _files(root: Path, pattern: str) -> set[str]:
    found = {path.relative_to(root) for path in root.glob(pattern)}
    return {str(path) for path in found if path.parts[0] not in _PASSING}


def losses_apart(old: Path, new: Path, left_out: Collection[str]) -> float:
    """The largest relative difference of a loss, of training or evaluation, in any step of two directories of runs."""
    apart = 0.0
    for name in sorted(_files(old, "**/metrics.jsonl") & _files(new, "**/metrics.jsonl")):
        if Path(name).parent.name not in left_out:
            sides = [[json.loads(line) for line in (root / name).open()] for root in (old, new)]
            for before, after in zip(*sides, strict=True):
                pairs = [(before[key], after[key]) for key in ("loss", "eval_loss") if key in before]
                apart = max([apart, *(abs(a - b) / max(abs(a), 1e-12) for a, b in pairs)])
    return apart


def layouts_apart(old: Path, new: Path) -> list[str]:
    """A line for each file that one commit alone left, and for each metrics file whose lines have other keys."""
    sides = [_files(root, "**/*") for root in (old, new)]
    found = [f"{name}: left by one commit only" for name in sorted(sides[0] ^ sides[1])]
    for name in sorted(name for name in sides[0] & sides[1] if name.endswith("metrics.jsonl")):
        keys = [[sorted(json.loads(line)) for line in (root / name).open()] for root in (old, new)]
        if keys[0] != keys[1]:
            changed = {key for line in keys[0] for key in line} ^ {key for line in keys[1] for key in line}
            found.append(
                f"{name}: {len(keys[0])} and {len(keys[1])} lines; keys of one side: {sorted(changed)}"
            )
    return found


def tensors_apart(
    old: Path, new: Path, within: float = 0.0, left_out: Collection[str] = ()
) -> tuple[int, list[str], float]:
    """Compare the checkpoints of two directories of runs.

    Args:
        old, new: The directories.
        within: How far tensors may be apart, relative to their norm.
        left_out: Tasks that are not compared.

    Returns:
        The number of tensors, a line per difference, and how far tensors are apart at most.
    """
    import torch
    from safetensors.torch import load_file

    files = [
        {name for name in _files(root, _TENSORS) if Path(name).parts[-3] not in left_out}
        for root in (old, new)
    ]
    found = [f"{name}: written by one commit only" for name in sorted(files[0] ^ files[1])]
    compared, most = 0, 0.0
    for name in sorted(files[0] & files[1]):
        before, after = load_file(old / name), load_file(new / name)
        if before.keys() != after.keys():
            found.append(f"{name}: different tensors: {sorted(before.keys() ^ after.keys())[:3]}")
        for key in sorted(before.keys() & after.keys()):
            compared += 1
            if before[key].dtype != after[key].dtype or before[key].shape != after[key].shape:
                found.append(f"{name}: {key} has another dtype or shape")
            elif not torch.equal(before[key], after[key]):
                apart = float((before[key] - after[key]).norm() / before[key].norm().clamp(min=1e-30))
                most = max(most, apart)
                if apart > within:
                    found.append(f"{name}: {key} differs by {apart:.1e}")
    return compared, found, most
