"""Fields of peft for rows of the embedding and of the output layer that a task trains beside its adapter.

As in peft 0.21: `modules_to_save` copies a matrix, `trainable_token_indices` only the rows of some tokens. In a
backbone whose output layer is the embedding, copies are independent, while rows of the embedding count for both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import PlainValidator

from megatron_mux.adapters.targets import matches
from megatron_mux.errors import UserError
from megatron_mux.kernels.own_rows import Place
from megatron_mux.section import Section, problem, shown
from megatron_mux.shape import BackboneShape

_SAVED, _TOKENS, _TYING = "modules_to_save", "trainable_token_indices", "ensure_weight_tying"


@dataclass(frozen=True)
class OwnMatrix:
    """A matrix, or rows of one, that a task trains in place of the backbone's.

    Attributes:
        key: Its name in `adapter_model.safetensors`.
        places: The backbone's matrices that it stands for; the first one's stage owns it.
        tokens: The tokens of its rows; None: the whole vocabulary.
    """

    key: str
    places: tuple[Place, ...]
    tokens: tuple[int, ...] | None = None

    def size(self, shape: BackboneShape) -> tuple[int, int]:
        """Its rows and columns."""
        return shape.vocab if self.tokens is None else len(self.tokens), shape.hidden

    def layers(self, shape: BackboneShape) -> tuple[int, ...]:
        """The first layer, the last one or both: those of the stages that hold it, the owner's first."""
        ends: dict[Place, int] = {"embedding": 0, "head": shape.layers - 1}
        return tuple(ends[place] for place in self.places)


class SavesModules(Section):
    """The field of all of peft's tuners for whole matrices."""

    modules_to_save: list[str] | None = None
    """The embedding, the output layer or both, by their Hugging Face names: the task trains a copy of its own."""

    def own_rows(self, shape: BackboneShape) -> tuple[OwnMatrix, ...]:
        """See `AdapterSpec.own_rows`."""
        return _own_rows(shape, self.modules_to_save, None, False)


def _tokens(value: Any) -> Any:
    """Check `trainable_token_indices`; nothing named is None."""
    by_name = value if isinstance(value, dict) else {"": value or []}
    for name, tokens in by_name.items():
        where = f" for {name}" if name else ""
        is_list = isinstance(name, str) and isinstance(tokens, (list, tuple))
        if not is_list or not all(type(token) is int for token in tokens):
            raise problem(
                "must be a list of tokens such as [5, 32000], or map module names to such lists, "
                f"got {shown(value)}"
            )
        if name and not tokens:
            raise problem(f"names no token{where}")
        if min(tokens, default=0) < 0:
            raise problem(f"{shown(min(tokens))}{where} is no token: tokens count from 0")
        if len(set(tokens)) < len(tokens):
            twice = next(token for token in tokens if tokens.count(token) > 1)
            raise problem(f"names token {twice} twice{where}")
    return value or None


Tokens = Annotated[list[int] | dict[str, list[int]] | None, PlainValidator(_tokens)]
"""Tokens of the embedding, or tokens by the name of a matrix."""


class SavesTokens(SavesModules):
    """The fields of `peft.LoraConfig`: whole matrices, or rows of some tokens."""

    trainable_token_indices: Tokens = None
    """Tokens whose rows of the embedding the task trains, or tokens for each matrix by its Hugging Face name."""
    ensure_weight_tying: bool = False
    """Refuse different tokens for the embedding and an output layer that is the embedding."""

    def own_rows(self, shape: BackboneShape) -> tuple[OwnMatrix, ...]:
        """See `AdapterSpec.own_rows`."""
        given = self.trainable_token_indices
        by_name: Mapping[str, Sequence[int]] = {}
        if given is not None:
            by_name = given if isinstance(given, dict) else {shape.names.embedding: given}
        return _own_rows(shape, self.modules_to_save, by_name, self.ensure_weight_tying)


def _own_rows(
    shape: BackboneShape,
    saved: Sequence[str] | None,
    by_name: Mapping[str, Sequence[int]] | None,
    ensure_tying: bool,
) -> tuple[OwnMatrix, ...]:
    """See `AdapterSpec.own_rows`.

    Args:
        by_name: Tokens by the matrix's name.
    """
    copied: dict[Place, None] = dict.fromkeys(_place(name, shape, _SAVED) for name in saved or ())
    if copied and ensure_tying and shape.tied:
        raise UserError(
            f"{_TYING}: with {_SAVED} it trains one copy for the embedding and the output layer, which is not "
            f"supported: leave it out (the copies are then independent), or use {_TOKENS}"
        )
    matrices = [OwnMatrix(f"{_prefix(place, shape)}.weight", (place,)) for place in copied]
    for matrix in _token_rows(shape, by_name or {}, ensure_tying):
        both = [place for place in matrix.places if place in copied]
        if both:
            reason = " (the two are one matrix in this backbone)" if len(matrix.places) > 1 else ""
            raise UserError(
                f"{_TOKENS}: {_SAVED} already trains all rows of {_name(both[0], shape)}{reason}: choose one of them"
            )
        matrices.append(matrix)
    return tuple(matrices)


def _token_rows(
    shape: BackboneShape, by_name: Mapping[str, Sequence[int]], ensure_tying: bool
) -> list[OwnMatrix]:
    tokens: dict[Place, tuple[int, ...]] = {}
    for name, ids in by_name.items():
        place = _place(name, shape, _TOKENS)
        if place in tokens:
            raise UserError(f"{_TOKENS}: names {_name(place, shape)} twice: name it once, with all tokens")
        if max(ids) >= shape.vocab:
            raise UserError(f"{_TOKENS}: {max(ids)} is no token: the backbone's vocabulary has {shape.vocab}")
        tokens[place] = tuple(ids)
    places = tuple(sorted(tokens))
    if shape.tied and "embedding" in tokens:
        if tokens.get("head", tokens["embedding"]) == tokens["embedding"]:
            places = ("embedding",)
        elif ensure_tying:
            raise UserError(
                f"{_TYING}: {_TOKENS} has other tokens for {_name('head', shape)} than for "
                f"{_name('embedding', shape)}: name the same ones, or leave {_TYING} out"
            )
    tied = shape.tied and places == ("embedding",)
    return [
        OwnMatrix(
            f"{_prefix(place, shape)}.token_adapter.trainable_tokens_delta",
            ("embedding", "head") if tied else (place,),
            tokens[place],
        )
        for place in places
    ]


def _path(place: Place, shape: BackboneShape) -> str:
    return shape.names.embedding if place == "embedding" else shape.names.head


def _name(place: Place, shape: BackboneShape) -> str:
    return _path(place, shape).rpartition(".")[2]


def _prefix(place: Place, shape: BackboneShape) -> str:
    return f"base_model.model.{_path(place, shape)}"


def _place(name: str, shape: BackboneShape, field: str) -> Place:
    """The matrix that a name means.

    Raises:
        UserError: It means another module.
    """
    places: tuple[Place, ...] = ("embedding", "head")
    for place in places:
        if matches(name, _path(place, shape)):
            return place
    raise UserError(
        f"{field}: {shown(name)} is neither the embedding nor the output layer of this backbone: "
        f"only {_name('embedding', shape)} and {_name('head', shape)} can be named"
    )
