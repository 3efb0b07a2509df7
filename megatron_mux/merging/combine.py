"""Combines several LoRA adapters into one, as peft's `add_weighted_adapter` does, from their files alone.

The result's scale is 1 in every module: scales and weights are in its matrices.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_mux.adapters.peft_format import CONFIG, WEIGHTS
from megatron_mux.errors import UserError
from megatron_mux.files import new_directory, write
from megatron_mux.hub_cache import find_model
from megatron_mux.merging.hf_directory import write_json
from megatron_mux.merging.low_rank import lora_scale, refuse_variants
from megatron_mux.merging.provenance import Provenance
from megatron_mux.merging.stored_adapter import PREFIX, StoredAdapter
from megatron_mux.model_card import Parent, base_model_name, combined_card
from megatron_mux.tensor_file import write_tensors

_ELEMENTWISE = ("linear", "ties", "dare_linear", "dare_ties", "magnitude_prune")
"""Methods that combine A with A and B with B, element by element."""
_BY_SVD = ("svd", *(f"{name}_svd" for name in _ELEMENTWISE[1:]))
"""Methods that combine the products, and factor the result."""
METHODS = (_ELEMENTWISE[0], "cat", *_ELEMENTWISE[1:], *_BY_SVD)

_NOT_COMBINED = ("use_dora", "target_parameters", "modules_to_save", "trainable_token_indices", "lora_bias")
_OF_BACKBONE = ".base_layer."
_ENDS = {".lora_A.weight": ".lora_B.weight", ".lora_embedding_A": ".lora_embedding_B"}


@dataclass(frozen=True)
class Recipe:
    """How adapters are combined; names and meanings as in peft's `add_weighted_adapter`.

    Attributes:
        method: One of `METHODS`.
        density: The part of the values that pruning methods keep.
        majority_sign_method: How TIES elects a sign: by the sum of values, or by their number.
        svd_rank: Rank of the result of methods with `svd`; None: the largest of the adapters'.
        seed: Of DARE's random choices.
    """

    method: str = "linear"
    density: float | None = None
    majority_sign_method: str = "total"
    svd_rank: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        prunes = self.method not in ("linear", "cat", "svd")
        if self.method not in METHODS:
            raise UserError(f"--method must be one of {', '.join(METHODS)}, got {self.method}.")
        if prunes and self.density is None:
            raise UserError(
                f"--method {self.method} prunes values: give --density, the part of them to keep."
            )
        if not prunes and self.density is not None:
            raise UserError(f"--density: {self.method} prunes nothing; leave it out.")
        if self.density is not None and not 0 < self.density <= 1:
            raise UserError(f"--density must be above 0 and at most 1, got {self.density:g}.")
        if self.svd_rank is not None and self.method not in _BY_SVD:
            raise UserError(f"--svd-rank: {self.method} factors nothing; leave it out.")

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the result, for people."""
        found: dict[str, Any] = {"method": self.method, "density": self.density, "svd_rank": self.svd_rank}
        if "ties" in self.method:
            found["majority_sign_method"] = self.majority_sign_method
        if "dare" in self.method:
            found["seed"] = self.seed
        return found


@dataclass(frozen=True)
class Combined:
    """What a combination is.

    Attributes:
        rank: Largest rank of a module.
        modules: Number of modules.
        size: Bytes of its tensors.
        seconds: Time that it took.
    """

    rank: int
    modules: int
    size: int
    seconds: float


@dataclass(frozen=True)
class _Member:
    """One adapter of a combination."""

    name: str
    stored: StoredAdapter
    weight: float
    modules: Mapping[str, str]

    @classmethod
    def read(cls, name: str, directory: Path, weight: float) -> _Member:
        """Read an adapter's config and the shapes of its tensors; raises `UserError` if it cannot be combined."""
        stored = StoredAdapter(directory)
        config = stored.config
        if stored.kind != "LORA":
            raise UserError(f"{directory} is a {stored.kind} adapter: only LORA adapters can be combined.")
        refuse_variants(stored)
        for part in _NOT_COMBINED:
            if config.get(part):
                raise UserError(
                    f"{directory} has {part}, which peft's add_weighted_adapter does not combine: merge the adapter "
                    "into its backbone instead (megatron-mux merge)."
                )
        modules = {path: end for end in _ENDS for path in stored.paths(end)}
        known = {PREFIX + path + side for path, end in modules.items() for side in (end, _ENDS[end])}
        strange = sorted(key for key in stored.shapes.keys() ^ known if _OF_BACKBONE not in key)
        if strange or not modules:
            raise UserError(f"{stored.weights} is no plain LoRA adapter: {(strange or ['no matrices'])[0]}.")
        return cls(name, stored, weight, modules)

    @property
    def largest_rank(self) -> int:
        """As peft counts it."""
        patterns: Mapping[str, int] = self.stored.config.get("rank_pattern") or {}
        return max(int(self.stored.config.get("r", 8)), *patterns.values(), 1)

    def scale(self, path: str) -> float:
        """The factor of a module's product."""
        return lora_scale(self.stored, path, self.stored.shapes[PREFIX + path + self.modules[path]][0])

    def matrices(self, path: str) -> tuple[Tensor, Tensor]:
        """A and B of a module."""
        end = self.modules[path]
        return self.stored.read(PREFIX + path + end), self.stored.read(PREFIX + path + _ENDS[end])


