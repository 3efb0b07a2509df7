"""Models of transformers computed in fp64 throughout: their norms and routers cast to fp32 whatever the dtype."""

from __future__ import annotations

import inspect
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import torch
from torch import nn


def exact_model(path: Path) -> Any:
    """The model of a checkpoint in fp64, in evaluation mode, its experts computed one by one."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, experts_implementation="eager"
    )
    model = model.to(torch.float64).eval()
    for name, module in list(model.named_modules()):
        kind = type(module).__name__
        if "RMSNorm" in kind:
            eps = getattr(module, "variance_epsilon", None) or module.eps
            exact = nn.RMSNorm(module.weight.shape[0], eps=eps, dtype=torch.float64)
            offset = 1.0 if "Gemma" in kind else 0.0  # weights are stored less one
            exact.weight = nn.Parameter(module.weight.detach() + offset)
            model.set_submodule(name, exact)
        elif kind.lower().endswith("topkrouter"):
            _widen(module)
    if model.config.model_type == "deepseek_v2":
        _rotate_widely(sys.modules[type(model).__module__])
        rotary = model.model.rotary_emb
        rotary.forward = types.MethodType(_turns, rotary)
    return model


def _turns(rotary: Any, x: Any, position_ids: Any) -> Any:
    """DeepSeek-V2's turns, fp32 as there; `torch.polar` rounds the last bit of cosines otherwise than `cos`."""
    angles = position_ids[..., None].float() * rotary.inv_freq.float()
    return torch.complex(angles.cos(), angles.sin()) * rotary.attention_scaling


def _rotate_widely(module: Any) -> None:
    """Let DeepSeek-V2 rotate fp64 features in fp64."""
    of_transformers = module.apply_rotary_emb
    if of_transformers.__module__ != module.__name__:
        return

    def rotate(xq: Any, xk: Any, turns: Any) -> Any:
        if xq.dtype != torch.float64:
            return of_transformers(xq, xk, turns)
        return tuple(
            torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns.unsqueeze(1)).flatten(
                3
            )
            for x in (xq, xk)
        )

    module.apply_rotary_emb = rotate


def _widen(router: Any) -> None:
    """Let a router compute in fp64, by its own code with the casts replaced."""
    source = textwrap.dedent(inspect.getsource(type(router).forward))
    for cast, wide in (
        ("torch.float32", "torch.float64"),
        ("torch.float,", "torch.float64,"),
        (".float()", ".double()"),
    ):
        source = source.replace(cast, wide)
    made: dict[str, Any] = {}
    exec(source, vars(sys.modules[type(router).__module__]), made)
    router.forward = types.MethodType(made["forward"], router)
