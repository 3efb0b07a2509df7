"""The input of a memory estimate."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_mux.errors import UserError
from megatron_mux.memory.caching.settings import Settings
from megatron_mux.memory.sizes import MIB, show_size
from megatron_mux.memory.tensors import Skeleton
from megatron_mux.memory.trace.case import Options
from megatron_mux.memory.trace.tracer import Tracer

MAX_LENGTH = 1 << 24
MAX_GPUS = 1 << 16
MIN_MEMORY = 64 * MIB
"""Less means that a unit was forgotten."""

OFFLOAD = "offload"
"""Selected if nothing fits unless part of the model is in host memory."""


@dataclass(frozen=True)
class Question:
    """A model, the GPUs and how it is trained.

    Attributes:
        batch: Sequences of a micro-batch on each GPU; None for as many as fit.
        options: Options of a traced training.
        settings: Options of the caching allocator, for traces.
        tracer: Traces steps in a process of its own.
    """

    skeleton: Skeleton
    gpus: int
    gpu_memory: int
    length: int
    batch: int | None = None
    options: Options = field(default_factory=Options)
    settings: Settings = field(default_factory=Settings)
    tracer: Tracer = field(default_factory=Tracer, compare=False)

    def check(self) -> None:
        """Refuse sizes that no model or machine has.

        Raises:
            UserError: Lists all problems.
        """
        problems = []
        positions = self.skeleton.tensors.positions
        if positions is not None and self.length > positions:
            problems.append(
                f"--sequence-length {self.length}: is more than the {positions} positions of {self.skeleton.path}"
            )
        elif self.length > MAX_LENGTH:
            problems.append(f"--sequence-length {self.length}: must be at most {MAX_LENGTH}")
        if self.gpu_memory < MIN_MEMORY:
            problems.append(
                f"--gpu-memory: {show_size(self.gpu_memory)} is no GPU's: give a unit, such as 80GiB"
            )
        if self.gpus > MAX_GPUS:
            problems.append(f"--gpus {self.gpus}: must be at most {MAX_GPUS}")
        if self.batch is not None and self.batch > MAX_LENGTH:
            problems.append(f"--batch-size {self.batch}: must be at most {MAX_LENGTH}")
        if problems:
            raise UserError(*problems)
