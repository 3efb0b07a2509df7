"""Passing the records of tasks through a backbone to see which experts they select (VELA section IV-B)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch

from megatron_mux.batch.pack import PackedSequence, pack
from megatron_mux.batch.packed_batch import activate
from megatron_mux.moe.access_profile import AccessProfile, ModelIdentity, RoutedSet
from megatron_mux.moe.observe import Counts, LayerCounts, observing

if TYPE_CHECKING:
    from megatron_mux.backbone.model import Backbone
    from megatron_mux.backbone.registry import BackboneInfo

_PASS_TOKENS = 2048


class Records(Protocol):
    """Records of a task, each with `tokens` and `labelled`."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Any: ...


def identity(info: BackboneInfo) -> ModelIdentity:
    """What tells a backbone from others in profiles and placements."""
    shape = info.shape
    assert shape.experts is not None
    return ModelIdentity(
        family=shape.family,
        layers=len(shape.experts.layers(shape.layers)),
        experts=shape.experts.count,
        top_k=shape.experts.routing.top_k,
        hidden_size=shape.hidden,
        fingerprint=info.fingerprint,
    )


def profile_tasks(
    backbone: Backbone,
    records: Mapping[str, Records],
    tokens: int,
    passed: Callable[[int], None] = lambda count: None,
) -> AccessProfile:
    """Count the experts that the records of tasks select.

    Args:
        backbone: The whole model, in one stage.
        tokens: Tokens of each task, or as many as it has.
        passed: Called with the number of tokens that have passed since it was last called.
    """
    by_task: dict[str, Counts] = {}
    for name, of_task in records.items():
        with observing(backbone) as counts, torch.no_grad():
            for sequences in _passes(name, of_task, tokens):
                batch = pack(sequences, (name,), {name: 0}, training=False).to(backbone.device)
                with activate(batch):
                    backbone.forward(batch)
                passed(batch.rows)
        by_task[name] = counts
    return _profile(backbone, by_task)


def _passes(name: str, records: Records, most: int) -> Iterator[list[PackedSequence]]:
    """A task's records, packed into passes, up to about so many tokens."""
    sequences: list[PackedSequence] = []
    waiting = total = 0
    for number in range(len(records)):
        record = records[number]
        sequences.append(PackedSequence(name, number, record.tokens, record.labelled, 1.0))
        waiting, total = waiting + len(record.tokens), total + len(record.tokens)
        if waiting >= _PASS_TOKENS or total >= most:
            yield sequences
            sequences, waiting = [], 0
        if total >= most:
            return
    if sequences:
        yield sequences


def _profile(backbone: Backbone, by_task: Mapping[str, Counts]) -> AccessProfile:
    model = identity(backbone.info)
    assert backbone.shape.experts is not None
    layers = backbone.shape.experts.layers(backbone.shape.layers)
    whole = {layer: LayerCounts.of(model.experts) for layer in layers}
    for counts in by_task.values():
        for layer in layers:
            whole[layer].merge(counts[layer])
    return AccessProfile(
        model=model,
        top_k=model.top_k,
        tokens=whole[layers[0]].tokens,
        layers=layers,
        access=[whole[layer].access().tolist() for layer in layers],  # type: ignore[arg-type]
        scores=[whole[layer].scores.tolist() for layer in layers],  # type: ignore[arg-type]
        coactivation=[whole[layer].together.tolist() for layer in layers],  # type: ignore[arg-type]
        routed_sets=tuple(
            tuple(RoutedSet(experts=e, count=count) for e, count in whole[layer].sets.most_common())
            for layer in layers
        ),
        by_task={
            name: [counts[layer].access().tolist() for layer in layers]  # type: ignore[misc]
            for name, counts in by_task.items()
        },
    )
