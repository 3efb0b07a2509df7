"""Rotary embedding by each token's position: its settings in a config.json, and the angles.

Shapes: T tokens, D rotated features of a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_mux.backbone.config import layer_types, refuse
from megatron_mux.batch.packed_batch import PackedBatch
from megatron_mux.kernels.attention.segments import Segment
from megatron_mux.shape import BackboneShape, Rope

Angles = tuple[Tensor, Tensor]
"""Cosine and sine `[T, 1, D / 2]` of each token's angles."""


_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "longrope": ("factor", "attention_factor"),
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}
_COMMON = ("rope_theta", "rope_type", "type", "partial_rotary_factor", "original_max_position_embeddings")
_LISTS = frozenset({"short_factor", "long_factor"})
_OR_ZERO = frozenset({"mscale", "mscale_all_dim", "beta_fast", "beta_slow"})
"""Zero leaves these out."""


def ropes_by_layer(full: Mapping[str, Any], head_dim: int, layers: int, partial: bool) -> tuple[Rope, ...]:
    """The rotary embedding of each layer, from `rope_parameters`: one for all, or one for each of `layer_types`.

    Args:
        partial: Whether the family can rotate a part of a head's features only.
    """
    found = full.get("rope_parameters") or {}
    if "full_attention" not in found:
        return (_rope(found, full, head_dim, partial),) * layers
    types = layer_types(full, layers)
    ropes = {kind: _rope(found.get(kind) or {}, full, head_dim, partial) for kind in set(types)}
    return tuple(ropes[kind] for kind in types)


