"""A small frozen model of Megatron's own parallel linear modules without attention, and the same in plain PyTorch.

Every BaseOp of every layer is used, rows never meet (so tasks can be compared one by one), and queries, keys, values
and prefixes reach the loss through fixed random weights. `Toy` runs at any tensor-parallel size; `Reference` computes
one task's rows with full Hugging Face matrices and the textbook formula of each adapter kind.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_mux.adapters.attach import AdapterSet
from megatron_mux.adapters.host import Host
from megatron_mux.adapters.parameter import AdapterParameter
from megatron_mux.adapters.registry import KINDS
from megatron_mux.backbone.columns import inputs, parts
from megatron_mux.backbone.registry import family
from megatron_mux.base_ops import BASE_OPS, BaseOpInfo
from megatron_mux.batch.pack import PackedSequence, pack
from megatron_mux.batch.packed_batch import PackedBatch, activate
from megatron_mux.kernels.dropout import key_of
from megatron_mux.runtime import Parallel

MODULES = {
    "linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "linear_proj": ("self_attn.o_proj",),
    "linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "linear_fc2": ("mlp.down_proj",),
}
SKIPS_BIAS = {"linear_qkv": False, "linear_proj": True, "linear_fc1": True, "linear_fc2": True}


def sizes(
    heads: int = 4, kv_heads: int = 2, head_dim: int = 6, hidden: int = 12, ffn: int = 20, layers: int = 2
) -> Any:
    """A small Llama's shape."""
    return family("llama").shape(
        {
            "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers, "head_dim": head_dim,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": ffn,
            "hidden_act": "silu", "rms_norm_eps": 1e-5, "vocab_size": 96, "max_position_embeddings": 128,
            "tie_word_embeddings": False,
        }
    )  # fmt: skip


def noise(name: str, *shape: int) -> Tensor:
    """Fixed random numbers of a name, fp64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(key_of(name) >> 1), dtype=torch.float64)


def assemble(parameter: AdapterParameter, full: Tensor, local: Tensor) -> None:
    """Write a rank's part of a parameter, or of what is divided alike, into the whole: the inverse of `slice_of`."""
    if parameter.dim is None or parameter.index is None:
        full.copy_(local)
    else:
        full.index_copy_(parameter.dim, parameter.index, local.to(full))


class Weights:
    """Full matrices and biases of every Hugging Face module, and the loss's fixed weights."""

    def __init__(self, shape: Any, bias: bool = True) -> None:
        self.shape = shape
        self.matrices: dict[str, Tensor] = {}
        self.biases: dict[str, Tensor | None] = {}
        widths = parts(shape, "linear_qkv", 0, 1) | parts(shape, "linear_fc1", 0, 1)
        for layer in range(shape.layers):
            for op, names in MODULES.items():
                for name in names:
                    path = f"model.layers.{layer}.{name}"
                    out = widths[name].out_features if name in widths else shape.hidden
                    self.matrices[path] = (
                        noise(path, out, shape.in_features(op)) / shape.in_features(op) ** 0.5
                    )
                    self.biases[path] = noise(path + "b", out) * 0.3 if bias else None

    def mix(self, layer: int) -> Tensor:
        """`[heads * D, H]`: what stands for attention, from hidden states to linear_proj's input."""
        return noise(f"mix{layer}", self.shape.heads * self.shape.head_dim, self.shape.hidden) / 3

    def probe(self, path: str) -> Tensor:
        """Weights of a q, k or v module's outputs in the loss."""
        return noise(path + "probe", self.matrices[path].shape[0])

    def prefix_probe(self, layer: int) -> Tensor:
        """`[2, kv heads, D]`: weights of prefix keys and values in the loss."""
        return noise(f"prefix{layer}", 2, self.shape.kv_heads, self.shape.head_dim)


