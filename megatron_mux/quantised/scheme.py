"""How a backbone's weights are quantised: by which format, which modules, and how many bytes that takes.

Read from `quantization_config` of config.json, or asked for by `--mux-backbone-dtype`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from megatron_mux.errors import UserError
from megatron_mux.quantised.eight_bit import EightBitMatrix
from megatron_mux.quantised.matrix import QuantisedMatrix
from megatron_mux.quantised.nf4 import BLOCK, NESTED_BLOCK, Nf4Matrix

QuantMethod = Literal["nf4", "int8", "fp8"]
METHODS: tuple[QuantMethod, ...] = ("nf4", "int8", "fp8")

Origin = Literal["made on load", "bitsandbytes", "compressed-tensors", "torchao", "fp8"]
"""`made on load`, or the `quant_method` of the checkpoint."""

_NAMES: dict[QuantMethod, str] = {"nf4": "NF4", "int8": "INT8", "fp8": "FP8"}


@dataclass(frozen=True)
class Quantisation:
    """How the weights of a backbone's linear modules are quantised; everything else stays as it is.

    Attributes:
        origin: Who quantised them.
        double: Whether the scales of NF4 are quantised, too.
        block: For 8 bits, rows and columns that share a scale; 0: all of them.
        skipped: Patterns of the full Hugging Face names of modules that are not quantised.
        targets: Patterns of those that are; empty: all linear modules.
        experts: Whether routed experts are quantised.
        packed: Whether the checkpoint has four 8-bit codes in each word, 128 added to them.
    """

    method: QuantMethod
    origin: Origin = "made on load"
    double: bool = True
    block: tuple[int, int] = (1, 0)
    skipped: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    experts: bool = False
    packed: bool = False

    def __str__(self) -> str:
        double = " with double quantisation" if self.method == "nf4" and self.double else ""
        return f"{_NAMES[self.method]}{double}, {self.origin if self.is_made else f'by {self.origin}'}"

    @property
    def is_made(self) -> bool:
        """Whether it is made on load."""
        return self.origin == "made on load"

    @property
    def flags(self) -> list[str]:
        """Flags of a run that ask for it; none if the checkpoint is stored so."""
        return ["--mux-backbone-dtype", self.method] if self.is_made else []

    def covers(self, module: str, expert: bool = False) -> bool:
        """Whether a linear module within a layer is quantised.

        Args:
            expert: Whether it belongs to a routed expert.
        """
        if expert and not self.experts:
            return False
        if self.targets and not any(self._matches(pattern, module) for pattern in self.targets):
            return False
        return not any(self._matches(pattern, module) for pattern in self.skipped)

    def _matches(self, pattern: str, module: str) -> bool:
        """Whether a pattern means a module, as the library that wrote it reads it."""
        if self.origin == "compressed-tensors":
            if pattern.startswith("re:"):
                return re.match(pattern[3:], module) is not None
            return pattern in (module, "Linear")
        # transformers: a beginning up to the end of a name, or any end.
        return module.endswith(pattern) or re.match(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))", module) is not None

    @property
    def granularity(self) -> int:
        """Columns that cannot be divided among tensor ranks."""
        return BLOCK if self.method == "nf4" else max(1, self.block[1])

    def problem(self, module: str, columns: int, parts: int) -> str | None:
        """What keeps a module's columns from being quantised so and divided among tensor ranks; None: nothing.

        Args:
            module: Its name, for the message.
            columns: Its input features.
            parts: Tensor ranks that divide them.
        """
        unit = self.granularity
        if columns % unit:
            return (
                f"{module} has {columns} input features, no multiple of {unit}, the values that share a scale"
            )
        if parts > 1 and (columns // parts) % unit:
            return (
                f"{parts} tensor ranks have {columns // parts} of the {columns} input features of {module} each, no "
                f"multiple of {unit}, the values that share a scale"
            )
        return None

    def empty(self, rows: int, columns: int, sources: list[tuple[int, int]]) -> QuantisedMatrix:
        """A matrix whose contents are undefined.

        Args:
            sources: Sizes of the Hugging Face tensors that it has rows of.
        """
        if self.method == "nf4":
            return Nf4Matrix.empty(rows, columns, [n * k // BLOCK for n, k in sources], self.double)
        blocks = columns // self.block[1] if self.block[1] else 1
        return EightBitMatrix.empty(rows, columns, blocks, self.method)

    def nbytes(self, rows: int, columns: int, sources: list[tuple[int, int]]) -> int:
        """Bytes of such a matrix."""
        if self.method != "nf4":
            return rows * columns + 4 * rows * (columns // self.block[1] if self.block[1] else 1)
        scales = rows * columns // BLOCK
        own = rows * columns // 2 + (scales + 4 * rows if self.double else 4 * scales)
        return own + self._shared_nbytes(sources)

    def undivided_nbytes(self, rows: int, sources: list[tuple[int, int]], by_columns: bool) -> int:
        """Bytes of such a matrix that every tensor rank has, whatever its part.

        Args:
            rows: Of the matrix.
            sources: See `empty`.
            by_columns: Whether tensor ranks divide its columns: then they all have what belongs to rows.
        """
        of_rows = self.double if self.method == "nf4" else not self.block[1]
        return self._shared_nbytes(sources) + 4 * rows * (by_columns and of_rows)

    def _shared_nbytes(self, sources: list[tuple[int, int]]) -> int:
        """Bytes that all rows share: codebooks, and scales of scales."""
        if self.method != "nf4":
            return 0
        blocks = sum(-(-n * k // BLOCK // NESTED_BLOCK) for n, k in sources)
        return 4 * 16 + (8 * blocks + 4 * 256) * self.double


def agree(stored: Quantisation | None, wanted: QuantMethod | None, where: str) -> Quantisation | None:
    """The quantisation of a backbone, from that of its checkpoint and from what a user asks for.

    Args:
        wanted: What is asked for; None: as stored.
        where: The checkpoint, for the message.

    Raises:
        UserError: They contradict each other.
    """
    if wanted is None or (stored is not None and stored.method == wanted):
        return stored
    if stored is not None:
        raise UserError(
            f"--mux-backbone-dtype {wanted}: contradicts {where}, which is stored in {stored}: leave the flag out."
        )
    return Quantisation(wanted)