def _rope(found: Mapping[str, Any], full: Mapping[str, Any], head_dim: int, partial: bool) -> Rope:
    field, kind = "rope_parameters", found.get("rope_type", found.get("type", "default"))
    share = found.get("partial_rotary_factor") or full.get("partial_rotary_factor") or 1.0
    width = _rotated_width(share, head_dim, partial)
    keys = _KEYS.get(kind) if isinstance(kind, str) else None
    if keys is None:
        refuse(field, found, f"rope_type {', '.join(_KEYS)}")
    optional = [name for name in _OPTIONAL.get(kind, ()) if found.get(name) is not None]
    extra = sorted(
        name for name in found if name not in {*_COMMON, *keys, *optional} and found[name] is not None
    )
    missing = [name for name in keys if found.get(name) is None]
    if extra or missing:
        said = f"{', '.join(extra)} unknown" if extra else f"{', '.join(missing)} missing"
        refuse(field, found, f"for rope_type {kind}: {', '.join(keys) or 'rope_theta alone'} ({said})")
    values = {
        "rope_theta": found.get("rope_theta", 10000.0),
        **{name: found[name] for name in (*keys, *optional)},
    }
    wrong = [name for name, value in values.items() if not _is_valid(name, value, width // 2)]
    if wrong:
        several = f", {width // 2} of them for " if _LISTS & set(wrong) else " for "
        refuse(field, found, f"a positive number{several}{', '.join(values)}")
    values |= {name: tuple(map(float, values[name])) for name in _LISTS & values.keys()}
    if kind == "longrope":
        values = _with_attention_factor(values, full)
    elif kind == "yarn":
        values = _with_yarn_factor(values)
    theta = float(values.pop("rope_theta"))
    return Rope(theta, kind, partial_rotary_factor=float(share), **values)


def _rotated_width(share: Any, head_dim: int, partial: bool) -> int:
    """How many features of a head are rotated, an even number."""
    if not partial and share != 1.0:
        refuse("partial_rotary_factor", share, "1.0")
    if type(share) not in (int, float) or not 0 < share <= 1 or int(head_dim * share) % 2:
        refuse("partial_rotary_factor", share, f"a part of head_dim {head_dim} that is an even number")
    return int(head_dim * share)


def _is_valid(name: str, value: Any, count: int) -> bool:
    numbers = value if name in _LISTS else [value]
    if name == "truncate":
        return isinstance(value, bool)
    if not isinstance(numbers, (list, tuple)) or (name in _LISTS and len(numbers) != count):
        return False
    return all(
        type(number) in (int, float) and (number > 0 or (number == 0 and name in _OR_ZERO))
        for number in numbers
    )


def _with_attention_factor(values: Mapping[str, Any], full: Mapping[str, Any]) -> dict[str, Any]:
    """LongRoPE's factor on cosines and sines, by how much longer sequences have become, where none is given."""
    original = values["original_max_position_embeddings"]
    times = values.get("factor", full["max_position_embeddings"] / original)
    default = math.sqrt(1 + math.log(times) / math.log(original)) if times > 1 else 1.0
    found = {name: value for name, value in values.items() if name != "factor"}
    return {"attention_factor": default, **found}


def mscale(factor: float, weight: float = 1.0) -> float:
    """YaRN's factor on queries and keys where sequences have become `factor` times longer."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _with_yarn_factor(values: Mapping[str, Any]) -> dict[str, Any]:
    """YaRN's fields of `Rope`; its factor on cosines and sines follows from the others where none is given."""
    factor, each, all_dims = values["factor"], values.get("mscale"), values.get("mscale_all_dim")
    default = mscale(factor, each) / mscale(factor, all_dims) if each and all_dims else mscale(factor)
    found = {name: value for name, value in values.items() if name not in _OR_ZERO}
    found |= {name: float(values[name]) for name in ("beta_fast", "beta_slow") if values.get(name)}
    return {"attention_factor": default, **found}


class Rotary:
    """One rotary embedding on a device."""

    def __init__(self, rope: Rope, head_dim: int, device: torch.device) -> None:
        self.rope = rope
        self._frequencies = inverse_frequencies(rope, head_dim).to(device)
        self._long = (
            inverse_frequencies(rope, head_dim, long=True).to(device)
            if rope.rope_type == "longrope"
            else None
        )

    def angles(self, positions: Tensor, segments: Sequence[Segment], dtype: torch.dtype) -> Angles:
        """The angles of a micro-batch's tokens, computed in fp32.

        Args:
            positions: `[T]` int64.
            segments: The sequences, in row order: `longrope` depends on the length of each.
        """
        angles = (positions.float().unsqueeze(1) * self._of_rows(segments, positions.shape[0])).unsqueeze(1)
        cos, sin = angles.cos(), angles.sin()
        if self.rope.attention_factor != 1.0:
            cos, sin = cos * self.rope.attention_factor, sin * self.rope.attention_factor
        return cos.to(dtype), sin.to(dtype)

    def _of_rows(self, segments: Sequence[Segment], rows: int) -> Tensor:
        """Frequencies that broadcast against `[T, D / 2]`."""
        if self._long is None:
            return self._frequencies
        is_long = [segment.positions > self.rope.original_max_position_embeddings for segment in segments]
        if not any(is_long):
            return self._frequencies
        if all(is_long):
            return self._long
        ends = [*(segment.start for segment in segments[1:]), rows]  # padding goes with the last
        found = [
            (self._long if long else self._frequencies).expand(end - segment.start, -1)
            for segment, long, end in zip(segments, is_long, ends, strict=True)
        ]
        return torch.cat(found)


class StageRotary:
    """The rotary embeddings of a stage's layers, of which those with equal settings share one."""

    def __init__(self, shape: BackboneShape, layers: range, dtype: torch.dtype, device: torch.device) -> None:
        wide = shape.latent is not None and shape.latent.wide_rotation
        self._dtype = torch.promote_types(dtype, torch.float32) if wide else dtype
        self._ropes = shape.ropes[layers.start : layers.stop]
        self._rotaries = {
            rope: Rotary(rope, shape.rotary_width, device) for rope in dict.fromkeys(self._ropes) if rope
        }

    def angles(self, batch: PackedBatch) -> list[Angles | None]:
        """The angles of a micro-batch's tokens for each layer; None for learned positions."""
        found = {
            rope: rotary.angles(batch.positions, batch.segments, self._dtype)
            for rope, rotary in self._rotaries.items()
        }
        return [found[rope] if rope else None for rope in self._ropes]


def inverse_frequencies(rope: Rope, head_dim: int, long: bool = False) -> Tensor:
    """`[D / 2]` fp32, computed as transformers does, operation by operation, so that angles agree to the last bit.

    Args:
        long: For `longrope`: of sequences beyond the original positions.
    """
    width = int(head_dim * rope.partial_rotary_factor)
    exponents = torch.arange(0, width, 2, dtype=torch.int64).float() / width
    if rope.rope_type == "longrope":
        factors = torch.tensor(rope.long_factor if long else rope.short_factor, dtype=torch.float32)
        return 1.0 / (factors * rope.rope_theta**exponents)
    frequencies = 1.0 / (rope.rope_theta**exponents)
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(rope, frequencies)
    if rope.rope_type == "yarn":
        return _yarn(rope, rope.rope_theta**exponents, width)
    return frequencies


def _llama3(rope: Rope, frequencies: Tensor) -> Tensor:
    """Stretch long wavelengths, keep short ones, interpolate between (Llama 3.1)."""
    wavelengths = 2 * math.pi / frequencies
    longest = rope.original_max_position_embeddings / rope.low_freq_factor
    shortest = rope.original_max_position_embeddings / rope.high_freq_factor
    stretched = torch.where(wavelengths > longest, frequencies / rope.factor, frequencies)
    share = (rope.original_max_position_embeddings / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - share) * stretched / rope.factor + share * stretched
    medium = (wavelengths >= shortest) & (wavelengths <= longest)
    return torch.where(medium, between, stretched)


def _yarn(rope: Rope, wavelengths: Tensor, width: int) -> Tensor:
    """Keep wavelengths that turn often within the original length, stretch those that hardly turn (YaRN)."""

    def feature(turns: float) -> float:
        length = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return (width * math.log(length)) / (2 * math.log(rope.rope_theta))

    low, high = feature(rope.beta_fast), feature(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    share = 1 - ((torch.arange(width // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (rope.factor * wavelengths) * (1 - share) + 1.0 / wavelengths * share
