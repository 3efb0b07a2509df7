"""Pictures of which experts are selected: a row for each layer, a column for each expert, darker for more tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megatron_mux.moe.access_profile import AccessProfile
from megatron_mux.moe.entries import Floats
from megatron_mux.pipeline.svg import LEFT, WIDTH, document, text

_ROW, _HEAD = 16, 40


def draw_heat_maps(profile: AccessProfile) -> str:
    """An SVG picture of a profile: all tasks together, then each by itself."""
    parts: list[str] = []
    maps = {"all tasks": profile.access, **(profile.by_task if len(profile.by_task) > 1 else {})}
    top = 0
    for name, access in maps.items():
        parts += _map(name, access, profile, top)
        top += _HEAD + _ROW * len(access)
    return document(parts, top + _HEAD // 2)


def _map(name: str, access: Floats, profile: AccessProfile, top: int) -> Iterator[str]:
    spread = _entropy(access)
    said = f"{name}: probability that a token selects an expert; entropy {spread:.3f} of an even choice's"
    yield f'<text x="{LEFT}" y="{top + 26}" font-weight="bold">{text(said)}</text>'
    width = WIDTH / access.shape[1]
    for row, (layer, probabilities) in enumerate(zip(profile.layer_indices, access, strict=True)):
        y = top + _HEAD + row * _ROW
        yield f'<text x="{LEFT - 6}" y="{y + 12}" text-anchor="end">layer {layer}</text>'
        for expert, probability in enumerate(probabilities):
            place = f'x="{LEFT + expert * width:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 1}"'
            told = f"<title>layer {layer}, expert {expert}: {probability:.3f}</title>"
            yield f'<rect {place} fill="#0072B2" fill-opacity="{probability:.3f}">{told}</rect>'


def _entropy(access: Floats) -> float:
    """Mean over layers of the entropy of the choice of experts, relative to an even choice's."""
    shares = access / access.sum(axis=1, keepdims=True)
    logs = np.log(np.where(shares > 0, shares, 1.0))
    most = np.log(access.shape[1]) if access.shape[1] > 1 else 1.0
    return float((-(shares * logs).sum(axis=1) / most).mean())
