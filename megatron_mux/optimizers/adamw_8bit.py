"""AdamW of bitsandbytes with both moments in 8 bits, on CPU and GPU.

As there, 256 neighbouring values of a tensor share a scale, and tensors of fewer than 4,096 values keep fp32 moments.
Under tensor parallelism the blocks are those of each rank's part, so moments are rounded otherwise than on one rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_mux.optimizers.blocks import BLOCK, SMALL
from megatron_mux.optimizers.optimizer import Optimizer, Options, Place, Slot, Stored

_MOMENTS = ("exp_avg", "exp_avg_sq")
_SCALE = "_scale"
"""End of the name of a moment's scales."""


class AdamW8bit(Optimizer):
    """AdamW with 8-bit moments (Dettmers et al., 2022)."""

    names = ("adamw_8bit", "adamw_bnb_8bit")
    states_per_value = None
    splits = False
    needs = "bitsandbytes"

    def __init__(self, place: Place, options: Options) -> None:
        super().__init__(place, options)
        from bitsandbytes import functional

        self._library: Any = functional
        make = self._library.create_dynamic_map
        device = place.values.device
        self._codes = [make(signed=signed).to(device) for signed in (True, False)]
        self._states = [_zeros(slot, device) for slot in place.slots]
        size = max((slot.run.last - slot.run.first for slot in place.slots), default=0)
        # What a step writes to, before it is known on the device whether it counts.
        self._values = torch.empty_like(place.values[:size])
        most = max(size, 4 * min(size, SMALL))  # of fp32 moments of small tensors
        self._next = {name: torch.empty(most, dtype=torch.uint8, device=device) for name in _MOMENTS}
        self._scales = {name: torch.empty(-(-size // BLOCK), device=device) for name in _MOMENTS}

    @classmethod
    def state_bytes(cls, shape: Sequence[int], dim: int | None, parts: int) -> float:
        """See `Optimizer.state_bytes`."""
        count = math.prod(shape) / (1 if dim is None else parts)
        return 8.0 * count if math.prod(shape) < SMALL else 2 * (count + 4 * math.ceil(count / BLOCK))

    @classmethod
    def scratch_bytes(cls, sizes: Sequence[int]) -> float:
        """See `Optimizer.scratch_bytes`."""
        count = max(sizes, default=0)
        return 4.0 * count + 2 * (max(count, min(4 * count, 4 * SMALL)) + 4 * math.ceil(count / BLOCK))

    @torch.no_grad()
    def update(self, step: int, rate: float, skip: Tensor) -> None:
        """See `Optimizer.update`."""
        skipped = skip != 0
        for slot, state in zip(self.place.slots, self._states, strict=True):
            values, gradient = slot.of(self.place.values), slot.of(self.place.gradients)
            new = self._values[: values.numel()].view(slot.shape).copy_(values)
            made = {name: self._copy(name, tensor) for name, tensor in state.items()}
            self._step(slot, new, gradient, made, step + 1, rate * slot.run.rate)
            # Selected, not scaled by zero: what is skipped may be NaN.
            torch.where(skipped, values, new, out=values)
            for name, tensor in state.items():
                torch.where(skipped, tensor, made[name], out=tensor)

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        """A copy of a state in the buffer that is there for it."""
        if name.endswith(_SCALE):
            return self._scales[name.removesuffix(_SCALE)][: tensor.numel()].copy_(tensor)
        return self._next[name][: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def _step(
        self,
        slot: Slot,
        values: Tensor,
        gradient: Tensor,
        state: Mapping[str, Tensor],
        step: int,
        rate: float,
    ) -> None:
        """Step a parameter by the library's own operation."""
        beta1, beta2, epsilon = self.options
        first, second = (state[name] for name in _MOMENTS)
        decay = slot.run.weight_decay
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
        kept = [tensor for state in self._states for tensor in state.values()]
        return [*kept, self._values, *self._next.values(), *self._scales.values(), *self._codes]

    def state(self) -> dict[str, dict[str, Stored]]:
        """See `Optimizer.state`; of a divided parameter, scales are saved value by value, as ranks' blocks differ."""
        found: dict[str, dict[str, Stored]] = {}
        for slot, state in zip(self.place.slots, self._states, strict=True):
            p = slot.parameter
            found[p.key] = {}
            for name, tensor in state.items():
                if not name.endswith(_SCALE):
                    found[p.key][name] = Stored(tensor, p.full_shape, p.dim, p.index)
                elif slot.divided is None:
                    found[p.key][name] = Stored(tensor, tuple(tensor.shape), None, None)
                else:
                    found[p.key][name] = Stored(_each(tensor, slot.shape), p.full_shape, p.dim, p.index)
        return found

    def load(self, slot: Slot, full: Mapping[str, Tensor]) -> None:
        """See `Optimizer.load`; the same to the bit on as many tensor ranks as before, else rounded to other blocks."""
        state = self._states[self.place.slots.index(slot)]
        p = slot.parameter
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


def _zeros(slot: Slot, device: torch.device) -> dict[str, Tensor]:
    """The states of a parameter before its first step."""
    if math.prod(slot.parameter.full_shape) < SMALL:
        return {name: torch.zeros(slot.shape, device=device) for name in _MOMENTS}
    blocks = -(-math.prod(slot.shape) // BLOCK)
    codes = {name: torch.zeros(slot.shape, dtype=torch.uint8, device=device) for name in _MOMENTS}
    return codes | {name + _SCALE: torch.zeros(blocks, device=device) for name in _MOMENTS}


def _each(scales: Tensor, shape: Sequence[int]) -> Tensor:
    """The scale of each value, in the shape of the values."""
    return scales.repeat_interleave(BLOCK)[: math.prod(shape)].view(*shape)


def _blocks(each: Tensor) -> Tensor:
    """`[blocks, BLOCK]` of scales; the last block is filled with its first scale."""
    flat = each.flatten()
    missing = -len(flat) % BLOCK
    return torch.cat([flat, flat[len(flat) - len(flat) % BLOCK :][:1].expand(missing)]).view(-1, BLOCK)
