"""What a layer of the engine keeps from its forward to its backward pass, tensor by tensor, as closed forms.

The backbone is frozen: its products keep no input unless an adapter needs it, and its norms, rotations and activations
keep as little as can be. Which tensors there are follows from the layer's structure (`Architecture`). Forms are per
token (a row of the micro-batch), for one layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron_mux.adapters.costs import Row
from megatron_mux.base_ops import BaseOpName
from megatron_mux.gpus import Gpu
from megatron_mux.kernels.pointwise import gated
from megatron_mux.kernels.short_attention import LONGEST, blocks_of, padded_length
from megatron_mux.memory.assumed_routes import ExpertLoad
from megatron_mux.memory.forms import expert_layer, latent_layer
from megatron_mux.memory.forms.architecture import Architecture
from megatron_mux.memory.forms.beginnings import BEGINS, First
from megatron_mux.memory.kernel_scratch import flash
from megatron_mux.memory.sdpa import AttentionCall, Kernel, backward_scratch, kernel


@dataclass(frozen=True)
class EngineLayer:
    """A layer of a backbone on a tensor rank.

    Attributes:
        architecture: The backbone.
        size: Bytes of a value in matrix products.
        length: Tokens of a sequence.
        device: `cuda` or `cpu`, whose kernels keep different tensors.
        gpu: The GPU, on `cuda`.
        tensor: Ranks that share it.
        sequence_parallel: Whether they divide the rows outside the products.
        prefixed: Whether a sequence has virtual tokens: a CPU computes its attention as that of a long one.
        load: What a rank computes of its experts; None: it has an MLP instead.
        exchanges: Whether rows go to other ranks for their experts.
    """

    architecture: Architecture
    size: int
    length: int
    device: str = "cuda"
    gpu: Gpu = Gpu()  # noqa: RUF009  (frozen)
    tensor: int = 1
    sequence_parallel: bool = False
    prefixed: bool = False
    load: ExpertLoad | None = None
    exchanges: bool = False

    def bytes(self, tensors: Iterable[Row]) -> float:
        """Bytes of a row of these tensors on one of the ranks."""
        found = 0.0
        for one in tensors:
            divided = one.where == "columns" or (one.where == "rows" and self.sequence_parallel)
            found += one.width * (one.size or self.size) / (self.tensor if divided else 1)
        return found

    @property
    def groups_rows(self) -> bool:
        """Whether kernels compute bottlenecks and factors of all tasks at once: see `low_rank_choice`."""
        return self.device == "cuda" and self.size < 8

    @property
    def fused(self) -> bool:
        """Whether kernels of our own compute the element-wise work between products: see `pointwise_choice`."""
        return self.device == "cuda" and self.size < 8

    @property
    def turned(self) -> bool:
        """Whether one of them makes queries, keys and values out of the product of linear_qkv."""
        return self.fused and self.architecture.rotary and self.architecture.latent is None

    @property
    def input(self) -> float:
        """Bytes of a row of its input, which full recomputation keeps."""
        return self.bytes([Row("input", "rows", self.architecture.hidden)])

    def kept(
        self,
        inputs: frozenset[BaseOpName] = frozenset(),
        first: First | None = None,
    ) -> list[Row]:
        """Tensors that the layer keeps if it has a gradient, besides the adapters' own.

        Args:
            inputs: BaseOps whose input is needed to train an adapter.
            first: Where gradients begin in this layer, at the first adapter: parts below it keep nothing. None: below
                the layer. Above attention (`linear_proj`), the last layer has labelled rows only.
        """
        a = self.architecture
        begins = 0 if first is None else BEGINS[first]
        saved: list[Row] = []
        if begins == 0:
            saved += self._norm("the first norm")
        if begins <= BEGINS["core_attention"]:
            saved += self._attention(begins)
        if begins <= BEGINS["linear_proj"]:
            saved += self._norm("the second norm")
            saved += self._norm("the norm behind attention") if a.output_norms else []
        saved += self._mlp(begins)
        saved += self._norm("the norm behind the MLP") if a.output_norms else []
        return saved + self.adapter_inputs(inputs, begins)

    def adapter_inputs(self, inputs: frozenset[BaseOpName], begins: int = 0) -> list[Row]:
        """Inputs of BaseOps that are kept for adapters only; see `kept`."""
        a, saved = self.architecture, list[Row]()
        if not inputs.isdisjoint(("linear_qkv", "linear_kv_down")):
            saved.append(Row("output of the first norm", "all", a.hidden))
        if "linear_q_up" in inputs:
            saved.append(Row("normalised latent of queries", "all", a.widths["linear_q_up"][0]))
        if "linear_kv_up" in inputs:
            saved.append(Row("normalised latent of keys and values", "all", a.widths["linear_kv_up"][0]))
        kept_anyway = not (self.short or begins > BEGINS["core_attention"])
        if "linear_proj" in inputs and (not kept_anyway or a.attended != a.queries):
            saved.append(Row("output of attention", "columns", a.attended))
        if not inputs.isdisjoint(("linear_fc1", "shared_fc1")):
            saved.append(Row("output of the second norm", "all", a.hidden))
        # ReLU goes backward by its output: an adapter behind it has that already.
        if "linear_fc2" in inputs and (a.gated or a.activation != "relu" or begins > BEGINS["linear_fc1"]):
            saved.append(Row("output of the activation", "columns", a.ffn))
        if "shared_fc2" in inputs:
            saved.append(Row("output of shared experts' activation", "columns", a.shared_ffn))
        if "experts_fc1" in inputs:
            saved.append(Row("rows of pairs", "rows", self.pairs * a.hidden))
        if "experts_fc2" in inputs:
            saved.append(Row("output of experts' activation", "rows", self.pairs * self.expert_ffn))
        return saved

    @property
    def pairs(self) -> float:
        """Pairs of a row and an expert that a rank computes for each row that a rank has."""
        return 0.0 if self.load is None else self.load.pairs

    @property
    def expert_ffn(self) -> float:
        """Inner width of an expert on a rank."""
        return self.architecture.expert_ffn / self.tensor

    def _mlp(self, begins: int) -> Iterator[Row]:
        """What an MLP keeps, or experts.

        Args:
            begins: Where gradients begin; see `beginnings`.
        """
        inside = begins <= BEGINS["linear_fc1"]
        if self.load is not None:
            yield from expert_layer.kept(self, begins)
            if inside and self.architecture.shared_ffn:
                yield from self._activation(self.architecture.shared_ffn)
        elif inside:
            yield from self._activation(self.architecture.ffn)

    def _norm(self, what: str) -> Iterator[Row]:
        yield Row(f"input of {what}", "rows", self.architecture.hidden)
        yield Row(f"statistics of {what}", "rows", self.statistics, 4)

    @property
    def statistics(self) -> int:
        """Numbers that a norm keeps of a row: our own recompute them."""
        if self.fused:
            return 0
        return int(self.device == "cuda") if self.architecture.rms_norm else 2

    def copied_keys(self) -> list[Row]:
        """Keys that are put behind a prefix or earlier chunks, besides what `kept` has of keys and values anyway."""
        a = self.architecture
        changed = a.rotary or a.qk_norm
        return [Row("copied keys", "columns", a.keys)] if self.one_kernel and not changed else []

    def _attention(self, begins: int) -> Iterator[Row]:
        """Queries, keys and values as core attention takes them, and what it keeps itself.

        The product of linear_qkv holds all three. It is kept whole where one of them is a view of it that something
        needs: queries and keys that nothing has rotated or normalised, or the inputs of their norms; values, unless one
        kernel takes all sequences, for which they are copied. Queries of heads that share keys are copied out of it at
        once; and all three where a kernel rotates them. Where the kernel knows no shared keys, it is given keys and
        values of every head.
        """
        a = self.architecture
        if a.latent is not None:
            yield from latent_layer.kept(self, begins)
            return
        grouped = a.heads != a.kv_heads
        changed = a.rotary or a.qk_norm
        short, products, repeated = self.short, self.by_products, self.repeats_keys
        if self.prefixed:
            yield from self._behind_a_prefix(begins)
            return
        values_copied = self.turned or self.one_kernel or short or products or repeated
        if short:
            yield from self.short_attention()
        elif products:
            yield Row("queries, and keys and values of every head", "columns", 3 * a.queries)
            yield Row("attention's weights", "columns", a.heads * self.length)
        elif changed or grouped:
            yield Row("queries", "columns", a.queries)
        if repeated and not products:
            yield Row("keys and values of every head", "columns", 2 * a.queries)
        elif not short and not products:
            if changed:
                yield Row("keys", "columns", a.keys)
            if values_copied:
                yield Row("values", "columns", a.keys)
        normed = a.qk_norm and begins <= BEGINS["linear_qkv"]  # else nothing trained lies below them
        if normed or not ((changed or short or repeated) and values_copied):
            yield Row("product of linear_qkv", "columns", a.queries + 2 * a.keys)
        if normed:
            if grouped and not self.turned:
                yield Row("queries before their norm", "columns", a.queries)
            statistics = self.statistics * (a.heads + a.kv_heads)
            yield Row("statistics of the norms of queries and keys", "columns", statistics, 4)
        if not short:
            yield Row("output of attention", "columns", a.queries)
        if not short and not products:
            yield Row("log-sum-exp", "columns", a.heads, 4)

    def _behind_a_prefix(self, begins: int) -> Iterator[Row]:
        """The same of sequences with virtual tokens on a CPU, whose keys and values are copied behind those.

        Each length has a mask of all its pairs; it is counted as if no two sequences shared one.
        """
        a = self.architecture
        views = not (a.rotary or a.qk_norm or a.heads != a.kv_heads)
        if not views:
            yield Row("queries", "columns", a.queries)
        if views or (a.qk_norm and begins <= BEGINS["linear_qkv"]):
            yield Row("product of linear_qkv", "columns", a.queries + 2 * a.keys)
        yield Row("copied keys and values", "columns", 2 * a.keys)
        yield Row("mask", "all", self.length)
        yield Row("output of attention", "columns", a.queries)
        yield Row("log-sum-exp", "columns", a.heads, 4)

    def short_attention(self) -> Iterator[Row]:
        """What `kernels.short_attention` keeps: queries, keys and values, padded, and weights of pairs of tokens."""
        a, padded = self.architecture, padded_length(self.length)
        pairs = sum((stop - first) * stop for first, stop in blocks_of(padded))
        yield Row(
            "padded queries, keys and values", "columns", (a.queries + 2 * a.keys) * padded / self.length
        )
        yield Row("attention's weights", "columns", a.heads * pairs / self.length)

    @property
    def short(self) -> bool:
        """Whether attention is computed by products of short segments."""
        return self.device == "cpu" and self.length <= LONGEST and not self.prefixed

    @property
    def by_products(self) -> bool:
        """Whether a GPU has no kernel for attention: then PyTorch multiplies, and keeps attention's weights."""
        return self.device == "cuda" and not self.one_kernel and kernel(self.gpu, self._call) == Kernel.MATH

    @property
    def repeats_keys(self) -> bool:
        """Whether keys and values are copied for every head, as `kernels.dense_attention` does on a GPU."""
        a = self.architecture
        return self.device == "cuda" and not self.one_kernel and a.heads != a.kv_heads

    @property
    def _call(self) -> AttentionCall:
        a, length = self.architecture, self.length
        dtype = {2: "float16", 4: "float32"}.get(self.size, "float64")
        width = a.head_dim + -a.head_dim % 8
        return AttentionCall(dtype, a.heads, a.heads, length, length, width, width)

    @property
    def one_kernel(self) -> bool:
        """Whether one kernel computes attention of all packed sequences."""
        return self.device == "cuda" and self.size == 2 and self.gpu.capability >= (8, 0)

    def _activation(self, ffn: int) -> Iterator[Row]:
        """Inside an MLP: most gated ones are one fused function; else autograd keeps the activated half, too."""
        a = self.architecture
        yield Row("input of the activation, or its output", "columns", ffn * (2 if a.gated else 1))
        if self.halves_apart:
            yield Row("activated half", "columns", ffn)
        if a.activation == "quick_gelu" and not self.fused:
            yield Row("sigmoid", "columns", ffn)

    @property
    def halves_apart(self) -> bool:
        """Whether a gated MLP's halves are computed one after the other, not by one function."""
        a = self.architecture
        return a.gated and not self.fused and gated(a.activation) is None

    def mlp_backward(self) -> list[Row]:
        """Temporary tensors of the activation's backward pass: gradients of its output, of its input, and in between.

        torch's function of both halves of a gated MLP recomputes the activated one.
        """
        a = self.architecture
        again = a.ffn if a.gated and not (self.halves_apart or self.fused) else 0
        return [
            Row("gradient of hidden states", "rows", a.hidden),
            Row("inside the MLP", "columns", a.inner + a.ffn + again),
        ]

    def linear_fc2_backward(self) -> list[Row]:
        """Temporary tensors of linear_fc2's backward pass, while its input is still there if an adapter needs it."""
        return [
            Row("gradient of hidden states", "rows", self.architecture.hidden),
            Row("gradient of the activation's output", "columns", self.architecture.ffn),
        ]

    def attention_backward(self) -> list[Row]:
        """Temporary tensors of attention's backward pass, less what the MLP has freed by then.

        An upper bound: gradients come and go one after the other.
        """
        a = self.architecture
        keys = a.queries if self.repeats_keys else a.keys
        width = 3 * a.queries + 2 * keys if a.latent is None else latent_layer.backward(a)
        found = [
            Row("gradients of hidden states", "rows", 2 * a.hidden),
            Row("gradients of attention", "columns", width),
        ]
        if self.device == "cuda":
            found.append(Row("attention's scratch", "columns", self._scratch(), 1))
        return [*found, *self.mlp_gone()]

    def mlp_gone(self) -> list[Row]:
        """Bytes that the MLP has freed by attention's backward pass, as negative rows."""
        return [one._replace(what=f"gone: {one.what}", width=-one.width) for one in self._mlp(0)]

    def _scratch(self) -> float:
        """Bytes of a row that attention's backward kernel takes for itself."""
        a, length = self.architecture, self.length
        if self.one_kernel:
            sizes = flash(length + 128, length, a.heads, a.kv_heads, a.head_dim, self.size)
        else:
            sizes = backward_scratch(self.gpu, self._call, 1)
        return sum(one.size for one in sizes) / length
