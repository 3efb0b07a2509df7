"""LLMem's closed forms (Kim et al., IJCAI 2024): peak memory of mixed-precision full fine-tuning, by parallel method.

Sections 4 and 5 leave some points open. They are read as follows:

- Brackets around a quotient by the page size are ceilings: memory is allocated in whole pages. A term that is then
  divided by the number of GPUs is not rounded to pages again.
- `embed_p` is the token embedding (the "large dictionary"); position embeddings belong to `other_p`.
- `lm_p` is counted once, in fp16, as part of `m_lm`, whether or not it is tied to the embedding: Table 1 lists it next
  to `embed_p`, and the authors' program adds it for tied models, too. It is part of neither `m_p` nor `m_os`, whose
  sums are over "the given transformer model". (With this reading no base memory gives all nine choices of Table 3 at
  once.)
- `m_os` counts weights of Embedding and Linear modules, not their biases, which "can use space with other memory
  fragmentation".
- `e_n` is the number of Embedding modules: 1 for models without position embeddings (BLOOM, CodeGen, LLaMA), else 2.
- `o_n` is the hidden size, for every embedding and layer. OPT-350m's embedding is half as wide; its two projections
  count as Linear operators.
- `B` of `m_lm` depends on the family: 4 bytes where `transformers` 4.29, which the paper used, makes logits fp32
  (CodeGen, GPT-Neo), else 2.
- `m_p,16 * tp_n / gpu_n` of DP+TP is used as printed. It leaves the share `1 - tp_n / gpu_n` of the fp16 parameters,
  which equals `1 / tp_n` for 2DP+2TP on four GPUs, but not in general.
- Table 3's `4DP` is conventional or advanced data parallelism, whichever scores higher.
- Algorithm 1 follows the paper's text: it offloads if every score is 0 (its last line tests the score of TP only), and
  a batch of 1 must fit (its loops as printed begin at 2).
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
    """`m_base`: memory in use before the parameters are allocated. The paper does not publish the value; this
    is about the size of a CUDA context. For values that reproduce Table 3, see benchmarks/llmem_tables.py."""
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
    """The closed forms for one model and sequence length.

    Args:
        model: A model of a family in `constants.logits`.
        length: Tokens of a sequence.
        constants: The paper's constants.

    Raises:
        UserError: The model belongs to another family.
    """

    def __init__(self, model: ModelTensors, length: int, constants: Constants = Constants()) -> None:
        if model.model_type not in constants.logits:
            known = ", ".join(constants.logits)
            raise UserError(
                f"llmem: model_type {model.model_type!r} is not supported; supported are {known}."
            )
        self.model = model
        self.length = length
        self.constants = constants

    def peak(self, layout: Layout, batch: int) -> int:
        """Bytes of one GPU at the peak."""
        return sum(self.breakdown(layout, batch).values())

    def breakdown(self, layout: Layout, batch: int) -> dict[str, int]:
        """Bytes of one GPU at the peak, by kind.

        Args:
            layout: Division of the GPUs.
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
        """`m_p` under a layout. Gradients reuse the memory of the fp16 parameters."""
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
        """Values of each parameter that is stored in chunks."""
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
        """`m_out`: the outputs that gradient checkpointing keeps."""
        embeddings = sum(tensor.operator == "Embedding" for tensor in self.model.tensors)
        kept = embeddings + self.model.layers
        return self._paged(kept * self._hidden_states(batch))

    def head(self, batch: int) -> int:
        """`m_lm`: the logits, their shifted copy, its loss, and the output layer."""
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
        """Round bytes up to whole pages."""
        return -(-count // self.constants.page) * self.constants.page