class Toy:
    """The model on one tensor rank."""

    def __init__(
        self, shape: Any, parallel: Parallel, bias: bool = True, dtype: torch.dtype = torch.float64
    ) -> None:
        from megatron.core.model_parallel_config import ModelParallelConfig

        self.shape, self.parallel, self.weights = shape, parallel, Weights(shape, bias)
        config = ModelParallelConfig(
            tensor_model_parallel_size=parallel.tp_size,
            sequence_parallel=parallel.sequence_parallel,
            use_cpu_initialization=True,
            perform_initialization=False,
            params_dtype=dtype,
        )
        self.dtype = dtype
        self.infos = [
            self._base_op(config, layer, op, bias) for layer in range(shape.layers) for op in BASE_OPS
        ]
        self.mixers = [self._mixer(config, layer) for layer in range(shape.layers)]

    def _linear(self, config: Any, op: str, bias: bool) -> Any:
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

        sizes_ = self.shape.in_features(op), self.shape.out_features(op)
        common: dict[str, Any] = {
            "config": config,
            "init_method": lambda t: t,
            "bias": bias,
            "skip_bias_add": SKIPS_BIAS[op],
            "tp_group": self.parallel.tp_group,
        }
        if op in ("linear_qkv", "linear_fc1"):
            return ColumnParallelLinear(*sizes_, gather_output=False, **common)
        return RowParallelLinear(*sizes_, input_is_parallel=True, **common)

    def _base_op(self, config: Any, layer: int, op: Any, bias: bool) -> BaseOpInfo:
        rank, size = self.parallel.tp_rank, self.parallel.tp_size
        module = self._linear(config, op, bias).requires_grad_(False)
        held = inputs(self.shape, op, rank, size)
        found = parts(self.shape, op, rank, size)
        prefix = f"model.layers.{layer}"
        for name, part in found.items():
            full, full_bias = (
                self.weights.matrices[f"{prefix}.{name}"],
                self.weights.biases[f"{prefix}.{name}"],
            )
            module.weight.data[part.columns] = full[part.features][:, held.start : held.stop].to(self.dtype)
            if full_bias is not None:
                module.bias.data[part.columns] = full_bias[part.features].to(self.dtype)
        return BaseOpInfo(layer, op, module, held, found, prefix)

    def _mixer(self, config: Any, layer: int) -> Any:
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear

        full = self.weights.mix(layer).to(self.dtype)
        mixer = ColumnParallelLinear(
            full.shape[1],
            full.shape[0],
            config=config,
            init_method=lambda t: t,
            bias=False,
            tp_group=self.parallel.tp_group,
        ).requires_grad_(False)
        mixer.weight.data.copy_(full.chunk(self.parallel.tp_size)[self.parallel.tp_rank])
        return mixer

    def forward(self, batch: PackedBatch, hidden: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states after the last layer and this rank's share of the loss.

        Args:
            batch: The micro-batch.
            hidden: `[T, H]` (this rank's rows with sequence parallelism).
            weights: `[T]` weight of each row in the loss.
        """
        with activate(batch):
            hidden = hidden.unsqueeze(1)
            loss = hidden.new_zeros(())
            for layer in range(self.shape.layers):
                ops = {info.name: info for info in self.infos if info.layer == layer}
                loss = loss + self._probe(batch, ops["linear_qkv"], hidden, weights)
                mixed, _ = self.mixers[layer](hidden)
                hidden = hidden + _added(ops["linear_proj"].module(torch.tanh(mixed)))
                gate, up = _added(ops["linear_fc1"].module(hidden)).chunk(2, dim=-1)
                hidden = hidden + _added(ops["linear_fc2"].module(F.silu(gate) * up))
            rank, rows = self.parallel.tp_rank, hidden.shape[0]
            own = weights[rank * rows : (rank + 1) * rows] if self.parallel.sequence_parallel else weights
            final = (hidden.squeeze(1) * noise("final", self.shape.hidden).to(self.dtype)).sum(1)
            # The reduced hidden states are the same on every rank: each counts them once for its own gradient.
            return hidden.squeeze(1), loss + (final[own != 0] * own[own != 0]).sum()

    def _probe(self, batch: PackedBatch, info: BaseOpInfo, hidden: Tensor, weights: Tensor) -> Tensor:
        y = _added(info.module(hidden)).squeeze(1)
        used = weights != 0
        loss = y.new_zeros(())
        for name, part in info.parts.items():
            probe = self.weights.probe(f"{info.hf_prefix}.{name}")[part.features].to(self.dtype)
            loss = loss + ((torch.sin(y[used][:, part.columns]) @ probe) * weights[used]).sum()
        rank, size, heads = self.parallel.tp_rank, self.parallel.tp_size, self.shape.kv_heads
        first = rank * heads // size
        for k, v in batch.prefix.get(info.layer, {}).values():
            probe = self.weights.prefix_probe(info.layer).to(self.dtype)[:, first : first + k.shape[1]]
            share = heads * 1.0 / max(heads, size)  # of a head that several ranks hold
            loss = loss + share * ((torch.sin(k) * probe[0]).sum() + (torch.sin(v) * probe[1]).sum())
        return loss


def _added(result: tuple[Tensor, Tensor | None]) -> Tensor:
    y, bias = result
    return y if bias is None else y + bias


def lora(name: str, **fields: Any) -> Any:
    """A LoRA task."""
    common: dict[str, Any] = {"r": 3, "lora_alpha": 5, "lora_dropout": 0.0, "use_rslora": False}
    return task(name, peft_type="LORA", **(common | fields))


def task(name: str, seed: int = 7, **adapter: Any) -> Any:
    """A task of any kind, as far as adapters look at it."""
    section = KINDS[adapter["peft_type"]].model_validate(adapter)
    return SimpleNamespace(name=name, adapter=section, training=SimpleNamespace(seed=seed))


def ia3(name: str, targets: list[str], feedforward: list[str] | str) -> Any:
    """An IA3 task."""
    return task(name, peft_type="IA3", target_modules=targets, feedforward_modules=feedforward)


def bottleneck(name: str, targets: Any, **fields: Any) -> Any:
    """A bottleneck task."""
    common: dict[str, Any] = {"bottleneck_size": 4, "non_linearity": "relu", "scaling": 1.0} | fields
    return task(name, peft_type="BOTTLENECK", target_modules=targets, **common)


def diff(name: str, targets: list[str], sparsity: float = 0.9) -> Any:
    """A diff pruning task."""
    return task(name, peft_type="DIFF_PRUNING", sparsity=sparsity, l0_weight=1e-3, target_modules=targets)


RANKS: dict[str, Any] = {
    "rank_pattern": {"q_proj": 2, "mlp.*": 6},
    "alpha_pattern": {"1.*o_proj": 1, "gate_proj": 9},
}
"""Ranks and scales that differ between the modules of a BaseOp, and between layers."""


def mixture() -> list[Any]:
    """Tasks of every kind with different ranks and targets."""
    some = ["q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"]
    return [
        lora("lora-qv", target_modules=["q_proj", "v_proj"]),
        ia3("ia3", ["k_proj", "v_proj", "o_proj", "up_proj", "down_proj"], ["down_proj", "v_proj"]),
        lora("lora-all", r=5, use_rslora=True, target_modules="all-linear"),
        bottleneck("bottleneck", ["o_proj", "down_proj"], non_linearity="gelu", scaling=0.7),
        lora("lora-dropout", r=2, lora_dropout=0.25, target_modules=some),
        diff("diff", ["q_proj", "o_proj", "up_proj"]),
        task("prefix", peft_type="PREFIX_TUNING", num_virtual_tokens=3),
        ia3("ia3-ff", ["gate_proj", "down_proj"], ["gate_proj"]),
        task("vera", peft_type="VERA", r=6, target_modules="all-linear"),
        task("vera-dropout", peft_type="VERA", r=4, vera_dropout=0.2, target_modules=some),
        task("loha", peft_type="LOHA", r=3, alpha=5, target_modules="all-linear"),
        task("loha-ranks", peft_type="LOHA", r=2, target_modules=some, **RANKS),
        lora("dora", target_modules="all-linear", use_dora=True, exclude_modules=["k_proj"]),
        lora(
            "dora-dropout",
            r=4,
            lora_dropout=0.3,
            use_dora=True,
            use_rslora=True,
            target_modules=some,
            **RANKS,
        ),
        lora("pissa-dora", target_modules=some, init_lora_weights="pissa", use_dora=True, lora_dropout=0.1),
    ]


def adapter_tensors(spec: Any, shape: Any) -> dict[str, Tensor]:
    """Random full tensors of a task, none of them zero, fp64."""
    wanted = spec.adapter.tensors(shape)
    # Parameters are fp64 here, but fresh values are fp32: keep what a checkpoint could hold.
    return {key: (noise(spec.name + key, *one.shape) * 0.4).float().double() for key, one in wanted.items()}


def attached(parallel: Parallel, *specs: Any, bias: bool = True) -> tuple[Toy, AdapterSet]:
    """The model, and its adapters, with random values for these tasks."""
    toy = Toy(sizes(), parallel, bias)
    adapters = AdapterSet(
        Host(toy.infos, parallel, torch.float64, toy.shape, weights=toy.weights.matrices.get)
    )
    for spec in specs:
        adapters.add(spec, 9, adapter_tensors(spec, toy.shape))
    return toy, adapters


def make_batch(
    specs: list[Any],
    lengths: tuple[int, ...] = (3, 5),
    multiple: int = 4,
    training: bool = True,
    first: int = 0,
) -> PackedBatch:
    """Two sequences per task, padding at the end, every task some steps into its training.

    The i-th task has sequences and steps of its own, counted from `first`.
    """
    names = tuple(spec.name for spec in specs)
    sequences = [
        PackedSequence(
            name,
            10 * i + j,
            torch.zeros(length, dtype=torch.int64),
            torch.ones(length, dtype=torch.bool),
            1.0,
        )
        for i, name in enumerate(names, first)
        for j, length in enumerate((3, 5))
    ]
    return pack(
        sequences, names, {n: 3 + i for i, n in enumerate(names, first)}, multiple=multiple, training=training
    ).to()