def combine(
    adapters: Mapping[str, str | Path],
    weights: Sequence[float],
    recipe: Recipe,
    output: str | Path,
    backbone: str | Path | None = None,
) -> Combined:
    """Write the combination of several adapters.

    Args:
        adapters: Their directories, in peft's format, by what they are to be called.
        weights: Of each of them; may be negative.
        recipe: How.
        output: Directory to make.
        backbone: Their backbone, whose config gives the order of modules in which DARE draws; None: by their paths.

    Raises:
        UserError: The adapters cannot be combined so, or the output exists.
    """
    began = time.monotonic()
    output = Path(output)
    members = [
        _Member.read(name, Path(path), weight)
        for (name, path), weight in zip(adapters.items(), weights, strict=True)
    ]
    # As in peft: whatever the method, one adapter is only scaled.
    method = "linear" if len(members) == 1 else recipe.method
    rank = _rank(members, recipe, method)
    paths = _in_order(
        {path for member in members for path in member.modules},
        None if backbone is None else find_model(backbone),
    )
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    with new_directory("--output", output) as directory, torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        for path in paths:
            having = [member for member in members if path in member.modules]
            _check_shapes(having, path)
            a, b = _combined(having, path, recipe, method, rank)
            end = having[0].modules[path]
            ranks[path] = a.shape[0]
            tensors |= {PREFIX + path + end: a, PREFIX + path + _ENDS[end]: b}
        tensors |= _embeddings(members)
        config = _config(members, ranks, rank)
        write_json(directory / CONFIG, config)
        trained = {Provenance.read(Path(path)) for path in adapters.values()}
        header = trained.pop().header if len(trained) == 1 else {}
        write_tensors(directory / WEIGHTS, tensors, header)
        parents = [(Parent(m.name, m.stored.fingerprint()), m.weight, m.stored.directory) for m in members]
        card = combined_card(
            base_model_name(config.get("base_model_name_or_path")),
            parents,
            {**recipe.settings, "method": method},
            rank,
        )
        write(directory / "README.md", card.encode())
    size = sum(tensor.nbytes for tensor in tensors.values())
    return Combined(max(ranks.values()), len(paths), size, time.monotonic() - began)


def _embeddings(members: Sequence[_Member]) -> dict[str, Tensor]:
    """The weights that peft stores beside the matrices of an adapted embedding: the backbone's own, all alike."""
    found: dict[str, Tensor] = {}
    for member in members:
        for key in (key for key in member.stored.shapes if _OF_BACKBONE in key):
            weight = member.stored.read(key)
            if not torch.equal(found.setdefault(key, weight), weight):
                raise UserError(
                    f"{key.removeprefix(PREFIX)} differs between the adapters, which have changed it."
                )
    return found


def _rank(members: Sequence[_Member], recipe: Recipe, method: str) -> int:
    """The rank of the result; raises `UserError` where a method needs equal ranks."""
    ranks = [member.largest_rank for member in members]
    if method == "cat":
        return sum(ranks)
    if method in _BY_SVD:
        return recipe.svd_rank or max(ranks)
    if len(set(ranks)) > 1:
        listed = ", ".join(f"{m.name} {rank}" for m, rank in zip(members, ranks, strict=True))
        raise UserError(f"--method {method} needs adapters of one rank, not {listed}: use cat or svd.")
    return ranks[0]


def _check_shapes(members: Sequence[_Member], path: str) -> None:
    """Raise `UserError` unless all adapters of a module have matrices of the same widths."""
    sizes = {}
    for member in members:
        end = member.modules[path]
        a, b = (member.stored.shapes[PREFIX + path + side] for side in (end, _ENDS[end]))
        sizes[member.name] = (a[1], b[0])
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} {list(size)}" for name, size in sizes.items())
        raise UserError(f"the adapters are of different backbones: {path} has inputs and outputs {listed}.")


