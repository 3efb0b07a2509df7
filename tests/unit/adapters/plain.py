"""What tasks compute, in plain PyTorch: a formula for each kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_mux.batch.packed_batch import PackedBatch
from megatron_mux.kernels.dropout import keep_mask, key_of, uniform
from tests.unit.adapters.toy import Weights, noise


class Reference:
    """One task's rows in plain PyTorch on full matrices.

    Args:
        weights: Of the backbone.
        spec: The task.
        tensors: Its adapter, full tensors by key, with `requires_grad`.
        masks: Frozen masks of diff pruning by key.
        batch: Tells the sequence, token and step that masks depend on.
    """

    def __init__(
        self,
        weights: Weights,
        spec: Any,
        tensors: Mapping[str, Tensor],
        batch: PackedBatch,
        masks: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.weights, self.spec, self.tensors, self.batch, self.masks = (
            weights,
            spec,
            tensors,
            batch,
            masks or {},
        )
        known = weights.shape
        modules = [] if spec.adapter.peft_type == "PREFIX_TUNING" else spec.adapter.modules(known)
        self.modules = {module.path: module for module in modules}
        self.targets = set(self.modules)
        scaled = spec.adapter.scales_input(modules, known) if spec.adapter.peft_type == "IA3" else []
        self.inputs = {module.path for module in scaled}

    def forward(self, hidden: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """As `Toy.forward`, for the task's rows alone."""
        loss = hidden.new_zeros(())
        for layer in range(self.weights.shape.layers):
            prefix = f"model.layers.{layer}"
            for name in ("q_proj", "k_proj", "v_proj"):
                path = f"{prefix}.self_attn.{name}"
                loss = (
                    loss + ((torch.sin(self.linear(path, hidden)) @ self.weights.probe(path)) * weights).sum()
                )
            loss = loss + self.prefix(layer)
            hidden = hidden + self.linear(
                f"{prefix}.self_attn.o_proj", torch.tanh(hidden @ self.weights.mix(layer).T)
            )
            gate = self.linear(f"{prefix}.mlp.gate_proj", hidden)
            up = self.linear(f"{prefix}.mlp.up_proj", hidden)
            hidden = hidden + self.linear(f"{prefix}.mlp.down_proj", F.silu(gate) * up)
        return hidden, loss + ((hidden * noise("final", self.weights.shape.hidden)).sum(1) * weights).sum()

    def prefix(self, layer: int) -> Tensor:
        """The prefix's share of the loss."""
        if self.spec.adapter.peft_type != "PREFIX_TUNING":
            return torch.zeros((), dtype=torch.float64)
        shape, probe = self.weights.shape, self.weights.prefix_probe(layer)
        table = self.tensors["prompt_embeddings"]
        table = table.reshape(table.shape[0], shape.layers, 2, shape.kv_heads, shape.head_dim)[:, layer]
        return (torch.sin(table) * probe).sum()

    def linear(self, path: str, x: Tensor) -> Tensor:
        """A module with the task's adapter, if it targets it."""
        weight, bias = self.weights.matrices[path], self.weights.biases[path]
        adapter: Any = self.spec.adapter
        if path not in self.targets:
            return F.linear(x, weight, bias)
        named = {
            k.removeprefix(f"base_model.model.{path}."): v
            for k, v in self.tensors.items()
            if f".{path}." in k
        }
        if adapter.peft_type == "LORA":
            return self.lora(path, x, named)
        if adapter.peft_type == "VERA":
            a, b = (self.tensors[f"base_model.vera_{side}"] for side in "AB")
            a, b = a[:, : x.shape[1]], b[: weight.shape[0]]
            inner = named["vera_lambda_d"] * ((x * self.keep(path, x.shape[1])) @ a.T)
            return F.linear(x, weight, bias) + named["vera_lambda_b"] * (inner @ b.T)
        if adapter.peft_type == "LOHA":
            products = (named[f"hada_{one}_a"] @ named[f"hada_{one}_b"] for one in ("w1", "w2"))
            change = adapter.scale_of(self.modules[path]) * next(products) * next(products)
            return F.linear(x, weight + change, bias)
        if adapter.peft_type == "IA3":
            factor = named["ia3_l"].flatten()
            if path in self.inputs:
                return F.linear(x * factor, weight, bias)
            return F.linear(x, weight, bias) * factor
        if adapter.peft_type == "BOTTLENECK":
            y = F.linear(x, weight, bias)
            inner = y @ named["adapter_down.weight"].T + named["adapter_down.bias"]
            inner = F.relu(inner) if adapter.non_linearity == "relu" else F.gelu(inner)
            up: Tensor = inner @ named["adapter_up.weight"].T + named["adapter_up.bias"]
            return y + float(adapter.scaling) * up
        assert adapter.peft_type == "DIFF_PRUNING", f"no formula of {adapter.peft_type} here yet"
        return F.linear(x, weight + self.difference(path, named), bias)

    def lora(self, path: str, x: Tensor, named: Mapping[str, Tensor]) -> Tensor:
        """LoRA; with DoRA's magnitudes, and with an initial product that is subtracted."""
        weight, bias, spec = self.weights.matrices[path], self.weights.biases[path], self.spec.adapter
        scale = spec.scale_of(self.modules[path])
        if "lora_A0.weight" in named:
            weight = weight - scale * named["lora_B0.weight"] @ named["lora_A0.weight"]
        change = scale * named["lora_B.weight"] @ named["lora_A.weight"]
        dropped = x * self.keep(path, x.shape[1])
        y: Tensor = F.linear(x, weight, bias) + dropped @ change.T
        if "lora_magnitude_vector" not in named:
            return y
        ratio = named["lora_magnitude_vector"] / (weight + change).detach().norm(dim=1)
        return y.add((ratio - 1) * F.linear(dropped, weight + change))

    def keep(self, path: str, width: int) -> Tensor | float:
        """Dropout factors of LoRA or VeRA."""
        name = "vera_dropout" if self.spec.adapter.peft_type == "VERA" else "lora_dropout"
        probability, batch = getattr(self.spec.adapter, name), self.batch
        if not probability or not batch.training:
            return 1.0
        start, stop = batch.task_rows[self.spec.name]
        mask = keep_mask(
            key_of(self.spec.training.seed, name, path),
            batch.task_steps[self.spec.name],
            batch.groups.sequence_ids[start:stop],
            batch.groups.token_index[start:stop],
            (0, width),
            probability,
        )
        kept: Tensor = mask.double() / (1 - probability)
        return kept

    def difference(self, path: str, named: Mapping[str, Tensor]) -> Tensor:
        """Diff pruning's change of a weight."""
        d, log_alpha = named["diff.weight"], named["diff.log_alpha"]
        mask = self.masks.get(f"base_model.model.{path}.diff.weight")
        if mask is not None:
            return d * mask
        if self.batch.training:
            key = key_of(self.spec.training.seed, self.batch.task_steps[self.spec.name], "diff_pruning", path)
            u = uniform(key, torch.arange(d.shape[0]), torch.arange(d.shape[1])).double()
            log_alpha = log_alpha + torch.log(u) - torch.log(1 - u)
        return d * torch.clamp(torch.sigmoid(log_alpha) * 3 - 1.5, 0, 1)
