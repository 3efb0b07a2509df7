"""LoRA (Hu et al., 2021; rank-stabilised: Kalajdzievski, 2023), as in peft.

`y += scale * dropout(x) A^T B^T`. On a column-parallel BaseOp B is divided as the output is and A is whole on every
rank; on a row-parallel one A is divided as the input is and B is whole. What is whole has a partial gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_mux.adapters.adapter import (
    Adapter,
    LowRankTerm,
    TaskAdapter,
    register,
    tensor_key,
)
from megatron_mux.adapters.configs import lora_config
from megatron_mux.adapters.host import Site
from megatron_mux.adapters.targets import Sizes
from megatron_mux.kernels.dropout import keep_mask, key_of
from megatron_mux.layout import MicroBatch


class _Term:
    """A and B of one module."""

    def __init__(self, site: Site, down: nn.Parameter, up: nn.Parameter) -> None:
        self.path = site.path
        self.features = (site.info.in_start, site.info.in_stop)
        columns = site.columns
        self.columns = None if columns is None else columns.to(down.device)
        self.down = down
        self.up = up


class LoraAdapter(Adapter):
    """The LoRA terms of one task at one BaseOp."""

    stages = frozenset({"low_rank"})

    def __init__(self, owner: Lora, terms: list[_Term]) -> None:
        self.owner = owner
        self.terms = terms

    def low_rank(self, batch: MicroBatch, rows: tuple[int, int]) -> list[LowRankTerm]:
        """See `Adapter.low_rank`."""
        probability = self.owner.spec.lora_dropout if batch.training else 0.0
        scale = self.owner.scale
        if not probability:
            return [LowRankTerm(t.down, t.up, t.columns, scale) for t in self.terms]
        start, stop = rows
        step = batch.task_steps[self.owner.name]
        sequences, tokens = batch.sequence_ids[start:stop], batch.token_index[start:stop]
        return [
            LowRankTerm(
                t.down,
                t.up,
                t.columns,
                scale,
                keep_mask(
                    key_of(self.owner.seed, step, "lora_dropout", t.path),
                    sequences,
                    tokens,
                    t.features,
                    probability,
                ),
                1.0 / (1.0 - probability),
            )
            for t in self.terms
        ]


@register
class Lora(TaskAdapter):
    """LoRA of one task."""

    peft_type = "LORA"

    def build(self) -> None:
        """See `TaskAdapter.build`."""
        rank = self.spec.r
        self.scale = self.spec.lora_alpha / (math.sqrt(rank) if self.spec.use_rslora else rank)
        for op, sites in self.host.sites(self.targets):
            self.at[op] = LoraAdapter(self, [self._term(site, rank) for site in sites])

    @staticmethod
    def tensor_shapes(spec: Any, paths: Sequence[str], sizes: Sizes) -> dict[str, tuple[int, ...]]:
        """See `TaskAdapter.tensor_shapes`."""
        shapes: dict[str, tuple[int, ...]] = {}
        for path in paths:
            width, inputs = sizes.module_shape(path)
            shapes[tensor_key(path, "lora_A.weight")] = (spec.r, inputs)
            shapes[tensor_key(path, "lora_B.weight")] = (width, spec.r)
        return shapes

    def config_dict(self) -> dict[str, Any]:
        """See `TaskAdapter.config_dict`."""
        return lora_config(self.spec, self.targets, self.host.shape, self.host.module_paths())

    def _term(self, site: Site, rank: int) -> _Term:
        first = self.host.first_tensor_rank
        a_key, b_key = tensor_key(site.path, "lora_A.weight"), tensor_key(site.path, "lora_B.weight")
        a_shape, b_shape = (rank, site.info.in_features), (site.part.out_features, rank)
        if site.column_parallel:
            down = self.parameter(a_key, a_shape, _uniform, partial=True, owner=first)
            up = self.parameter(b_key, b_shape, _zeros, dim=0, index=site.part.features)
        else:
            down = self.parameter(a_key, a_shape, _uniform, dim=1, index=site.inputs)
            up = self.parameter(b_key, b_shape, _zeros, partial=True, owner=first)
        return _Term(site, down, up)


def _uniform(full: Tensor, generator: torch.Generator) -> None:
    nn.init.kaiming_uniform_(full, a=math.sqrt(5), generator=generator)


def _zeros(full: Tensor, generator: torch.Generator) -> None:
    full.zero_()
