"""LLMem's closed forms (Kim et al., IJCAI 2024): peak memory of mixed-precision full fine-tuning, by parallel method.

Sections 4 and 5 leave some things open. The readings taken here:

- Brackets around a quotient by the page size are ceilings: memory is taken in whole pages. Where a term is then
  divided by the number of GPUs, no page is rounded to again.
- `embed_p` is the token embedding, "large dictionary" and all; position embeddings are among `other_p`.
- `lm_p` counts in fp16, once, in `m_lm`, tied to the embedding or not: Table 1 has it beside `embed_p`, and the
  authors' program adds it for tied models, too. It is in neither `m_p` nor `m_os`, whose sums are over "the given
  transformer model". (No base memory then gives all nine choices of Table 3 at once.)
- `m_os` counts weights of Embedding and Linear modules, not their biases, which "can use space with other memory
  fragmentation".
- `e_n` is the number of Embedding modules: 1 where positions are not embedded (BLOOM, CodeGen, LLaMA), else 2.
- `o_n` is the hidden size, for every embedding and layer. OPT-350m's embedding is half as wide; its two projections
  are Linear operators like others.
- `B` of `m_lm` is by family: 4 bytes where `transformers` 4.29, which the paper used, makes logits fp32 (CodeGen,
  GPT-Neo), else 2.
- `m_p,16 * tp_n / gpu_n` of DP+TP is taken as printed. It leaves the share `1 - tp_n / gpu_n` of the fp16 parameters,
  which is `1 / tp_n` for 2DP+2TP on four GPUs but for hardly any other combination.
- Table 3's `4DP` is conventional or advanced data parallelism, whichever scores higher.
- Algorithm 1's text is followed: offload if every score is 0 (its last line looks at that of TP only), and a batch
  of 1 must fit (its loops, read to the letter, begin checking at 2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from benchmarks.papers.chunks import ChunkSearch
from benchmarks.papers.decision import Layout
from megatron_mux.errors import UserError
from megatron_mux.memory.sizes import MIB
from megatron_mux.memory.tensors import ModelTensors

LOGITS_BYTES: Mapping[str, int] = {
    "opt": 2,
    "bloom": 2,
    "codegen": 4,
    "biogpt": 2,
    "gpt_bigcode": 2,
    "gpt_neo": 4,
    "llama": 2,
}
"""Bytes of one logit while the loss is computed, for the families of the paper's section 7.1."""


@dataclass(frozen=True)
class Constants:
    """The paper's constants."""

    base_memory: int = 512 * MIB
    """`m_base`: what is in use before parameters are. The paper measures it on the GPU and does not say what it found:
    this is about what a CUDA context takes. benchmarks/llmem_tables.py tells for which values Table 3 comes out."""
    page: int = 2 * MIB
    """`cu_p`, bytes."""
    half: int = 2
    """`B_16`, bytes."""
    full: int = 4
    """`B_32`, bytes."""
    logits: Mapping[str, int] = field(default_factory=lambda: dict(LOGITS_BYTES))
    """`B` of `m_lm` by model_type, bytes."""
    chunks: ChunkSearch = field(default_factory=ChunkSearch)


class LLMem:
    """The forms for one model and sequence length.

    Args:
        model: Of one of the families of `constants.logits`.
        length: Tokens of a sequence.
        constants: The paper's constants.

    Raises:
        UserError: The model is of another family.
    """

    def __init__(self, model: ModelTensors, length: int, constants: Constants = Constants()) -> None:
        if model.model_type not in constants.logits:
            known = ", ".join(constants.logits)
            raise UserError(f"llmem: has no forms for model_type {model.model_type!r}: it knows {known}.")
        self.model = model
        self.length = length
        self.constants = constants

    def peak(self, layout: Layout, batch: int) -> int:
        """Bytes of one GPU at the peak."""
        return sum(self.breakdown(layout, batch).values())

    def breakdown(self, layout: Layout, batch: int) -> dict[str, int]:
        """Bytes of one GPU at the peak by what they are for.

        Args:
            layout: How GPUs are divided.
            batch: Sequences on each GPU.
        """
        return {
            "base": self.constants.base_memory,
            "parameters": self._parameters(layout),
            "optimizer": self.optimizer if layout.kind == "CDP" else -(-self.optimizer // layout.gpus),
            "outputs": self.outputs(batch),
            "logits": self.head(batch),
            "all_gather": self.backward_gather(batch, layout.tensor),
        }

    def _parameters(self, layout: Layout) -> int:
        """What `m_p` becomes under a layout, with gradients, which take the place of the fp16 parameters."""
        if layout.kind == "CDP":
            return self.parameters(self.constants.half + self.constants.full)
        if layout.kind == "TP":
            return -(-self.parameters(self.constants.half + self.constants.full) // layout.gpus)
        half, full = self.parameters(self.constants.half), self.parameters(self.constants.full)
        removed = half * layout.tensor // layout.gpus if layout.kind == "DP+TP" else 0
        return half - removed + -(-full // layout.gpus)

    @cached_property
    def chunk_size(self) -> int:
        """`cs`, values."""
        return self.constants.chunks.best(self._chunked)

    @cached_property
    def _chunked(self) -> list[int]:
        """Values of each parameter that lives in chunks."""
        apart = {self.model.embedding, *(tensor.name for tensor in self.model.head_tensors)}
        return [tensor.count for tensor in self.model.tensors if tensor.name not in apart]

    def parameters(self, width: int) -> int:
        """`m_p` (6 bytes a value), `m_p,16` (2) or `m_p,32` (4).

        Args:
            width: Bytes of a value.
        """
        chunks = -(-sum(self._chunked) // self.chunk_size)
        values = self.model.tensor(self.model.embedding).count + chunks * self.chunk_size
        return self._paged(values * width)

    @cached_property
    def optimizer(self) -> int:
        """`m_os`: momentum and variance."""
        apart = {tensor.name for tensor in self.model.head_tensors}
        return sum(
            self._paged(tensor.count * 2 * self.constants.full)
            for tensor in self.model.tensors
            if tensor.operator in ("Embedding", "Linear")
            and len(tensor.shape) > 1
            and tensor.name not in apart
        )

    def outputs(self, batch: int) -> int:
        """`m_out`: what gradient checkpointing keeps."""
        embeddings = sum(tensor.operator == "Embedding" for tensor in self.model.tensors)
        kept = embeddings + self.model.layers
        return self._paged(kept * self._hidden_states(batch))

    def head(self, batch: int) -> int:
        """`m_lm`: logits, their shifted copy and its loss, and the output layer."""
        row = self.model.vocabulary * self.constants.logits[self.model.model_type]
        shifted = self._paged(batch * (self.length - 1) * row)
        return self._paged(batch * self.length * row) + 2 * shifted + self._head_weights

    @cached_property
    def _head_weights(self) -> int:
        """`lm_p`, bytes."""
        return self.model.tensor(self.model.head).count * self.constants.half

    def backward_gather(self, batch: int, tensor: int) -> int:
        """`m_back^tp`: buffers into which the backward pass gathers the other GPUs' parts.

        Args:
            batch: Sequences on each GPU.
            tensor: GPUs that share each layer.
        """
        return self._paged(-(-self.model.layers * self._hidden_states(batch) * (tensor - 1) // tensor))

    def _hidden_states(self, batch: int) -> int:
        return batch * self.length * self.model.hidden * self.constants.half

    def _paged(self, count: int) -> int:
        """Bytes in whole pages."""
        return -(-count // self.constants.page) * self.constants.page
