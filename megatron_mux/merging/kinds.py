"""How each kind of adapter changes weights, or why it cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from megatron_mux.adapters.diff_pruning import gate
from megatron_mux.adapters.selection import value_of
from megatron_mux.errors import UserError
from megatron_mux.merging.low_rank import LowRank, VeraMatrices, lora_terms
from megatron_mux.merging.stored_adapter import PREFIX, StoredAdapter
from megatron_mux.merging.weights import Change, Changes


def merge_lora(adapter: StoredAdapter, changes: Changes) -> set[str]:
    """LoRA: add the products; with DoRA, scale each row of the sum to its magnitude."""
    used: set[str] = set()
    names = changes.info.shape.names
    is_tied = changes.info.shape.tied and bool(adapter.config.get("ensure_weight_tying"))
    for term in lora_terms(adapter, changes.info.shape):
        used |= {term.a, term.b}
        check_fit(term, changes)
        if term.experts:
            _merge_experts(term, changes)
            continue
        if term.magnitude is not None:
            used.add(term.magnitude)
            _check(adapter, term.magnitude, {term.shape[:1]})
        if is_tied and term.path == names.head and adapter.paths(".lora_embedding_A"):
            continue  # the embedding's product once more, transposed
        changes.add(term.path, partial(_plus_product, term), shared=is_tied)
        bias = term.b.removesuffix("weight") + "bias"
        if bias in adapter.shapes:
            used.add(bias)
            _merge_bias(term, bias, changes)
    return used


def check_fit(term: LowRank, changes: Changes) -> None:
    """Check that a product is as large as the backbone's weight.

    Raises:
        UserError: It is not, or the backbone has no such module.
    """
    experts = changes.info.shape.experts
    if term.experts:
        assert experts is not None
        down = (changes.info.shape.hidden, experts.ffn)
        wanted = down if term.parameter == "down_proj" else (2 * experts.ffn, changes.info.shape.hidden)
    else:
        size = changes.size(term.path, term.a)
        wanted = size[::-1] if term.embedding else size
    if term.shape != wanted:
        raise _misfit(term.adapter, f"{term.b} and {term.a}", term.shape, wanted)


def _plus_product(term: LowRank, weight: Tensor) -> Tensor:
    a, b = term.matrices()
    product = b @ a
    total = weight + term.scale * (product.t() if term.embedding else product)
    if term.magnitude is None:
        return total
    magnitude = term.adapter.read(term.magnitude)
    scaled: Tensor = total * (magnitude / torch.linalg.vector_norm(total, dim=1))[:, None]
    return scaled


def _merge_experts(term: LowRank, changes: Changes) -> None:
    def change(expert: int, rows: slice) -> Change:
        def of_expert(weight: Tensor) -> Tensor:
            a, b = (matrices[expert] for matrices in term.experts_matrices())
            return weight + term.scale * (b[rows] @ a)

        return of_expert

    changes.add_to_experts(term.path, change, term.parameter == "down_proj")


def _merge_bias(term: LowRank, key: str, changes: Changes) -> None:
    if changes.name(term.path, "bias") is None:
        raise UserError(f"{term.adapter.weights}: {key} has no bias to be added to: {term.path} has none.")
    changes.add(term.path, lambda bias: bias + term.scale * term.adapter.read(key), "bias")


def merge_vera(adapter: StoredAdapter, changes: Changes) -> set[str]:
    """VeRA: add the products of the scaled random matrices."""
    used = {key for key in VeraMatrices.KEYS if key in adapter.shapes}
    matrices = VeraMatrices(adapter, changes.info.shape)
    for path, size, keys in check_vera(adapter, matrices, changes):

        def change(weight: Tensor, path: str = path, size: tuple[int, int] = size) -> Tensor:
            a, b = matrices.of(adapter, path, *size)
            return weight + b @ a

        changes.add(path, change)
        used |= keys
    return used


def check_vera(
    adapter: StoredAdapter, matrices: VeraMatrices, changes: Changes
) -> Iterator[tuple[str, tuple[int, int], set[str]]]:
    """Yield each module's path, output and input width, and keys of its vectors.

    Raises:
        UserError: They do not fit the backbone.
    """
    for path in adapter.paths(".vera_lambda_b"):
        b, d = (f"{PREFIX}{path}.vera_lambda_{side}" for side in ("b", "d"))
        if d not in adapter.shapes:
            raise UserError(f"{adapter.weights} holds {b} without {d}.")
        size = changes.size(path, b)
        _check(adapter, b, {size[:1]})
        wide = matrices.b.shape[0], matrices.a.shape[1]
        if wide[0] < size[0] or wide[1] < size[1]:
            raise _misfit(adapter, "the pair of random matrices", wide, size)
        yield path, size, {b, d}


def merge_loha(adapter: StoredAdapter, changes: Changes) -> set[str]:
    """LoHa: add the two products of matrices, multiplied element by element."""
    used: set[str] = set()
    for path in adapter.paths(".hada_w1_a"):
        keys = [f"{PREFIX}{path}.hada_{name}" for name in ("w1_a", "w1_b", "w2_a", "w2_b")]
        for key in keys:
            if key not in adapter.shapes:
                raise UserError(f"{adapter.weights} holds {keys[0]} without {key}.")
        (out_features, in_features), rank = changes.size(path, keys[0]), adapter.shapes[keys[1]][:1]
        for key, size in zip(keys, 2 * [(out_features, *rank), (*rank, in_features)], strict=True):
            _check(adapter, key, {size})
        alpha = value_of(adapter.config.get("alpha_pattern") or {}, path, adapter.config.get("alpha", 8))

        def change(weight: Tensor, keys: Sequence[str] = keys, scale: float = alpha / rank[0]) -> Tensor:
            a1, b1, a2, b2 = map(adapter.read, keys)
            return weight + scale * (a1 @ b1) * (a2 @ b2)

        changes.add(path, change)
        used |= set(keys)
    return used


def merge_ia3(adapter: StoredAdapter, changes: Changes) -> set[str]:
    """IA3: scale a weight's rows and the bias, or, of feed-forward modules, its columns."""
    used = set()
    for path in adapter.paths(".ia3_l"):
        key = f"{PREFIX}{path}.ia3_l"
        out_features, in_features = changes.size(path, key)
        scales_input = adapter.shapes[key][0] == 1
        _check(adapter, key, {(1, in_features)} if scales_input else {(out_features, 1)})
        changes.add(path, lambda weight, key=key: weight * adapter.read(key))  # type: ignore[misc]
        if not scales_input and changes.name(path, "bias") is not None:
            changes.add(path, lambda bias, key=key: bias * adapter.read(key).flatten(), "bias")  # type: ignore[misc]
        used.add(key)
    return used


