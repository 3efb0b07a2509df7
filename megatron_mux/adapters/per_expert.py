"""LoRA adapters that older versions of peft wrote for experts one by one, as ones of all experts of a layer.

Experts were modules then. An adapter of rank r on an expert's gate and up projections is one of rank 2r on both
together: its A is one above the other, its B has them on its diagonal. All other modules of the adapter get that rank,
too, with zeros that training leaves at zero; twice the alpha keeps the scale.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_mux.errors import UserError

_PREFIX = "base_model.model."
_KEY = re.compile(
    r"(?P<layer>.+)\.(?:block_sparse_moe|mlp)\.experts\.(?P<expert>\d+)\."
    r"(?P<name>w[123]|gate_proj|up_proj|down_proj)\.lora_(?P<side>[AB])\.weight"
)
_ROLES = {"w1": "gate", "gate_proj": "gate", "w3": "up", "up_proj": "up", "w2": "down", "down_proj": "down"}


def fused_config(config: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """Return the config of the adapter on all experts of a layer; unchanged if `keys` holds none of single experts.

    Args:
        config: Of the stored adapter.
        keys: Names of its tensors.

    Raises:
        UserError: The adapter cannot be represented exactly so.
    """
    roles = {_ROLES[match["name"]] for key in keys if (match := _KEY.fullmatch(key)) is not None}
    if not roles:
        return dict(config)
    if len(roles & {"gate", "up"}) == 1:
        raise UserError("holds adapters of one of the experts' gate and up projections without the other")
    times = 2 if "gate" in roles else 1
    if times == 2 and config.get("use_rslora"):
        raise UserError(
            "holds adapters of single experts with use_rslora, whose scale two of them together lack"
        )
    others = {
        key.removeprefix(_PREFIX).rpartition(".lora_")[0]
        for key in keys
        if not _KEY.fullmatch(key) and ".lora_" in key
    }
    parameters = [f"mlp.experts.{name}_proj" for name in ("gate_up", "down") if name[:4] in roles]
    return {
        **config,
        "target_modules": sorted(others),
        "target_parameters": parameters,
        "r": times * int(config["r"]),
        "lora_alpha": times * config["lora_alpha"],
    }


def fused_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the adapter on all experts of a layer, in peft's present format.

    Args:
        tensors: Of the stored adapter, which `fused_config` has accepted.

    Raises:
        UserError: Some expert of a layer lacks some of the tensors that others have.
    """
    of_matrices: dict[str, dict[tuple[int, str], dict[str, Tensor]]] = {}
    others: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None:
            others[key] = tensor
        else:
            place = int(match["expert"]), _ROLES[match["name"]]
            of_matrices.setdefault(match["layer"], {}).setdefault(place, {})[match["side"]] = tensor
    if not of_matrices:
        return others
    roles = {role for of_layer in of_matrices.values() for _, role in of_layer}
    count = 1 + max(expert for of_layer in of_matrices.values() for expert, _ in of_layer)
    for layer, of_layer in of_matrices.items():
        for expert in range(count):
            if any(of_layer.get((expert, role), {}).keys() != {"A", "B"} for role in roles):
                raise UserError(f"{layer}: expert {expert} lacks adapters that other experts have")
    rank = next(iter(next(iter(of_matrices.values())).values()))["A"].shape[0] * (2 if "gate" in roles else 1)
    made = {key: _padded(tensor, rank, key) for key, tensor in others.items()}
    for layer, of_layer in of_matrices.items():
        for role in sorted(roles - {"up"}):
            inner = ".base_layer" if role == "gate" and "down" in roles else ""
            both = [_pair(of_layer, expert, role) for expert in range(count)]
            key = f"{layer}.mlp.experts{inner}.lora_"
            a = [_padded(a, rank, "lora_A") for a, _ in both]
            b = [_padded(b, rank, "lora_B") for _, b in both]
            made[f"{key}A.weight"] = torch.cat(a)
            made[f"{key}B.weight"] = torch.stack(b, dim=2).flatten(1)  # an expert's number is fastest
    return made


def _pair(
    of_layer: Mapping[tuple[int, str], Mapping[str, Tensor]], expert: int, role: str
) -> tuple[Tensor, Tensor]:
    """A and B of an expert's down projection, or of its gate and up projections together."""
    factors = of_layer[expert, role]
    if role == "down":
        return factors["A"], factors["B"]
    up = of_layer[expert, "up"]
    block: Tensor = torch.block_diag(factors["B"], up["B"])
    return torch.cat((factors["A"], up["A"])), block


def _padded(tensor: Tensor, rank: int, key: str) -> Tensor:
    """A matrix with zeros for what it lacks of a rank."""
    if "lora_A" in key:
        return F.pad(tensor, (0, 0, 0, rank - tensor.shape[0]))
    return F.pad(tensor, (0, rank - tensor.shape[1])).contiguous()
