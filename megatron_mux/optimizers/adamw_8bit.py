"""AdamW of bitsandbytes with both moments in 8 bits, on CPU and GPU.

As there, 256 neighbouring values of a tensor share a scale, and tensors of fewer than 4,096 values keep fp32 moments.
Under tensor parallelism the blocks are those of each rank's part, so moments are rounded otherwise than on one rank.
Neighbouring tensors of whole blocks are stepped as one, in pieces of bounded size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_mux.optimizers.blocks import BLOCK, SMALL
from megatron_mux.optimizers.optimizer import Optimizer, Options, ParamGroup, ParamLayout, ParamSlice, Stored

_MOMENTS = ("exp_avg", "exp_avg_sq")
_SCALE = "_scale"
"""End of the name of a moment's scales."""
_AT_ONCE = 1 << 20
"""Values that are stepped together, and bytes of a moment: bounds the buffers."""


@dataclass(frozen=True)
class _Span:
    """Neighbouring values of the flat parameters that one call steps.

    Attributes:
        group: Where they are and how they are stepped.
        state: Views of their moments, and of the scales of 8-bit ones, by name.
    """

    group: ParamGroup
    state: dict[str, Tensor]


class AdamW8bit(Optimizer):
    """AdamW with 8-bit moments (Dettmers et al., 2022)."""

    names = ("adamw_8bit", "adamw_bnb_8bit")
    states_per_value = None
    splits = False
    needs = "bitsandbytes"
    launches, traffic, at_once = 11, 50, _AT_ONCE

    def __init__(self, layout: ParamLayout, options: Options) -> None:
        super().__init__(layout, options)
        from bitsandbytes import functional

        self._library: Any = functional
        make = self._library.create_dynamic_map
        device = layout.values.device
        self._codes = [make(signed=signed).to(device) for signed in (True, False)]
        total = sum(math.prod(param.shape) for param in layout.slices)
        size = min(_AT_ONCE, total)
        # What a step writes to, before it is known on the device whether it counts.
        self._values = torch.empty_like(layout.values[:size])
        most = min(_AT_ONCE, 4 * total)  # of fp32 moments of small tensors
        self._next = {name: torch.empty(most, dtype=torch.uint8, device=device) for name in _MOMENTS}
        self._scales = {name: torch.empty(-(-size // BLOCK), device=device) for name in _MOMENTS}
        self._flats: list[Tensor] = []
        self._states: dict[str, dict[str, Tensor]] = {}
        self._spans = [span for group in _groups(layout.slices) for span in self._allocate(group)]

    def _allocate(self, slices: Sequence[ParamSlice]) -> Iterator[_Span]:
        """Make the states of neighbouring parameters, and yield the spans that a step takes."""
        device, first, group = self.layout.values.device, slices[0].group.first, slices[0].group
        count = slices[-1].group.last - first
        flats = _zeros(count, _is_small(slices[0]), device)
        self._flats += flats.values()
        for param in slices:
            rows = slice(param.group.first - first, param.group.last - first)
            views = {name: _part(name, flat, rows) for name, flat in flats.items()}
            self._states[param.parameter.key] = {
                name: view if name.endswith(_SCALE) else view.view(param.shape)
                for name, view in views.items()
            }
        step = _AT_ONCE // 4 if _is_small(slices[0]) else _AT_ONCE
        for at in range(0, count, step):
            rows = slice(at, min(count, at + step))
            state = {name: _part(name, flat, rows) for name, flat in flats.items()}
            yield _Span(group._replace(first=first + rows.start, last=first + rows.stop), state)

    @torch.no_grad()
    def update(self, step: int, rate: float, skip: Tensor) -> None:
        """See `Optimizer.update`."""
        skipped = skip != 0
        for span in self._spans:
            rows = slice(span.group.first, span.group.last)
            values, gradient = self.layout.values[rows], self.layout.gradients[rows]
            new = self._values[: values.numel()].copy_(values)
            made = {name: self._copy(name, tensor) for name, tensor in span.state.items()}
            self._step(span.group, new, gradient, made, step + 1, rate * span.group.rate)
            # Selected, not scaled by zero: what is skipped may be NaN.
            torch.where(skipped, values, new, out=values)
            for name, tensor in span.state.items():
                torch.where(skipped, tensor, made[name], out=tensor)

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        """A copy of a state in the buffer that is there for it."""
        if name.endswith(_SCALE):
            return self._scales[name.removesuffix(_SCALE)][: tensor.numel()].copy_(tensor)
        return self._next[name][: tensor.nbytes].view(tensor.dtype).copy_(tensor)

    def _step(
        self,
        group: ParamGroup,
        values: Tensor,
        gradient: Tensor,
        state: Mapping[str, Tensor],
        step: int,
        rate: float,
    ) -> None:
        """Step values by the library's own operation."""
        beta1, beta2, epsilon = self.options
        first, second = (state[name] for name in _MOMENTS)
        decay = group.weight_decay
        if first.dtype != torch.uint8:
            self._library.optimizer_update_32bit(
                "adam", gradient, values, first, beta1, epsilon, step, rate, second, beta2, weight_decay=decay
            )
            return
        scales = [state[name + _SCALE] for name in _MOMENTS]
        self._library.optimizer_update_8bit_blockwise(
            "adam", gradient, values, first, second, beta1, beta2, 0.0, 0.0, epsilon, step, rate,
            *self._codes, *scales, decay,
        )  # fmt: skip

    @property
    def tensors(self) -> list[Tensor]:
        """See `Optimizer.tensors`."""
        return [*self._flats, self._values, *self._next.values(), *self._scales.values(), *self._codes]

    def state(self) -> dict[str, dict[str, Stored]]:
        """See `Optimizer.state`; of a divided parameter, scales are saved value by value, as ranks' blocks differ."""
        found: dict[str, dict[str, Stored]] = {}
        for param in self.layout.slices:
            p = param.parameter
            found[p.key] = {}
            for name, tensor in self._states[p.key].items():
                if not name.endswith(_SCALE):
                    found[p.key][name] = Stored(tensor, p.full_shape, p.dim, p.index)
                elif param.divided is None:
                    found[p.key][name] = Stored(tensor, tuple(tensor.shape), None, None)
                else:
                    found[p.key][name] = Stored(_each(tensor, param.shape), p.full_shape, p.dim, p.index)
        return found

    def load(self, param: ParamSlice, full: Mapping[str, Tensor]) -> None:
        """See `Optimizer.load`; the same to the bit on as many tensor ranks as before, else rounded to other blocks."""
        p = param.parameter
        state = self._states[p.key]
        for name, code in zip(_MOMENTS, self._codes, strict=True):
            own = p.slice_of(full[name])
            if own.dtype != state[name].dtype:
                raise ValueError(f"{p.key}: its {name} is {own.dtype}, not {state[name].dtype}")
            if own.dtype != torch.uint8:
                state[name].copy_(own)
                continue
            scale = full[name + _SCALE]
            each = p.slice_of(scale if scale.shape == p.full_shape else _each(scale, p.full_shape))
            blocks = _blocks(each)
            if torch.equal(blocks.amin(dim=1), blocks.amax(dim=1)):
                state[name].copy_(own)
                state[name + _SCALE].copy_(blocks[:, 0])
            else:
                values = code.cpu()[own.int()] * each
                codes, found = self._library.quantize_blockwise(values, code.cpu(), blocksize=BLOCK)
                state[name].copy_(codes)
                state[name + _SCALE].copy_(found.absmax)


def _is_small(param: ParamSlice) -> bool:
    """Whether the library keeps a parameter's moments in fp32."""
    return math.prod(param.parameter.full_shape) < SMALL


def _groups(slices: Sequence[ParamSlice]) -> Iterator[list[ParamSlice]]:
    """Parameters that lie side by side and can be stepped as one: no block has values of two of them."""
    group: list[ParamSlice] = []
    for param in sorted(slices, key=lambda param: param.group.first):
        if group:
            before, own = group[-1], param.group
            size = before.group.last - before.group.first
            joins = before.group.last == own.first and before.group[2:] == own[2:]
            if not joins or _is_small(before) != _is_small(param) or (not _is_small(param) and size % BLOCK):
                yield group
                group = []
        group.append(param)
    if group:
        yield group


def _zeros(count: int, small: bool, device: torch.device) -> dict[str, Tensor]:
    """The states of so many neighbouring values before their first step."""
    if small:
        return {name: torch.zeros(count, device=device) for name in _MOMENTS}
    codes = {name: torch.zeros(count, dtype=torch.uint8, device=device) for name in _MOMENTS}
    return codes | {name + _SCALE: torch.zeros(-(-count // BLOCK), device=device) for name in _MOMENTS}


def _part(name: str, flat: Tensor, rows: slice) -> Tensor:
    """The states, or the scales, of some of the values; these begin with a block."""
    return flat[rows.start // BLOCK : -(-rows.stop // BLOCK)] if name.endswith(_SCALE) else flat[rows]


def _each(scales: Tensor, shape: Sequence[int]) -> Tensor:
    """The scale of each value, in the shape of the values."""
    return scales.repeat_interleave(BLOCK)[: math.prod(shape)].view(*shape)


def _blocks(each: Tensor) -> Tensor:
    """`[blocks, BLOCK]` of scales; the last block is filled with its first scale."""
    flat = each.flatten()
    missing = -len(flat) % BLOCK
    return torch.cat([flat, flat[len(flat) - len(flat) % BLOCK :][:1].expand(missing)]).view(-1, BLOCK)
