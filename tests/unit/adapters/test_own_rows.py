"""Fields for own rows of the vocabulary: their meaning on tied and untied backbones, and what is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from megatron_mux.adapters.attach import AdapterSet
from megatron_mux.adapters.host import Host
from megatron_mux.adapters.lora import LoraSpec
from megatron_mux.adapters.registry import KINDS
from megatron_mux.adapters.vocabulary_fields import OwnMatrix
from megatron_mux.errors import UserError
from megatron_mux.kernels.own_rows import Lookup, OwnRows, VocabularyPart
from megatron_mux.memory.forms.task_adapters import TaskAdapters
from megatron_mux.runtime import Parallel
from tests.end_to_end.harness import make_spec
from tests.unit.adapters.toy import sizes

EMBEDDING = "base_model.model.model.embed_tokens"
HEAD = "base_model.model.lm_head"
DELTA = "token_adapter.trainable_tokens_delta"


def lora(**fields: Any) -> LoraSpec:
    return LoraSpec(peft_type="LORA", target_modules=["q_proj"], **fields)


@pytest.mark.parametrize("tied", [False, True])
def test_fields_mean_what_they_mean_to_peft(tied: bool) -> None:
    shape = replace(sizes(), tied=tied)

    def rows(**fields: Any) -> tuple[OwnMatrix, ...]:
        return lora(**fields).own_rows(shape)

    whole = OwnMatrix(f"{EMBEDDING}.weight", ("embedding",)), OwnMatrix(f"{HEAD}.weight", ("head",))
    assert rows() == ()
    assert rows(modules_to_save=["model.embed_tokens", "lm_head", "embed_tokens"]) == whole
    places = ("embedding", "head") if tied else ("embedding",)
    of_embedding = OwnMatrix(f"{EMBEDDING}.{DELTA}", places, (5, 3))  # type: ignore[arg-type]
    of_head = OwnMatrix(f"{HEAD}.{DELTA}", ("head",), (5, 3))
    assert rows(trainable_token_indices=[5, 3]) == (of_embedding,)
    assert rows(trainable_token_indices={"embed_tokens": [5, 3]}) == (of_embedding,)
    assert rows(trainable_token_indices={"lm_head": [5, 3]}) == (of_head,)
    both = {"lm_head": [5, 3], "embed_tokens": [5, 3]}
    assert rows(trainable_token_indices=both) == ((of_embedding,) if tied else (of_embedding, of_head))
    others = rows(trainable_token_indices={"embed_tokens": [3, 5], "lm_head": [5, 3]})
    assert [matrix.places for matrix in others] == [("embedding",), ("head",)]


REFUSED: list[tuple[dict[str, Any], bool, str]] = [
    (
        {"modules_to_save": ["norm"]},
        False,
        "modules_to_save: 'norm' is neither the embedding nor the output layer",
    ),
    ({"modules_to_save": ["score"]}, False, "only embed_tokens and lm_head can be named"),
    ({"trainable_token_indices": {"q_proj": [1]}}, False, "trainable_token_indices: 'q_proj' is neither"),
    ({"trainable_token_indices": [1, 10**6]}, False, "trainable_token_indices: 1000000 is no token"),
    (
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        True,
        "ensure_weight_tying: with modules_to_save it trains one copy",
    ),
    (
        {"trainable_token_indices": {"embed_tokens": [1], "lm_head": [2]}, "ensure_weight_tying": True},
        True,
        "has other tokens for lm_head than for embed_tokens",
    ),
    (
        {"modules_to_save": ["lm_head"], "trainable_token_indices": [1]},
        True,
        "already trains all rows of lm_head .the two are one matrix",
    ),
    (
        {"modules_to_save": ["embed_tokens"], "trainable_token_indices": [1]},
        False,
        "already trains all rows of embed_tokens: choose one",
    ),
]


@pytest.mark.parametrize(("fields", "tied", "said"), REFUSED)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], tied: bool, said: str) -> None:
    with pytest.raises(UserError, match=said):
        lora(**fields).tensors(replace(sizes(), tied=tied))


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([-1], "-1 is no token"),
        ([4, 4], "names token 4 twice"),
        ({"lm_head": []}, "names no token for lm_head"),
    ],
)
def test_tokens_are_validated(tokens: Any, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        lora(trainable_token_indices=tokens)


def test_kinds_have_the_fields_that_peft_gives_them() -> None:
    having = {name for name, kind in KINDS.items() if "modules_to_save" in kind.model_fields}
    assert having == {"LORA", "LOHA", "VERA", "IA3"}
    assert {n for n, kind in KINDS.items() if "trainable_token_indices" in kind.model_fields} == {"LORA"}


def test_a_task_without_a_place_for_its_rows_is_refused() -> None:
    parallel = Parallel.alone(torch.device("cpu"))
    adapters = AdapterSet(Host([], parallel, torch.float32, sizes()))
    task = make_spec(
        "own", lora(modules_to_save=["lm_head"]).model_dump(exclude_unset=True), {"max_steps": 1}
    )
    with pytest.raises(
        UserError, match=r"task 'own': modules_to_save and .* not supported with split fine-tuning"
    ):
        adapters.add(task, 1)
    assert not adapters.tasks


def test_memory_knows_them() -> None:
    shape = sizes()

    def values(**fields: Any) -> TaskAdapters:
        section = lora(**fields).model_dump(exclude_unset=True)
        return TaskAdapters.of(make_spec("own", section, {"max_steps": 1}), shape)

    plain, own = values(), values(modules_to_save=["embed_tokens", "lm_head"])
    matrix = shape.vocab * shape.hidden
    assert own.values(range(1), 2) - plain.values(range(1), 2) == matrix / 2
    last = range(shape.layers - 1, shape.layers)
    assert own.values(last, 1) - plain.values(last, 1) == matrix
    assert (plain.lowest_layer, own.lowest_layer) == (0, -1)
    assert values(trainable_token_indices=[1]).lowest_layer == -1
    assert values(modules_to_save=["lm_head"]).lowest_layer == 0


def test_a_lookup_leaves_other_rows_alone() -> None:
    """Rows without a task's own token are bit for bit the backbone's, and NaN stays with its token."""
    hidden = torch.randn(6, 4)
    tokens = torch.tensor([3, 5, 5, 3, 9, 5])
    values = torch.stack([torch.full((4,), torch.nan), torch.ones(4)])
    own = OwnRows(values, torch.zeros(2, 4), torch.tensor([3, 9]), slice(0, 2))
    part = VocabularyPart(0, 10, lambda: values)
    anchor = torch.zeros(0, requires_grad=True)
    lookup = Lookup(part, tokens, [(slice(2, 5), own)], 0, False, None)
    found = lookup.replace(hidden.clone(), anchor)
    kept = [0, 1, 2, 5]
    assert (
        torch.equal(found[kept], hidden[kept]) and found[3].isnan().all() and torch.equal(found[4], values[1])
    )
    gradient = torch.randn(6, 4)
    gradient[0] = torch.nan
    found.backward(gradient)
    assert torch.equal(own.gradient, gradient[[3, 4]])
