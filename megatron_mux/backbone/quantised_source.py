"""Quantised matrices from a checkpoint: read as they are stored, or quantised while they are read.

A matrix is always made of a whole Hugging Face tensor, as other programs make it, and then cut to a rank's part.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_mux.backbone.checkpoint import Checkpoint, NoWeights
from megatron_mux.errors import UserError
from megatron_mux.quantised import eight_bit, nf4
from megatron_mux.quantised.matrix import QuantisedMatrix, row_chunks
from megatron_mux.quantised.scheme import Quantisation

_FLOATS = ("F32", "BF16", "F16")
_ROUNDED = ("float32", "bfloat16", "float16")
"""Dtypes of what bitsandbytes has quantised, as it names them."""
_EVERYTHING = slice(None)


class Companion(NamedTuple):
    """A stored tensor that a quantised weight consists of.

    Attributes:
        dtypes: It may have.
        sizes: Shapes it may have; empty: any.
        optional: Whether it may be missing.
    """

    dtypes: tuple[str, ...]
    sizes: tuple[tuple[int, ...], ...]
    optional: bool = False


def stored_tensors(quantisation: Quantisation, name: str, size: tuple[int, int]) -> dict[str, Companion]:
    """The tensors that a checkpoint stores for a quantised weight, the codes first.

    Args:
        name: Full Hugging Face name of the weight.
        size: Its output and input features.
    """
    (rows, columns), module = size, name.removesuffix("weight")
    code = "I8" if quantisation.method == "int8" else "F8_E4M3"
    codes, scales = Companion((code,), (size,)), Companion(_FLOATS, _scale_sizes(quantisation, size))
    if quantisation.origin == "compressed-tensors":
        further = {
            f"{module}{leaf}": Companion((*_FLOATS, "I8", "F8_E4M3"), (), optional=True)
            for leaf in ("weight_zero_point", "input_scale", "input_zero_point", "weight_g_idx")
        }
        scale = {f"{module}weight_scale": scales}
        if quantisation.packed:
            words = Companion(("I32",), ((rows, -(-columns // 4)),))
            shape = Companion(("I64", "I32"), ((2,),))
            return {f"{name}_packed": words, **scale, f"{name}_shape": shape, **further}
        return {name: codes, **scale, **further}
    if quantisation.origin == "torchao":
        zero = Companion(("I8", "I32", *_FLOATS), (), optional=True)
        return {
            f"{module}_weight_qdata": codes,
            f"{module}_weight_scale": scales,
            f"{module}_weight_zero_point": zero,
        }
    if quantisation.origin == "fp8":
        return {name: codes, f"{name}_scale_inv": scales}
    blocks = rows * columns // nf4.BLOCK
    nested = {
        f"{name}.nested_absmax": Companion(("F32",), ((-(-blocks // nf4.NESTED_BLOCK),),)),
        f"{name}.nested_quant_map": Companion(("F32",), ((256,),)),
    }
    return {
        name: Companion(("U8",), ((rows * columns // 2, 1),)),
        f"{name}.absmax": Companion(("U8" if quantisation.double else "F32",), ((blocks,),)),
        f"{name}.quant_map": Companion(("F32",), ((16,),)),
        f"{name}.quant_state.bitsandbytes__nf4": Companion(("U8",), ()),
        **(nested if quantisation.double else {}),
    }


def _scale_sizes(quantisation: Quantisation, size: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
    """Shapes of the scales of 8-bit codes."""
    rows, columns = quantisation.block
    if not rows:
        return ((1,), (1, 1))
    found = (-(-size[0] // rows), -(-size[1] // columns) if columns else 1)
    return (found, found[:1]) if found[1] == 1 else (found,)


@dataclass(frozen=True)
class QuantisedSource:
    """Where quantised matrices come from.

    Attributes:
        stored: Stored name of each tensor.
        quantisation: How matrices are held.
        dtype: The backbone's: weights are rounded to it before they are quantised on load.
        on_gpu: Whether the backbone computes on a GPU.
        device: Where weights are quantised on load. It changes no bit of them.
    """

    checkpoint: Checkpoint | NoWeights
    stored: dict[str, str]
    quantisation: Quantisation
    dtype: torch.dtype
    on_gpu: bool
    device: torch.device = torch.device("cpu")  # noqa: RUF009  (immutable)

    def matrix(self, name: str, size: tuple[int, int], transposed: bool) -> QuantisedMatrix:
        """A whole weight: on the CPU, or on `device` if it is quantised here.

        Args:
            size: Its output and input features.
            transposed: Whether an unquantised checkpoint stores it `[in, out]`.

        Raises:
            UserError: It cannot be read, or is in a variant of its format that is not supported.
        """
        quantisation = self.quantisation
        if isinstance(self.checkpoint, NoWeights):
            return quantisation.empty(*size, [size])
        if quantisation.is_made:
            chunks = self._chunks(self.checkpoint, name, size, transposed)
            if quantisation.method == "nf4":
                return nf4.quantise(chunks, quantisation.double, self.on_gpu)
            return eight_bit.quantise(chunks, quantisation.method)
        if quantisation.method == "nf4":
            return self._nf4(self.checkpoint, name, size)
        return self._eight_bit(self.checkpoint, name, size)

    def _chunks(
        self, checkpoint: Checkpoint, name: str, size: tuple[int, int], transposed: bool
    ) -> Iterator[Tensor]:
        for rows in row_chunks(*size):
            part = slice(rows.start, rows.stop)
            read = (_EVERYTHING, part) if transposed else (part, None)
            values = checkpoint.read(self.stored[name], *read).to(self.device).to(self.dtype)
            yield values.t().contiguous() if transposed else values

    def _nf4(self, checkpoint: Checkpoint, name: str, size: tuple[int, int]) -> QuantisedMatrix:
        def read(leaf: str = "") -> Tensor:
            return checkpoint.read(self.stored[f"{name}{leaf}"], _EVERYTHING)

        state = json.loads(bytes(read(".quant_state.bitsandbytes__nf4").tolist()))
        known = {"quant_type": ("nf4",), "blocksize": (nf4.BLOCK,), "shape": (list(size),), "dtype": _ROUNDED}
        known |= {"nested_blocksize": (nf4.NESTED_BLOCK,)} if self.quantisation.double else {}
        for field, values in known.items():
            if state.get(field) not in values:
                supported = " or ".join(map(str, values))
                raise UserError(
                    f"{checkpoint.path} stores {name} with {field} = {state.get(field)}: supported is {supported}."
                )
        codes, absmax = read().view(size[0], -1), read(".absmax").view(size[0], -1)
        rounded_to = getattr(torch, state["dtype"])
        if not self.quantisation.double:
            matrix = nf4.Nf4Matrix.of(codes, absmax, rounded_to=rounded_to)
        else:
            offset = torch.tensor(state["nested_offset"], dtype=torch.float32)
            matrix = nf4.Nf4Matrix.of(codes, absmax, read(".nested_absmax"), offset, rounded_to)
            matrix.shared["nested_codebook"] = read(".nested_quant_map")
        matrix.shared["codebook"] = read(".quant_map")
        return matrix

    def _eight_bit(self, checkpoint: Checkpoint, name: str, size: tuple[int, int]) -> QuantisedMatrix:
        method = self.quantisation.method
        assert method != "nf4"
        codes_name, scale_name, *further = stored_tensors(self.quantisation, name, size)
        for other in further:
            is_read = other.endswith("weight_zero_point") and other in self.stored
            if is_read and checkpoint.read(self.stored[other], _EVERYTHING).float().any():
                raise UserError(
                    f"{checkpoint.path} stores {other} other than zero: supported are weights that are quantised "
                    "symmetrically."
                )
        codes = checkpoint.read(self.stored[codes_name], _EVERYTHING).view(torch.uint8)
        if self.quantisation.packed:
            codes = codes[:, : size[1]].contiguous() ^ 128
        stored = checkpoint.read(self.stored[scale_name], _EVERYTHING).float()
        block = self.quantisation.block[0] or size[0]
        scales = stored.reshape(max(1, -(-size[0] // block)), -1)
        if block > 1:
            scales = scales.repeat_interleave(block, dim=0)[: size[0]]
        return eight_bit.EightBitMatrix.of(codes, scales.contiguous(), method)
