"""Matching the tensors that a backbone needs with those that its checkpoint stores."""

from __future__ import annotations

import re
from collections.abc import Collection

import torch

from megatron_mux.backbone.checkpoint import Checkpoint
from megatron_mux.backbone.quantised_source import Companion, stored_tensors
from megatron_mux.base_ops import EXPERT_OPS
from megatron_mux.errors import UserError
from megatron_mux.expert_shape import Experts
from megatron_mux.shape import BackboneShape
from megatron_mux.tensor_names import Names

_CHUNK_BYTES = 1 << 20


def expected(shape: BackboneShape) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this shape must hold, with its shape."""
    names, norm = shape.names, shape.norm_leaves
    found: dict[str, tuple[int, ...]] = {f"{names.embedding}.weight": (shape.vocab, shape.hidden)}
    if names.positions is not None:
        found[f"{names.positions}.weight"] = (shape.learned_positions, shape.hidden)
    found |= {f"{names.final_norm}.{leaf}": (shape.hidden,) for leaf in norm}
    if not shape.tied:
        found[f"{names.head}.weight"] = (shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        prefix = names.layer.format(layer)
        for path in names.layer_norms.values():
            found |= {f"{prefix}.{path}.{leaf}": (shape.hidden,) for leaf in norm}
        found |= {f"{prefix}.{path}.weight": (width,) for path, width in shape.inner_norms.values()}
        if shape.experts is not None and shape.has_experts(layer):
            found |= _expected_experts(shape, shape.experts, prefix)
        for op in (op for op in shape.ops(layer) if op not in EXPERT_OPS):
            for module in names.ops[op]:
                out = sum(shape.role_width(op, role) for role in module.roles)
                weight = (out, shape.in_features(op))
                found[f"{prefix}.{module.path}.weight"] = weight[::-1] if names.transposed else weight
                if shape.biases[op]:
                    found[f"{prefix}.{module.path}.bias"] = (out,)
    return found


def _expected_experts(shape: BackboneShape, experts: Experts, prefix: str) -> dict[str, tuple[int, ...]]:
    """The router and the routed experts of the layer at `prefix`, as checkpoints store them: one by one."""
    names = experts.names
    found: dict[str, tuple[int, ...]] = {
        f"{prefix}.{names.stored_router}.weight": (experts.count, shape.hidden)
    }
    if experts.routing.bias:
        found[f"{prefix}.{names.stored_router}.{names.router_bias}"] = (experts.count,)
    return found | _expert_weights(shape, experts, prefix)


def _expert_weights(shape: BackboneShape, experts: Experts, prefix: str) -> dict[str, tuple[int, int]]:
    names, found = experts.names, dict[str, tuple[int, int]]()
    for expert in range(experts.count):
        module = f"{prefix}.{names.stored.format(expert)}"
        found |= {f"{module}.{leaf}.weight": (experts.ffn, shape.hidden) for leaf in (names.gate, names.up)}
        found[f"{module}.{names.down}.weight"] = (shape.hidden, experts.ffn)
    return found


def quantised_weights(shape: BackboneShape) -> dict[str, tuple[int, int]]:
    """Full Hugging Face names of the weights that are held quantised, with their output and input features."""
    quantisation = shape.quantisation
    if quantisation is None:
        return {}
    found = {
        f"{module.path}.weight": (module.out_features, module.in_features)
        for module in shape.modules
        if not module.experts and quantisation.covers(module.path)
    }
    for layer in filter(shape.has_experts, range(shape.layers)):
        assert shape.experts is not None
        for name, size in _expert_weights(shape, shape.experts, shape.names.layer.format(layer)).items():
            if quantisation.covers(name.removesuffix(".weight"), expert=True):
                found[name] = size
    return found


def _needed(shape: BackboneShape) -> dict[str, Companion]:
    """Every tensor that a checkpoint of this shape must hold, and those that it may hold; any dtype that is known."""
    needed = {name: Companion((), (size,)) for name, size in expected(shape).items()}
    quantisation = shape.quantisation
    if quantisation is None or quantisation.is_made:
        return needed
    for name, size in quantised_weights(shape).items():
        del needed[name]
        needed |= stored_tensors(quantisation, name, size)
    return needed


def resolve(
    shape: BackboneShape, checkpoint: Checkpoint, wanted: Collection[str] | None = None
) -> dict[str, str]:
    """Match the tensors that the shape needs with those that the checkpoint stores.

    Args:
        wanted: Full Hugging Face names of the tensors that these files have to hold; None: all.

    Returns:
        Full Hugging Face name to stored name (checkpoints of the bare model lack its prefix).

    Raises:
        UserError: Tensors are missing, superfluous, or of another shape or dtype; names their files.
    """
    names = shape.names
    found: dict[str, str] = {}
    missing: list[str] = []
    wrong: list[str] = []
    misshapen: list[str] = []
    needed = _needed(shape)
    for name in needed if wanted is None else [name for name in needed if name in wanted]:
        dtypes, sizes, optional = needed[name]
        stored = next((n for n in (name, name.removeprefix(names.base)) if n in checkpoint.tensors), None)
        if stored is None:
            missing += [] if optional else [name]
            continue
        found[name] = stored
        record = checkpoint.tensors[stored]
        # First the dtype: what is quantised without the config's saying so has another shape, too.
        if (problem := checkpoint.check_dtype(stored, dtypes)) is not None:
            wrong.append(problem)
        elif sizes and record.shape not in sizes:
            misshapen.append(
                f"{record.file} holds {stored} of shape {list(record.shape)}, but config.json asks for {list(sizes[0])}"
            )
    problems = [_with_count(alike) for alike in (wrong, misshapen) if alike]
    if shape.tied and not problems:
        problems += _untied(names, found, checkpoint)
    ignorable = [re.compile(pattern) for pattern in names.ignorable]
    ignorable += [re.compile(re.escape(f"{names.head}.weight"))] * shape.tied
    left = sorted(set(checkpoint.tensors) - set(found.values()))
    left = [name for name in left if not any(pattern.fullmatch(name) for pattern in ignorable)]
    if missing:
        problems.append(
            f"{checkpoint.path} lacks {_some(missing)}, which a {shape.family} of its config.json has."
        )
    if left:
        record = checkpoint.tensors[left[0]]
        problems.append(
            f"{record.file} holds {_some(left)}, which a {shape.family} of its config.json has no place for."
        )
    if problems:
        raise UserError(*problems)
    return found


def _untied(names: Names, found: dict[str, str], checkpoint: Checkpoint) -> list[str]:
    """The problem if config.json ties the output layer to the embedding, yet a different one is stored.

    `transformers` warns and computes with the stored one; we do not guess.
    """
    head, embedding = f"{names.head}.weight", found.get(f"{names.embedding}.weight")
    if head not in checkpoint.tensors or embedding is None:
        return []
    theirs, ours = checkpoint.tensors[head], checkpoint.tensors[embedding]
    if theirs.shape == ours.shape and checkpoint.check_dtype(head) is None:
        everything = (slice(0, ours.shape[0]), slice(0, ours.shape[1]), _CHUNK_BYTES)
        pairs = zip(
            checkpoint.read_chunks(head, *everything),
            checkpoint.read_chunks(embedding, *everything),
            strict=True,
        )
        if all(torch.equal(a, b) for (_, a), (_, b) in pairs):
            return []
    problem = (
        f"{theirs.file} holds {head} and it differs from {embedding}, but config.json ties the two: set its "
        f"tie_word_embeddings to false to use {head}, or remove the tensor."
    )
    return [problem]


def _with_count(alike: list[str]) -> str:
    """The first of some problems, and how many there are like it."""
    more = f" ({len(alike) - 1} more tensors like it)" if len(alike) > 1 else ""
    return f"{alike[0]}{more}."


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
