"""The low-rank products that a stored LoRA or VeRA adapter adds to weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_mux.adapters.selection import value_of
from megatron_mux.adapters.targets import matches
from megatron_mux.adapters.vera import VeraSpec
from megatron_mux.errors import UserError
from megatron_mux.merging.stored_adapter import PREFIX, StoredAdapter
from megatron_mux.shape import BackboneShape

_INITS = (None, True, False, "true", "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` with which peft leaves the backbone as it is."""

_VARIANTS: Mapping[str, str] = {
    "use_qalora": "QA-LoRA pools the module's input",
    "layer_replication": "the adapter repeats layers of the backbone",
    "alora_invocation_tokens": "it acts only after its invocation tokens",
    "use_bdlora": "BD-LoRA's matrices are blocks",
    "arrow_config": "Arrow chooses among adapters for each token",
    "kasa_config": "KaSA changes the backbone's weights",
    "monteclora_config": "its weights are random variables",
}
"""Fields of variants of LoRA that are no low-rank product added to a weight."""


@dataclass(frozen=True)
class LowRank:
    """A low-rank product at a module: `scale * B A`.

    Attributes:
        path: The module's path in transformers.
        adapter: Holds the tensors.
        a, b: Keys of A, `[R, in]`, and B, `[out, R]`.
        scale: Factor of the product.
        embedding: Whether A's columns are tokens: the module is an embedding, whose weight is `[V, H]`.
        magnitude: Key of DoRA's magnitudes, `[out]`; None without DoRA.
        experts: Number of routed experts, of which A and B hold one product each; 0: an ordinary module.
        parameter: Which of the experts' parameters it is: `gate_up_proj` or `down_proj`.
    """

    path: str
    adapter: StoredAdapter
    a: str
    b: str
    scale: float
    embedding: bool = False
    magnitude: str | None = None
    experts: int = 0
    parameter: str = ""

    @property
    def shape(self) -> tuple[int, int]:
        """Output and input width of the product; with experts, of one of them."""
        return self.adapter.shapes[self.b][0], self.adapter.shapes[self.a][1]

    @property
    def rank(self) -> int:
        """Rank of the product; with experts, of one of them."""
        return self.adapter.shapes[self.a][0] // max(1, self.experts)

    def matrices(self) -> tuple[Tensor, Tensor]:
        """A and B in fp32."""
        return self.adapter.read(self.a), self.adapter.read(self.b)

    def experts_matrices(self) -> tuple[Tensor, Tensor]:
        """A, `[E, R, in]`, and B, `[E, out, R]`, of the experts.

        Stored A holds one expert's ranks after the other's, stored B all experts' first ranks before their second ones.
        """
        a, b = self.matrices()
        return a.view(self.experts, -1, a.shape[1]), b.view(b.shape[0], -1, self.experts).permute(2, 0, 1)


def lora_terms(adapter: StoredAdapter, shape: BackboneShape) -> Iterator[LowRank]:
    """Yield the products of a LoRA adapter.

    Raises:
        UserError: It is a variant of LoRA that is no low-rank product, or one of its tensors lacks its partner.
    """
    config = adapter.config
    refuse_variants(adapter)
    for suffix, other, embedding in (
        (".lora_A.weight", ".lora_B.weight", False),
        (".lora_embedding_A", ".lora_embedding_B", True),
    ):
        for path in adapter.paths(suffix):
            a, b = PREFIX + path + suffix, PREFIX + path + other
            _check_pair(adapter, a, b)
            magnitude = f"{PREFIX}{path}.lora_magnitude_vector"
            if magnitude in adapter.shapes and embedding:
                raise UserError(f"{adapter.directory}: DoRA on the embedding ({path}) is not supported.")
            if config.get("use_dora") and not embedding and magnitude not in adapter.shapes:
                raise UserError(f"{adapter.weights} lacks {magnitude}, though its config has use_dora.")
            experts, parameter = _experts_of(adapter, path, a, b, shape)
            rank = adapter.shapes[a][0] // max(1, experts)
            yield LowRank(
                path.removesuffix(".base_layer") if experts else path,
                adapter,
                a,
                b,
                lora_scale(adapter, _named(adapter, path, parameter), rank),
                embedding,
                magnitude if magnitude in adapter.shapes else None,
                experts,
                parameter,
            )


