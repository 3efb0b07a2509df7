"""What a group of frozen weights keeps between uses."""

from __future__ import annotations

from megatron_mux.backbone.weight_group import FetchedBytes, WeightGroup


def bytes_of(group: WeightGroup) -> FetchedBytes:
    """The bytes that a group keeps; it keeps some unless all of it is resident as it is."""
    assert group.fetched is not None
    return group.fetched