def merge_diff_pruning(adapter: StoredAdapter, changes: Changes) -> set[str]:
    """Diff pruning: add the masked difference."""
    used = set()
    for path in adapter.paths(".diff.weight"):
        difference, mask = (f"{PREFIX}{path}.diff.{leaf}" for leaf in ("weight", "log_alpha"))
        if mask not in adapter.shapes:
            raise UserError(f"{adapter.weights} holds {difference} without {mask}.")
        size = changes.size(path, difference)
        for key in (difference, mask):
            _check(adapter, key, {size})

        def change(weight: Tensor, difference: str = difference, mask: str = mask) -> Tensor:
            return weight + gate(adapter.read(mask), None)[0] * adapter.read(difference)

        changes.add(path, change)
        used |= {difference, mask}
    return used


MERGES: Mapping[str, Callable[[StoredAdapter, Changes], set[str]]] = {
    "LORA": merge_lora,
    "VERA": merge_vera,
    "IA3": merge_ia3,
    "DIFF_PRUNING": merge_diff_pruning,
    "LOHA": merge_loha,
}
"""By kind: adds an adapter's changes, and returns the keys of the tensors that they use."""

UNMERGEABLE: Mapping[str, str] = {
    "BOTTLENECK": "a bottleneck is a small network of its own after a module, which is not linear",
    "PREFIX_TUNING": "a prefix adds keys and values to attention, which no weight holds",
    "PROMPT_TUNING": "a prompt adds virtual tokens, which no weight holds",
    "P_TUNING": "a prompt adds virtual tokens, which no weight holds",
}
"""Why other kinds cannot be merged exactly."""


def merge_kind(adapter: StoredAdapter, changes: Changes) -> set[str]:
    """Add an adapter's changes.

    Returns:
        The keys of the tensors that they use.

    Raises:
        UserError: Its kind cannot be merged, or it is not this backbone's.
    """
    merge = MERGES.get(adapter.kind)
    if merge is not None:
        return merge(adapter, changes)
    reason = UNMERGEABLE.get(adapter.kind, f"only {', '.join(MERGES)} are supported")
    raise UserError(f"{adapter.directory}: {adapter.kind} cannot be merged into a backbone: {reason}.")


def _check(adapter: StoredAdapter, key: str, allowed: set[tuple[int, ...]]) -> None:
    if adapter.shapes[key] not in allowed:
        raise _misfit(adapter, key, adapter.shapes[key], next(iter(allowed)))


def _misfit(adapter: StoredAdapter, what: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> UserError:
    return UserError(
        f"{adapter.weights}: {what} of shape {list(found)} do not fit the backbone, which needs {list(wanted)}: give "
        "the one it was trained on."
    )