def lora_scale(adapter: StoredAdapter, path: str, rank: int) -> float:
    """The factor of a module's product: `lora_alpha / r`, or `lora_alpha / sqrt(r)` with `use_rslora`."""
    config = adapter.config
    alpha = float(value_of(config.get("alpha_pattern") or {}, path, config.get("lora_alpha", 8)))
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def refuse_variants(adapter: StoredAdapter) -> None:
    """Refuse variants of LoRA that are no low-rank product.

    Raises:
        UserError: The adapter is one; says which field tells.
    """
    for field, reason in _VARIANTS.items():
        if adapter.config.get(field):
            raise UserError(f"{adapter.directory}: {field} is not supported here: {reason}.")
    init = adapter.config.get("init_lora_weights", True)
    if (init.lower() if isinstance(init, str) else init) not in _INITS:
        raise UserError(
            f"{adapter.directory}: init_lora_weights is {init}, so that it belongs to a backbone whose weights peft "
            "has changed: save it with path_initial_model_for_weight_conversion, which makes it a plain LoRA."
        )


def _experts_of(adapter: StoredAdapter, path: str, a: str, b: str, shape: BackboneShape) -> tuple[int, str]:
    """How many routed experts a product is of, and of which parameter; none if it is another module's.

    peft wraps the module of all experts once for each parameter, so that shapes alone tell which is which.
    """
    experts = shape.experts
    if experts is None or not path.removesuffix(".base_layer").endswith(f".{experts.names.fused}"):
        return 0, ""
    found, down = (adapter.shapes[b][0], adapter.shapes[a][1]), (shape.hidden, experts.ffn)
    if adapter.shapes[a][0] % experts.count:
        raise UserError(f"{adapter.weights}: {a} is not of {experts.count} experts.")
    return experts.count, "down_proj" if found == down else "gate_up_proj"


def _named(adapter: StoredAdapter, path: str, parameter: str) -> str:
    """What peft matches patterns with: the path of a module, or of a parameter that `target_parameters` names."""
    if parameter:
        return f"{path.removesuffix('.base_layer')}.{parameter}"
    weight = f"{path}.weight"
    named = any(matches(target, weight) for target in adapter.config.get("target_parameters") or ())
    return weight if named else path


def _check_pair(adapter: StoredAdapter, a: str, b: str) -> None:
    """Raise `UserError` unless A has its B, and both the same rank."""
    if b not in adapter.shapes:
        raise UserError(f"{adapter.weights} holds {a} without {b}.")
    down, up = adapter.shapes[a], adapter.shapes[b]
    if len(down) != 2 or len(up) != 2 or down[0] != up[1]:
        raise UserError(
            f"{adapter.weights}: {a} of shape {list(down)} and {b} of shape {list(up)} are no pair."
        )


class VeraMatrices:
    """The two random matrices of a VeRA adapter, stored with it or drawn again from its seed."""

    KEYS = ("base_model.vera_A", "base_model.vera_B")

    def __init__(self, adapter: StoredAdapter, shape: BackboneShape) -> None:
        if all(key in adapter.shapes for key in self.KEYS):
            self.a, self.b = (adapter.read(key) for key in self.KEYS)
            return
        fields: dict[str, Any] = {
            name: adapter.config[name] for name in ("r", "projection_prng_key") if name in adapter.config
        }
        targets = adapter.paths(".vera_lambda_b")
        spec = VeraSpec(peft_type="VERA", save_projection=False, target_modules=targets, **fields)
        drawn = spec.shared_tensors(shape)
        self.a, self.b = (torch.empty(drawn[key].shape) for key in self.KEYS)
        for key, full in zip(self.KEYS, (self.a, self.b), strict=True):
            drawn[key].init(full, torch.Generator())

    def of(
        self, adapter: StoredAdapter, path: str, out_features: int, in_features: int
    ) -> tuple[Tensor, Tensor]:
        """A module's scaled matrices, `[R, in]` and `[out, R]`, whose product is what it adds to the weight."""
        d, b = (adapter.read(f"{PREFIX}{path}.vera_lambda_{side}") for side in ("d", "b"))
        return d[:, None] * self.a[:, :in_features], b[:, None] * self.b[:out_features]
