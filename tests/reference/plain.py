"""Bottleneck adapters and diff pruning trained alone, in plain PyTorch: hooks on the Hugging Face model's modules."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .loop import Example, Recipe, SoloResult, train
from .peft_solo import load_model

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


def targeted(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """Modules whose path is, or ends after a dot in, one of `names`."""
    found = {
        path: module
        for path, module in model.named_modules()
        if any(path == name or path.endswith("." + name) for name in names)
    }
    assert found, names
    return found


def widths(module: nn.Module) -> tuple[int, int]:
    """Output and input width; GPT-2's Conv1D stores its weight the other way round."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    rows, columns = weight.shape
    return (columns, rows) if hasattr(module, "nf") else (rows, columns)


def key(path: str, suffix: str) -> str:
    """Saved name of a tensor, in peft's manner."""
    return f"base_model.model.{path}.{suffix}"


class Bottleneck:
    """`y + scaling * up(act(down(y)))` after every targeted module.

    Args:
        model: Gets the hooks.
        section: The task's `adapter` section.
        initial: Its tensors to start from.
    """

    def __init__(self, model: nn.Module, section: Mapping[str, Any], initial: Mapping[str, Tensor]) -> None:
        self.parameters = {name: nn.Parameter(value.clone()) for name, value in initial.items()}
        act, scaling = ACTIVATIONS[section.get("non_linearity", "relu")], section.get("scaling", 1.0)
        for path, module in targeted(model, section["target_modules"]).items():
            down, down_bias, up, up_bias = (self.parameters[name] for name in self.keys(path))

            def hook(
                module: nn.Module,
                inputs: Any,
                y: Tensor,
                p: tuple[Tensor, ...] = (down, down_bias, up, up_bias),
            ) -> Tensor:
                added: Tensor = scaling * (act(y @ p[0].T + p[1]) @ p[2].T + p[3])
                return y + added

            module.register_forward_hook(hook)

    @staticmethod
    def keys(path: str) -> tuple[str, str, str, str]:
        """Saved names at a module."""
        return (
            key(path, "adapter_down.weight"),
            key(path, "adapter_down.bias"),
            key(path, "adapter_up.weight"),
            key(path, "adapter_up.bias"),
        )

    @staticmethod
    def shapes(model: nn.Module, section: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors."""
        size = section["bottleneck_size"]
        shapes: dict[str, tuple[int, ...]] = {}
        for path, module in targeted(model, section["target_modules"]).items():
            width, _ = widths(module)
            shapes |= dict(
                zip(Bottleneck.keys(path), ((size, width), (size,), (width, size), (width,)), strict=True)
            )
        return shapes


class DiffPruning:
    """`y + x (z * d)^T` at every targeted module, with the mask `z` of Louizos et al. (2018) and Guo et al. (2021).

    The derivative is autograd's. Only the noise is megatron_mux's own: a hash that any other code would have to copy.

    Args:
        model: Gets the hooks.
        section: The task's `adapter` section.
        initial: Its tensors to start from.
        total_steps: Steps of the task.
        seed: Of the task.
    """

    def __init__(
        self,
        model: nn.Module,
        section: Mapping[str, Any],
        initial: Mapping[str, Tensor],
        total_steps: int,
        seed: int,
    ) -> None:
        self.parameters = {name: nn.Parameter(value.clone()) for name, value in initial.items()}
        self.sparsity: float = section.get("sparsity", 0.995)
        self.l0_weight: float = section.get("l0_weight", 1.25e-7)
        self.freeze_at = math.ceil(total_steps * 2 / 3)
        self.seed = seed
        self.step = 0
        self.kept: dict[str, Tensor] = {}
        self.paths = list(targeted(model, section["target_modules"]))
        for path in self.paths:

            def hook(module: nn.Module, inputs: tuple[Tensor, ...], y: Tensor, path: str = path) -> Tensor:
                return y + inputs[0] @ self.difference(path).T

            model.get_submodule(path).register_forward_hook(hook)

    @staticmethod
    def shapes(model: nn.Module, section: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors."""
        return {
            key(path, f"diff.{what}"): widths(module)
            for path, module in targeted(model, section["target_modules"]).items()
            for what in ("weight", "log_alpha")
        }

    def difference(self, path: str) -> Tensor:
        """`[out, in]` as this training step uses it."""
        d, log_alpha = self.tensors(path)
        if path in self.kept:
            return d * self.kept[path]
        u = noise(self.seed, self.step, path, d.shape).to(d.dtype)
        return d * stretched(log_alpha + torch.log(u) - torch.log(1 - u))

    def tensors(self, path: str) -> tuple[Tensor, Tensor]:
        """d and the logits of the mask."""
        return self.parameters[key(path, "diff.weight")], self.parameters[key(path, "diff.log_alpha")]

    def penalty(self, step: int) -> None:
        """Gradient of the expected number of non-zeros, while the mask is relaxed."""
        relaxed = [self.tensors(path)[1] for path in self.paths if path not in self.kept]
        if relaxed:
            # P(z > 0) = P(log_alpha + logistic noise > logit(1.5 / 3)), and logit(1/2) = 0.
            expected: Tensor = torch.stack([torch.sigmoid(log_alpha).sum() for log_alpha in relaxed]).sum()
            (self.l0_weight * expected).backward()

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Freeze the mask after two thirds of the steps, and hold it."""
        self.step = step
        for path in self.paths:
            d, log_alpha = self.tensors(path)
            if step == self.freeze_at:
                d.copy_(d * stretched(log_alpha))
                keep = d.numel() - round(self.sparsity * d.numel())
                kept = torch.zeros(d.numel(), dtype=d.dtype)
                kept[d.abs().flatten().topk(keep).indices] = 1
                self.kept[path] = kept.view_as(d)
            if path in self.kept:
                d.mul_(self.kept[path])
                log_alpha.copy_(40 * self.kept[path] - 20)


def stretched(logits: Tensor) -> Tensor:
    """The mask in [0, 1] that logits stand for."""
    return torch.clamp(3 * torch.sigmoid(logits) - 1.5, 0, 1)


def noise(seed: int, step: int, path: str, shape: torch.Size) -> Tensor:
    """Uniform numbers of a module in a training step."""
    from megatron_mux.kernels.dropout import key_of, uniform

    return uniform(key_of(seed, step, "diff_pruning", path), torch.arange(shape[0]), torch.arange(shape[1]))


def final_difference(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What saved tensors of diff pruning stand for, by module."""
    modules = {name.removesuffix(".diff.weight") for name in tensors if name.endswith(".diff.weight")}
    return {
        m: tensors[f"{m}.diff.weight"] * stretched(tensors[f"{m}.diff.log_alpha"]) for m in sorted(modules)
    }


def random_adapter(
    path: Path | str, section: Mapping[str, Any], seed: int, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """An adapter that does something; masks of diff pruning in every state between shut and open."""
    kind = Bottleneck if section["peft_type"] == "BOTTLENECK" else DiffPruning
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in sorted(kind.shapes(load_model(path), section).items()):
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        tensors[name] = (values * 2 + 1 if name.endswith("log_alpha") else values * 0.1).to(dtype)
    return tensors


def train_solo(
    path: Path | str,
    section: Mapping[str, Any],
    training: Mapping[str, Any],
    steps: Sequence[Sequence[Example]],
    initial: Mapping[str, Tensor],
    dtype: torch.dtype = torch.float32,
) -> SoloResult:
    """Train one task alone, from `initial`, on `steps` (see `reference.loop.train`)."""
    model, recipe = load_model(path, dtype), Recipe.of(training)
    if section["peft_type"] == "BOTTLENECK":
        method = Bottleneck(model, section, initial)
        return train(model, method.parameters, steps, recipe, lambda: detached(method.parameters))
    pruning = DiffPruning(model, section, initial, recipe.max_steps, training["seed"])
    return train(
        model,
        pruning.parameters,
        steps,
        recipe,
        lambda: detached(pruning.parameters),
        penalty=pruning.penalty,
        after_step=pruning.after_step,
    )


def detached(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Copies of the values."""
    return {name: value.detach().clone() for name, value in parameters.items()}