def _combined(
    members: Sequence[_Member], path: str, recipe: Recipe, method: str, rank: int
) -> tuple[Tensor, Tensor]:
    """A and B of a module's combination; their product is the whole update."""
    pairs = [member.matrices(path) for member in members]
    scales = [member.weight * member.scale(path) for member in members]
    if method == "cat":
        a = torch.cat(
            [a * member.weight * member.scale(path) for (a, _), member in zip(pairs, members, strict=True)]
        )
        b = torch.cat([b for _, b in pairs], dim=1)
        return a, b
    if method in _BY_SVD:
        return _factored(members, path, recipe, rank)
    if len({a.shape for a, _ in pairs}) > 1:
        raise UserError(f"--method {method}: {path} has different ranks in the adapters: use cat or svd.")
    # Half of each factor on A, half on B; its sign on A alone.
    on_a = torch.tensor([math.copysign(math.sqrt(abs(scale)), scale) for scale in scales])
    on_b = torch.tensor([math.sqrt(abs(scale)) for scale in scales])
    mix = _mix(recipe, method)
    return mix([a for a, _ in pairs], on_a), mix([b for _, b in pairs], on_b)


def _factored(members: Sequence[_Member], path: str, recipe: Recipe, rank: int) -> tuple[Tensor, Tensor]:
    """The best factors of the combination of products."""
    flipped = members[0].modules[path] == ".lora_embedding_A" or bool(
        members[0].stored.config.get("fan_in_fan_out")
    )
    products = []
    for member in members:
        a, b = member.matrices(path)
        product = b @ a
        products.append((product.t() if flipped else product) * member.scale(path))
    mix = _mix(recipe, recipe.method.removesuffix("_svd").replace("svd", "linear"))
    total = mix(products, torch.tensor([member.weight for member in members]))
    u, s, v = torch.linalg.svd(total.t() if flipped else total, full_matrices=False)
    kept = min(rank, s.numel())
    return v[:kept].contiguous(), (u[:, :kept] @ torch.diag(s[:kept])).contiguous()


def _mix(recipe: Recipe, method: str) -> Callable[[list[Tensor], Tensor], Tensor]:
    """peft's function for tensors and their weights."""
    from peft.utils import merge_utils

    if method == "linear":
        mix: Callable[[list[Tensor], Tensor], Tensor] = merge_utils.task_arithmetic
        return mix
    function = getattr(merge_utils, method)
    options: tuple[Any, ...] = (recipe.density,)
    if "ties" in method:
        options += (recipe.majority_sign_method,)
    return lambda tensors, weights: function(tensors, weights, *options)


def _config(members: Sequence[_Member], ranks: Mapping[str, int], rank: int) -> dict[str, Any]:
    """The result's `adapter_config.json`: the first adapter's, with scale 1 and all adapters' modules."""
    configs = [member.stored.config for member in members]
    lists = [config["target_modules"] for config in configs if isinstance(config.get("target_modules"), list)]
    plain = len(lists) == len(configs) and not any(
        config.get(name)
        for config in configs
        for name in ("layers_to_transform", "layers_pattern", "exclude_modules")
    )
    targets = sorted({name for names in lists for name in names}) if plain else sorted(ranks)
    others = {re.escape(path): own for path, own in ranks.items() if own != rank}
    return {
        **configs[0],
        "r": rank,
        "lora_alpha": rank,
        "use_rslora": False,
        "init_lora_weights": True,
        "rank_pattern": others,
        "alpha_pattern": dict(others),
        "target_modules": targets,
        "layers_to_transform": None,
        "layers_pattern": None,
        "exclude_modules": None,
    }


def _in_order(paths: set[str], backbone: Path | None) -> list[str]:
    """Modules in the order in which the model has them, or by their paths, numbers counted as numbers."""
    if backbone is None:
        return sorted(
            paths, key=lambda path: [word.zfill(9) if word.isdigit() else word for word in path.split(".")]
        )
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(backbone))
    except (OSError, ValueError) as error:
        raise UserError(f"--backbone {backbone}: its config.json cannot be read: {error}") from None
    order = {name: place for place, (name, _) in enumerate(model.named_modules())}
    strange = sorted(paths - order.keys())
    if strange:
        raise UserError(f"--backbone {backbone} has no {strange[0]}, which the adapters adapt.")
    return sorted(paths, key=order.__getitem__)
